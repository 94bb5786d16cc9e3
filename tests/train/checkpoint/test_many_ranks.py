"""Checkpoints of several ranks: one that fails to write fails the save on all, and all resume from the same one."""

import contextlib
import errno
import os
import subprocess

import msgspec
import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import TINY, loop, recipe
from torch.distributed.checkpoint import FileSystemWriter

from cairn.core.errors import DataError
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.choose import choose_newest
from cairn.train.checkpoint.load import load_pieces
from cairn.train.checkpoint.piece import Piece
from cairn.train.checkpoint.save import Saver, owners, write_pieces
from cairn.train.parallel.layout import Layout, Strategy

ROWS = 4096


def pieces_at(rank, world, step, rows=ROWS):
    """Each rank has its rows of one tensor; the values name step and rank."""
    own = torch.full((rows, 8), float(100 * step + rank))
    return {"w": Piece(own, (world * rows, 8), (rank * rows, 0))}


def full(*args, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unexpected(*args, **named):
    raise ValueError("something else")


@contextlib.contextmanager
def failing(where, rank, error=full):
    """An error on one rank: in what rank 0 writes beside the tensors, or in a rank's own tensors."""
    home, name = {"about": (Saver, "_begin"), "shard": (FileSystemWriter, "write_data")}[where]
    before = getattr(home, name)
    if dist.get_rank() == rank:
        setattr(home, name, error)
    try:
        yield
    finally:
        setattr(home, name, before)


def saves_with_one_failure(rank, world, root, where, whose):
    saver, problems = Saver(root, keep=2, in_background=True), []
    for step in (1, 2, 3, 4):
        with failing(where, whose) if step == 2 else contextlib.nullcontext():
            saver.save(step, pieces_at(rank, world, step), {"step": step})
            saver.wait()
        problem = saver.problem()
        problems.append(None if problem is None else problem.message)
    return problems


@pytest.mark.parametrize(("where", "whose"), [("about", 0), ("shard", 1), ("shard", 0)])
def test_a_write_that_fails_on_one_rank_fails_that_save_alone(tmp_path, where, whose):
    """Ranks that leave a save at different points would be one save apart from then on."""
    for problems in run_ranks(2, saves_with_one_failure, tmp_path, where, whose):
        assert [problem is not None for problem in problems] == [False, True, False, False]
        assert "the disk is full" in problems[1]
    assert folders.steps(tmp_path) == [3, 4]  # of step 2 nothing is left; keep is 2
    for step in (3, 4):
        folder = folders.folder_of(tmp_path, step)
        assert folders.complaint(folder) is None
        whole = {"w": Piece(torch.empty(2 * ROWS, 8), (2 * ROWS, 8), (0, 0))}
        load_pieces(folder, whole)
        assert whole["w"].tensor[:, 0].unique().tolist() == [100.0 * step, 100.0 * step + 1]


def saves_with_another_error(rank, world, root, where):
    saver = Saver(root, keep=2, in_background=True)
    with failing(where, 1 if where == "shard" else 0, unexpected):
        saver.save(1, pieces_at(rank, world, 1), {})
        saver.wait()
    problem = saver.problem()
    return problem.message, problem.hint


@pytest.mark.parametrize("where", ["about", "shard"])
def test_an_error_of_one_rank_is_told_by_all_as_it_is(tmp_path, where):
    for message, hint in run_ranks(2, saves_with_another_error, tmp_path, where):
        assert "ValueError: something else" in message
        assert "disk" not in message
        assert "Errno" not in message
        assert hint == "no checkpoint is there yet to go on from"


def saves_where_one_rank_has_no_room(rank, world, root):
    saver, problems = Saver(root, keep=2, in_background=True), []
    for step in (1, 2):
        begin = saver._begin

        def link_first(folder, about, begin=begin):
            begin(folder, about)
            if rank == 0:
                (folder / "__1_0.distcp").symlink_to("/dev/full")

        saver._begin = link_first if step == 2 else begin
        saver.save(step, pieces_at(rank, world, step), {})
        saver.wait()
        problems.append(saver.problem())
    return [problem and (problem.message, problem.hint) for problem in problems]


def test_every_rank_learns_that_the_disk_of_another_one_is_full(tmp_path):
    """torch's writer says something else, and its error loses the one that it hides on the way to other ranks."""
    for first, (message, hint) in run_ranks(2, saves_where_one_rank_has_no_room, tmp_path):
        assert first is None
        assert message.endswith("the disk is full")
        assert hint.startswith("make room: older checkpoints are still there")


@pytest.fixture
def small_disk(tmp_path):
    """4 MB, which needs the right to mount."""
    tmp_path.joinpath("disk").mkdir()
    disk = tmp_path / "disk"
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def saves_on_a_disk_that_fills(rank, world, root):
    saver, told = Saver(root, keep=2, in_background=True), []
    filler = root.parent / "filler"
    for step in (1, 2, 3):
        if step == 2 and rank == 0:
            with contextlib.suppress(OSError):
                filler.write_bytes(bytes(4 << 20))
        dist.barrier()
        saver.save(step, pieces_at(rank, world, step, rows=16384), {"step": step})
        saver.wait()
        problem = saver.problem()
        told.append(None if problem is None else problem.message.partition(": ")[2])
        if step == 2 and rank == 0:
            filler.unlink()
    return told


def test_a_full_disk_on_two_ranks(small_disk):
    for told in run_ranks(2, saves_on_a_disk_that_fills, small_disk / "run"):
        assert told == [None, "the disk is full", None]
    assert folders.steps(small_disk / "run") == [1, 3]
    assert [folders.complaint(folders.folder_of(small_disk / "run", n)) for n in (1, 3)] == [
        None
    ] * 2


def test_complete_has_to_name_every_file_that_the_metadata_names(tmp_path):
    """Older checkpoints may be marked complete without the shards of one rank."""
    run_ranks(2, saves_with_one_failure, tmp_path, "about", 0)
    newest = folders.folder_of(tmp_path, 4)
    marker = folders.read_marker(newest)
    del marker.files["__1_0.distcp"]
    (newest / "__1_0.distcp").unlink()
    (newest / folders.COMPLETE).write_bytes(folders.msgspec.json.encode(marker))
    assert "__1_0.distcp is missing" in folders.complaint(newest)
    assert folders.newest(tmp_path, []) == folders.folder_of(tmp_path, 3)
    folders.keep_newest(tmp_path, 1)  # it does not count as one that is kept
    assert 3 in folders.complete_steps(tmp_path)
    with pytest.raises(DataError, match="not a whole checkpoint: __1_0"):
        folders.mark_complete(newest, 4)


# -- what several ranks hold -----------------------------------------------------------------------


def saves_its_share(rank, world, folder, layout, zero):
    """Bytes that this rank holds and has staged; the state is also written as if each rank staged all it holds."""
    model = msgspec.structs.replace(TINY, kv_heads=2)
    strategy = Strategy(zero=zero)
    one = loop(
        recipe(folder, steps=2, parallel=layout, model=model, strategy=strategy),
        world=world,
        rank=rank,
    )
    one.run()
    held = one.state.pieces()
    write_pieces(folder / "all", held, one.saver.group)
    staged = one.saver.staging
    twice = {name: tensor.data_ptr() for name, tensor in staged.items()}
    one.saver.save(3, held, one._about())
    one.saver.wait()
    assert {name: tensor.data_ptr() for name, tensor in one.saver.staging.items()} == twice
    return sum(p.tensor.nbytes for p in held.values()), {n: t.nbytes for n, t in staged.items()}


@pytest.mark.parametrize(
    ("layout", "zero"),
    [(Layout(dp=2), 0), (Layout(dp=4), 0), (Layout(dp=2), 1), (Layout(dp=2, tp=2), 0)],
    ids=["dp 2", "dp 4", "dp 2 zero 1", "dp 2 tp 2"],
)
def test_what_replicas_hold_is_staged_once_and_the_checkpoint_is_the_same(tmp_path, layout, zero):
    args = (tmp_path, layout, zero)
    held, staged = zip(*run_ranks(layout.world(), saves_its_share, *args), strict=True)
    alone = loop(recipe(tmp_path, model=msgspec.structs.replace(TINY, kv_heads=2)))
    pieces = alone.state.pieces()
    whole_state = sum(piece.tensor.nbytes for piece in pieces.values())
    each = [sum(sizes.values()) for sizes in staged]
    assert sum(held) > sum(each) == whole_state
    assert max(each) - min(each) <= max(size for sizes in staged for size in sizes.values())
    found = []
    for folder in (tmp_path / "all", folders.folder_of(alone.root, 3)):
        load_pieces(folder, pieces)  # another layout: one process reads all
        found.append({name: piece.tensor.clone() for name, piece in pieces.items()})
        for piece in pieces.values():
            piece.tensor.zero_()
    assert all(torch.equal(found[0][name], found[1][name]) for name in pieces)
    sizes = [
        sum(file.stat().st_size for file in f.glob("*.distcp")) for f in (tmp_path / "all", folder)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)  # each of them once


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), max_size=8), min_size=1))
def test_each_piece_has_one_owner_that_holds_it(drawn):
    size = {name: size for pieces in drawn for name, size in pieces}
    held = [
        [((str(name), (0,)), size[name]) for name in sorted({name for name, _ in pieces})]
        for pieces in drawn
    ]
    owner = owners(held)
    assert set(owner) == {key for pieces in held for key, _ in pieces}
    assert all(key in dict(held[rank]) for key, rank in owner.items())
    assert owner == owners(held)
    everywhere = owners([held[0]] * 3)
    each = [sum(size for key, size in held[0] if everywhere[key] == rank) for rank in range(3)]
    assert max(each) - min(each) <= max((size for _, size in held[0]), default=0)


