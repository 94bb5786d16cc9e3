from cairn.labs.exercises.grading import Attempt, case, equal


def ring(attempt: Attempt, n: int):
    scatter = [
        [attempt.Send(i, (i + 1) % n, (i - r) % n, True) for i in range(n)] for r in range(n - 1)
    ]
    gather = [
        [attempt.Send(i, (i + 1) % n, (i + 1 - r) % n, False) for i in range(n)]
        for r in range(n - 1)
    ]
    return scatter + gather


@case("a ring is an all-reduce", "ring 是 all-reduce")
def right(attempt: Attempt) -> None:
    for n in (2, 3, 5):
        equal(attempt.is_all_reduce(ring(attempt, n), n, n), True)


@case("a missing round and a doubled one are noticed", "能发现少一轮与多一轮")
def wrong(attempt: Attempt) -> None:
    rounds = ring(attempt, 4)
    equal(attempt.is_all_reduce(rounds[:-1], 4, 4), False)
    equal(attempt.is_all_reduce([rounds[0], *rounds], 4, 4), False)


@case("an exchange of two reads before it writes", "两两交换先读后写")
def exchange(attempt: Attempt) -> None:
    swap = [[attempt.Send(0, 1, 0, True), attempt.Send(1, 0, 0, True)]]
    equal(attempt.is_all_reduce(swap, 2, 1), True)
    equal(attempt.is_all_reduce(swap * 2, 2, 1), False)


@case("a reduce to rank 0 is none", "只归约到 rank 0 不算")
def reduce_only(attempt: Attempt) -> None:
    equal(attempt.is_all_reduce([[attempt.Send(1, 0, 0, True)]], 2, 1), False)


@case("a hang is found, a pipeline is not one", "能发现死锁，且不误报流水")
def stuck(attempt: Attempt) -> None:
    equal(attempt.hangs([[("send", 1), ("receive", 1)], [("receive", 0), ("send", 0)]]), False)
    equal(attempt.hangs([[("send", 1), ("receive", 1)], [("send", 0), ("receive", 0)]]), True)
    cycle = [[("receive", (r - 1) % 3), ("send", (r + 1) % 3)] for r in range(3)]
    equal(attempt.hangs(cycle), True)
    cycle[0].reverse()
    equal(attempt.hangs(cycle), False)
