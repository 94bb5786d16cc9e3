"""The watchdog says once who is stuck and where, before any timeout, and nothing while all goes well."""

import time

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks

import cairn.labs.torch_backend
from cairn.comm.doctor.findings import RankTrace, RecordedCall
from cairn.comm.watchdog import FileBoard, HangWatch, RankNote, StoreBoard, watching


def trace(rank, last, waits):
    calls = [
        RecordedCall(
            group="0", sequence=n, op="all_reduce", shapes="[[4]]", dtypes="Float", elements=4,
            entered_ns=n, done=n < last or not waits,
        )
        for n in range(max(1, last - 3), last + 1)
    ]  # fmt: skip
    return RankTrace(rank=rank, calls=calls, groups={"0": [0, 1, 2]}, source="")


def note(rank, beat, last, waits=False):
    return RankNote(
        rank=rank,
        host=f"host{rank}",
        beat=beat,
        moved=str(last),
        trace=trace(rank, last, waits),
        waits=[f"all_reduce #{last}"] if waits else [],
    )


def test_it_says_who_is_missing_once_and_that_the_job_goes_on_once():
    watch, said = HangWatch(3, patience_s=10.0), []
    for second in range(60):
        stands = 5 <= second < 40
        last = 6 if stands else 6 + second
        notes = {
            0: note(0, second, last, waits=stands),
            1: note(1, second, last - 1 if stands else last),
            2: note(2, second, last, waits=stands),
        }
        said.append(watch.look(notes, float(second)))
    spoken = [(second, text) for second, text in enumerate(said) if text]
    assert [second for second, _ in spoken] == [15, 40]
    assert "rank 1 on host1" in spoken[0][1]
    assert "ranks 0, 2 wait in all_reduce #6" in spoken[0][1]
    assert "rank 1 ends with all_reduce #5" in spoken[0][1]
    assert "goes on" in spoken[1][1]


def test_a_rank_whose_note_is_taken_away_is_named_all_the_same():
    """A rank that fails takes its note along, and the others wait for it."""
    watch, spoken = HangWatch(3, patience_s=10.0), []
    for second in range(30):
        notes = {rank: note(rank, second, 6, waits=rank != 1) for rank in range(3)}
        if second > 3:
            del notes[1]
        spoken.append(watch.look(notes, float(second)))
    early, late = filter(None, spoken)
    assert "no sign of life from rank 1 on host1" in early
    assert "rank 1 on host1 writes no notes any more" in late


def test_a_process_that_writes_no_more_notes_is_named():
    watch, spoken = HangWatch(3, patience_s=10.0), []
    for second in range(30):
        notes = {
            0: note(0, second, 6, waits=True),
            1: note(1, min(second, 3), 5),
            2: note(2, second, 6, waits=True),
        }
        said = watch.look(notes, float(second))
        if said:
            spoken.append((second, said))
    (early, first), (_, whole) = spoken
    assert early < 10  # long before the patience is over
    assert "no sign of life from rank 1 on host1" in first
    assert "rank 1 on host1 writes no notes any more" in whole


def test_a_long_computation_in_which_nobody_waits_is_no_alarm():
    watch = HangWatch(2, patience_s=10.0)
    notes = [{r: note(r, second, 4) for r in range(2)} for second in range(100)]
    assert [watch.look(one, float(second)) for second, one in enumerate(notes)] == [None] * 100


def nothing(rank):
    """Of a rank that was in no collective."""
    return RankTrace(rank=rank, calls=[], groups={}, source="")


