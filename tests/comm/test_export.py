"""Schedules for other programs: GOAL whose waits are those of the proof, JSON that reads back as the same schedule."""

import json
from collections import defaultdict

import msgspec
import numpy as np
import pytest

from cairn.cli.main import main
from cairn.comm.schedule.catalogue import make, names
from cairn.comm.schedule.export import document, goal, schedule_from
from cairn.comm.schedule.ops import ScheduleError
from cairn.comm.schedule.verify import verify

ALL = names()
CHUNK = 1000


class Goal:
    """A file of GOAL, run by hand: a message takes 1, connections hold one message, all else is free."""

    def __init__(self, lines):
        self.ops, self.needs = {}, defaultdict(list)
        rank = -1
        for line in lines:
            words = line.split()
            if words[:1] == ["rank"]:
                rank = int(words[1])
            elif words[:1] == ["num_ranks"]:
                self.ranks = int(words[1])
            elif words[1:2] in (["requires"], ["irequires"]):
                assert (rank, words[0]) in self.ops
                assert (rank, words[2]) in self.ops
                self.needs[rank, words[0]].append((rank, words[2]))
            elif len(words) > 1:
                self.ops[rank, words[0].removesuffix(":")] = words[1:]
        self.sends = self._by_line("send")
        self.receives = self._by_line("recv")
        self.times = {}

    def _by_line(self, verb):
        """{(from, to, tag): operation}."""
        found = {}
        for (rank, label), words in self.ops.items():
            if words[0] == verb:
                ends = (rank, int(words[3])) if verb == "send" else (int(words[3]), rank)
                assert (*ends, int(words[5])) not in found
                found[(*ends, int(words[5]))] = (rank, label)
        return found

    def bytes(self, place):
        return int(self.ops[place][1].removesuffix("b"))

    def time(self, place):
        if place not in self.times:
            self.times[place] = None  # a circle would meet it
            words = self.ops[place]
            at = max([self.time(other) for other in self.needs[place]], default=0)
            if words[0] == "recv":
                at = max(at, self.time(self.sends[int(words[3]), place[0], int(words[5])]) + 1)
            if words[0] == "send":
                at = max(at, self._room(place[0], int(words[3]), int(words[5]), words[7]))
            self.times[place] = at
        return self.times[place]

    def _room(self, source, target, tag, cpu):
        earlier = [
            (other, place)
            for (a, b, other), place in self.receives.items()
            if (a, b) == (source, target) and other < tag and self.ops[place][7] == cpu
        ]
        return self.time(max(earlier)[1]) if earlier else 0


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_goal_has_the_bytes_and_the_waits_of_the_proof(collective, name):
    for ranks, parts in ((2, 1), (3, 1), (8, 1), (5, 2)):
        schedule = make(collective, name, ranks, parts=parts)
        proof = verify(schedule)
        found = Goal(goal(schedule, CHUNK * schedule.chunks))
        assert found.ranks == schedule.nodes
        assert found.sends.keys() == found.receives.keys()
        for line, place in found.sends.items():
            assert found.bytes(place) == found.bytes(found.receives[line])
        sent = sum(found.bytes(place) for place in found.sends.values())
        assert sent == CHUNK * int((schedule.ops.kind == 0).sum())
        if (
            parts == 1
        ):  # cut chunks of one step are one message here, and several in a proof's connection
            assert max([found.time(place) for place in found.ops], default=0) == proof.steps


def test_sums_take_the_time_that_is_asked_for():
    schedule = make("all_reduce", "ring", 4)
    lines = list(goal(schedule, 4 * CHUNK, gb_per_s=10.0))
    assert sum("calc 100 cpu 0" in line for line in lines) == 4 * 3
    assert not any("calc" in line for line in goal(schedule, 4 * CHUNK))


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_json_reads_back_as_the_same_schedule(collective, name):
    schedule = make(collective, name, 6, parts=2, channels=2)
    again = schedule_from(msgspec.json.encode(document(schedule, 1 << 20)))
    for mine, theirs in zip(schedule.ops, again.ops, strict=True):
        assert np.array_equal(mine, theirs)
    assert verify(again) == verify(schedule)


def test_a_document_that_lies_is_not_proved(capsys, tmp_path):
    path = tmp_path / "ring.json"
    assert main(["comm", "export", "all_gather/ring", "--ranks", "3", "--format", "json",
                 "--out", str(path)]) == 0  # fmt: skip
    assert main(["comm", "verify", "--file", str(path), "--json"]) == 0
    written = json.loads(path.read_text())
    written["threads"][1]["operations"][1]["slot"] = 2
    path.write_text(json.dumps(written))
    capsys.readouterr()
    assert main(["comm", "verify", "--file", str(path), "--show"]) == 1
    assert "rank 1" in capsys.readouterr().out


def test_on_the_terminal(capsys):
    words = ["comm", "export", "all_reduce/two_level", "--ranks", "4", "--gpus", "2"]
    assert main([*words, "--size", "4KiB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("num_ranks 4\n")
    assert "send 1024b to" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("all_reduce/rign", "did you mean 'all_reduce/ring'"),
        ("all_reduce/ring --ranks 0", "0 ranks"),
        ("all_reduce/ring --size 0", "0 bytes"),
        ("all_reduce/ring --sum-rate -1", "-1.0 GB/s"),
        ("all_reduce/ring --out /nowhere/x", "cannot write /nowhere/x"),
    ],
)
def test_mistakes_are_refused(capsys, words, said):
    assert main(["comm", "export", *words.split()]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 10**9, "nodes": 10**9}, {"collective": "all_reduced"}, {"version": 2}, {"slots": 10**12},
        {"nodes": 1}, {"root": 9}, {"chunks": 0}, {"ranks": -1}, {"threads": []},
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_told_and_not_tried(change, tmp_path, capsys):
    written = msgspec.to_builtins(document(make("all_reduce", "ring", 3), 300)) | change
    path = tmp_path / "x.json"
    path.write_text(json.dumps(written))
    assert main(["comm", "verify", "--file", str(path)]) in (1, 2)
    out = capsys.readouterr()
    assert "Traceback" not in out.err


@pytest.mark.parametrize(
    ("where", "number"),
    [("slot", 10**25), ("peer", 10**25), ("step", 10**25), ("step", 2**62), ("step", -4), ("channel", 2**62)],
)  # fmt: skip
def test_numbers_of_an_operation_that_cannot_be_are_refused(where, number):
    written = msgspec.to_builtins(document(make("all_reduce", "ring", 3), 300))
    thread = written["threads"][0]
    (thread if where == "channel" else thread["operations"][0])[where] = number
    with pytest.raises(ScheduleError, match="out of range"):
        schedule_from(json.dumps(written))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 1'])
def test_what_is_no_schedule_is_refused(text, tmp_path, capsys):
    with pytest.raises(ScheduleError, match="this is no schedule"):
        schedule_from(text)
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["comm", "verify", "--file", str(path)]) != 0
    assert "this is no schedule" in capsys.readouterr().err
