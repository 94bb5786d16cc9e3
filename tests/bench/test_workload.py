"""The workloads are the ones that every engine is measured on, to the token; in small they keep their kind."""

import functools
import hashlib
import json

import pytest

from cairn.bench.everyday import EVERYDAY
from cairn.bench.workload import (
    COMPARED,
    WORKLOADS,
    WorkloadRequest,
    choose,
    in_small,
    requests,
    totals,
)
from cairn.core.errors import UsageError

# sha256 of json.dumps([(prompt, output), ...]), from the definition that the peers were measured with.
HASHES = {
    "nano": "d72f19b572464c05566d40fbff7b8f142c4e61bc837a149cb1d51f29b9cb44fa",
    "latency": "07bf0511555cbe33d6878ac951a9dffc825539f5e252376638f638fa34149edc",
    "prefill": "f189e7b64efd15a74e8b550d8f005292b8461168d2aa5d19820c94f3dfa82e6b",
    "decode": "59a95c7b965311afc2bf8bb118194424cebc05cf4dc33ee03e2a0a8d4e9cb009",
    "shared": "b2090dab1d9b2d570603bcefd051815274b959a43c38f6c467ee4b8800e188de",
}
TOTALS = {
    "nano": (256, 142_827, 133_966, 2011),  # as nano-vllm's own benchmark counts them
    "latency": (1, 128, 256, 384),
    "prefill": (64, 131_072, 64, 2049),
    "decode": (256, 262_144, 65_536, 1280),
    "shared": (256, 524_288, 16_384, 2112),
}


@functools.cache
def full_size(name: str) -> list[WorkloadRequest]:
    return requests(name)


@pytest.mark.parametrize("name", COMPARED)
def test_the_requests_are_the_same_everywhere(name):
    made = full_size(name)
    plain = json.dumps([(one.prompt, one.output) for one in made])
    assert hashlib.sha256(plain.encode()).hexdigest() == HASHES[name]
    assert totals(made) == TOTALS[name]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scale", [0.5, 0.1, 0.003])
def test_in_small_everything_shrinks_and_nothing_vanishes(name, scale):
    full = full_size(name)
    small = in_small(full, scale)
    assert 1 <= len(small) <= len(full) * scale + 1
    for one, whole in zip(small, full, strict=False):
        assert 1 <= len(one.prompt) <= len(whole.prompt) * scale + 2
        assert 1 <= one.output <= whole.output * scale + 1


def test_in_small_a_prefix_is_still_shared_and_a_tail_still_is_not():
    small = requests("shared", 0.1)
    heads = {tuple(one.prompt[: one.shared]) for one in small}
    tails = {tuple(one.prompt[one.shared :]) for one in small}
    assert (len(heads), len(tails)) == (1, 26)
    assert {len(head) for head in heads} == {180}


def test_conversations_have_the_lengths_of_people():
    full = full_size("conversations")
    read, written = [len(one.prompt) for one in full], [one.output for one in full]
    assert sum(read) / len(full) == pytest.approx(161, rel=0.2)
    assert sum(written) / len(full) == pytest.approx(338, rel=0.2)
    assert max(read) > 5 * sorted(read)[len(read) // 2]  # a long tail
    assert {tuple(one.sampling) for one in full_size("logprobs")} == {("logprobs",)}
    assert len({str(one.sampling) for one in full_size("sampled")}) == 5


@pytest.mark.parametrize(("name", "people", "turns"), [("turns", 64, 4), ("agents", 32, 6)])
@pytest.mark.parametrize("scale", [1, 0.6])
def test_a_turn_stands_behind_everything_that_was_said_before(name, people, turns, scale):
    full = in_small(full_size(name), scale)
    assert len(full) == -(-people * turns * scale // 1)
    for place, one in enumerate(full):
        assert one.follows == (None if place < people else place - people)
        last = None if one.follows is None else full[one.follows]
        assert one.before == (last.length + last.output if last else 0)
    assert len({tuple(one.prompt[: one.shared]) for one in full[:people]}) == 1


def test_choosing():
    assert choose(["all"]) == list(COMPARED)
    assert choose(["everyday", "nano"]) == ["nano", *EVERYDAY]
    assert choose(["shared", "nano"]) == ["nano", "shared"]
    with pytest.raises(UsageError, match="no workload 'nanoo'") as raised:
        choose(["nanoo"])
    assert "nano" in (raised.value.hint or "")


@pytest.mark.parametrize("scale", [0, -1, 1.5, float("nan")])
def test_a_scale_that_is_none(scale):
    with pytest.raises(UsageError, match="scale is"):
        requests("nano", scale)


def test_a_workload_that_is_none():
    with pytest.raises(UsageError, match="no workload 'x'"):
        requests("x")