# -- resuming ----------------------------------------------------------------------------------------


def saved(rank, world, root, count=3):
    saver = Saver(root, keep=9, in_background=False)
    for step in range(1, count + 1):
        saver.save(step, pieces_at(rank, world, step), {"step": step})


def chosen(rank, world, root, apart=False):
    read, warn = [], []
    check = folders._check

    def noted(path, number):
        read.append(path.name)
        return check(path, number)

    folders._check = noted
    try:
        found = choose_newest(root / str(rank) if apart else root, dist.group.WORLD, warn, 0.2)
    except DataError as error:
        return str(error), warn, read
    return found and found.name, warn, read


def test_all_ranks_choose_the_same_and_each_reads_its_part(tmp_path):
    run_ranks(2, saved, tmp_path)
    answers = run_ranks(2, chosen, tmp_path)
    assert [name for name, *_ in answers] == ["step-00000003"] * 2
    read = [file for *_, read in answers for file in read]
    marker = folders.read_marker(folders.folder_of(tmp_path, 3))
    assert sorted(read) == sorted(marker.files)  # each file once, by one rank
    assert min(len(read) for *_, read in answers) > 0


def test_a_part_that_one_rank_finds_damaged_is_passed_over_by_all(tmp_path):
    run_ranks(2, saved, tmp_path)
    damaged = folders.folder_of(tmp_path, 3) / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.write_bytes(content)
    (folders.folder_of(tmp_path, 4)).mkdir()  # a save that was cut off
    for name, warn, _ in run_ranks(2, chosen, tmp_path):
        assert name == "step-00000002"
        assert "has no COMPLETE" in warn[0]
        assert "__1_0.distcp is damaged" in warn[1]


def test_folders_that_ranks_do_not_share_are_refused(tmp_path):
    """A rank that sees no checkpoint would begin anew beside one that resumes."""
    run_ranks(2, saved, tmp_path / "0")
    for message, _, _ in run_ranks(2, chosen, tmp_path, True):
        assert "rank 1 does not see it" in message
    assert run_ranks(2, chosen, tmp_path / "empty") == [(None, [], [])] * 2