def test_a_rank_that_is_only_slow_to_say_where_it_stands_is_waited_for_and_not_called_dead():
    """Rank 2 writes notes, and its trace with the 18th; one that never writes any is told in the end."""
    for comes, when in ((18, 18), (99, 25)):
        watch, spoken = HangWatch(3, patience_s=10.0), []
        for second in range(40):
            notes = {0: note(0, second, 6, waits=True), 1: note(1, second, 5)}
            if comes < 99:
                mine = note(2, second, 6, waits=True)
                slow = RankNote(rank=2, host="host2", beat=second, moved="6")
                notes[2] = mine if second >= comes else slow
            if second >= 5 and (said := watch.look(notes, float(second))):
                spoken.append((second, said))
        assert [second for second, _ in spoken] == [when]
        assert "rank 1 ends with all_reduce #5" in spoken[0][1]
        assert ("rank 2 left no dump" in spoken[0][1]) == (comes == 99)


def test_a_wait_between_two_ranks_is_told_where_no_collective_is():
    watch, said = HangWatch(2, patience_s=5.0), None
    for second in range(9):
        notes = {
            0: RankNote(
                rank=0, host="a", beat=second, moved="x", waits=["gloo:recv #0"], trace=nothing(0)
            ),
            1: RankNote(rank=1, host="b", beat=second, moved="y", trace=nothing(1)),
        }
        said = said or watch.look(notes, float(second))
    assert "rank 0 on a is in gloo:recv #0" in said
    assert "rank 1 in no collective" in said


def test_notes_on_a_board_are_the_last_of_each_rank(tmp_path):
    board = FileBoard(tmp_path / "board")
    assert board.notes(3) == {}
    for number in range(5):
        board.put(1, str(number).encode())
    assert board.notes(3) == {1: b"4"}
    board.put(0, b"x")
    board.close(1)
    assert board.notes(3) == {0: b"x"}
    board.close(0)
    assert not (tmp_path / "board").exists()


def test_notes_in_a_store_are_the_last_of_each_rank():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = StoreBoard(store.clone())
    assert board.notes(2) == {}
    board.put(1, b"first")
    board.put(1, b"second")
    assert board.notes(2) == {1: b"second"}


def stuck(rank, world):
    said = []
    with watching(rank, world, said.append, patience_s=3.0, every_s=0.1):
        dist.all_reduce(torch.ones(3))
        if rank == 1:
            time.sleep(0.1)
            begun = time.monotonic()
            # Rank 0 hears about it while this rank is away, however slow the machine is.
            while not dist.distributed_c10d._get_default_store().check(["told"]):
                assert time.monotonic() - begun < 50
                time.sleep(0.1)
        if rank == 0:
            work = dist.all_reduce(torch.ones(7), async_op=True)
            while not said:
                time.sleep(0.05)
            dist.distributed_c10d._get_default_store().set("told", b"yes")
            work.wait()
        else:
            dist.all_reduce(torch.ones(7))
    return said


@pytest.mark.parametrize("backend", ["gloo", cairn.labs.torch_backend.NAME])
def test_real_ranks_one_of_which_stays_away(backend):
    said = run_ranks(3, stuck, backend=backend)[0]
    assert "rank 1" in said[0]  # and others, if the machine did not let them write for seconds
    assert "all_reduce #2" in said[0]
    assert "rank 1 ends with all_reduce #1" in said[0]


def waits_for_a_message(rank, world):
    """Rank 1 sends only when it was said that rank 0 waits for it."""
    said = []
    store = dist.distributed_c10d._get_default_store()
    with watching(rank, world, said.append, patience_s=1.0, every_s=0.1):
        if rank == 0:
            work = dist.irecv(torch.empty(5), 1)
            while not said:
                time.sleep(0.05)
            store.set("told", b"yes")
            work.wait()
        else:
            store.get("told")
            dist.send(torch.ones(5), 0)
    return said


def test_messages_of_our_backend_are_seen_too():
    said = run_ranks(2, waits_for_a_message, backend=cairn.labs.torch_backend.NAME)[0]
    assert "rank 0 on " in said[0]
    assert "is in cairn:recv 0<-1" in said[0]


def alone(rank, world):
    with watching(0, 1, print):
        return "nothing to watch"


def test_one_rank_is_not_watched():
    assert alone(0, 1) == "nothing to watch"
