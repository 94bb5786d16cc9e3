"""The secret of a launched job: all ranks agree on one, and it lies where only its owner reads it."""

import os

import pytest

from cairn.core.errors import ConfigError
from cairn.core.shared_secret import Secret
from cairn.train.recovery import node_memory
from cairn.train.recovery.resume_agreement import Arrived, secret_of

KNOWN = Secret(b"known before")


def arrived(*known):
    return [Arrived(f"host-{n}", one, Secret(b"fresh %d" % n)) for n, one in enumerate(known)]


def test_where_nobody_knows_one_that_of_rank_0_counts_else_what_has_outlived_the_ranks():
    assert secret_of(arrived(None, None)) == Secret(b"fresh 0")
    assert secret_of(arrived(None, KNOWN, KNOWN)) == KNOWN  # rank 0 is on a new node
    with pytest.raises(ConfigError, match="host-0 and host-2 have different secrets"):
        secret_of(arrived(KNOWN, None, Secret(b"of somebody else")))


def test_it_lies_in_a_folder_that_only_its_owner_reads(tmp_path):
    node = node_memory.Node(tmp_path / "node", os.getpid())
    assert node.secret is None
    node.folder.mkdir(mode=0o700)
    node_memory._check_ours(node.folder)
    node_memory._write_secret(node.folder, KNOWN)
    assert node.secret == KNOWN
    assert (node.folder / node_memory.SECRET).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_somebody_else_has_made_is_refused(tmp_path):
    """Its name can be guessed."""
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(node_memory.NodeMemoryMissing, match="others could read"):
        node_memory.Node(folder, os.getpid()).secret  # noqa: B018  nothing in it is believed
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(node_memory.NodeMemoryMissing, match="others could read"):
        node_memory._check_ours(link)
