"""The words of a job's argv and environment reach its program as they stand, on every engine: no $ is filled in."""

import re
import subprocess

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.utils.api import macros

from cairn.cluster.backends.kubernetes import objects
from cairn.cluster.backends.slurm_script import script
from cairn.cluster.inventory import ClusterInventory
from cairn.cluster.resolve import resolve
from cairn.cluster.spec import Job, Role

ANY = ClusterInventory(engine="kubernetes", queues=[], needs_image=False, checked=False)
WORDS = [
    "sh",
    "-c",
    'echo "$$ $local_rank ${local_rank} $(CAIRN_JOB) $SLURM_JOB_ID $CAIRN_ATTEMPT"',
]
KNOWN = {"CAIRN_JOB": "words", "HOME": "/root"}


def job_of(words, start="elastic"):
    role = Role(argv=words, nodes=2, start=start, image="cairn:cpu", env={"SAID": words[-1]})
    return Job(name="words", roles=[role])


def as_the_kubelet_passes_it(word):
    """$(NAME) of a variable that is there, and one $ for two; anything else stays."""
    return re.sub(
        r"\$(?:(\$)|\(([A-Z_]+)\))", lambda m: "$" if m[1] else KNOWN.get(m[2], m[0]), word
    )


def program_of(argv, elastic=True):
    """What a rank is told to start, once torchrun has read it."""
    argv = macros.substitute(argv, "0") if elastic else argv
    return argv[argv.index("cairn.cluster.rank") + 2 :]


# With a space: in a single word, braces around what nobody knows are refused as a typo.
dollars = st.lists(
    st.sampled_from(["$", "(", ")", "{", "}", "HOME", "local_rank", "CAIRN_JOB", " "]), min_size=1
).map(lambda parts: "a " + "".join(parts).replace("{", "${"))


@given(dollars, st.sampled_from(["elastic", "direct"]))
def test_no_dollar_is_filled_in_on_kubernetes(word, start):
    plan = resolve(job_of(["sh", "-c", word], start), ANY)
    (worker,) = objects(plan, "jobset")[0]["spec"]["replicatedJobs"]
    (pod,) = worker["template"]["spec"]["template"]["spec"]["containers"]
    passed = [as_the_kubelet_passes_it(one) for one in pod["command"]]
    assert program_of(passed, start == "elastic") == ["sh", "-c", word]
    env = {one["name"]: one["value"] for one in pod["env"] if "value" in one}
    assert as_the_kubelet_passes_it(env["SAID"]) == word


def test_no_dollar_is_filled_in_on_slurm(tmp_path):
    """The script's own line, by a real shell: srun is one that runs what it is told to."""
    shown = tmp_path / "python"
    shown.write_text('#!/bin/sh\nprintf \'%s\\n\' "$@" SAID "$SAID"\n')
    shown.chmod(0o755)
    text = script(resolve(job_of(WORDS), ANY), str(tmp_path), [], str(shown), containers=False)
    begin = text.index("\nsrun ")
    line = text[begin : text.index(" &\n", begin)]
    srun = 'srun() { while [ "${1#-}" != "$1" ]; do shift; done; "$@"; }\n'
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "CAIRN_ATTEMPT": "0"}
    done = subprocess.run(
        ["bash", "-c", srun + line], env=env, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "--rdzv-id=worker-7-0" in lines
    said = lines.index("SAID")
    assert program_of(lines[:said]) == WORDS
    assert lines[said + 1] == WORDS[-1]
