from itertools import pairwise

from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require

LAYOUTS = [(24, 2, 3), (25, 4, 3), (7, 3, 5), (10, 1, 4), (10, 4, 1), (3, 5, 2)]


def cut(size, rank, ranks):
    return list(range(size))[rank * size // ranks : (rank + 1) * size // ranks]


@case("slices cover the tensor without a gap", "各片无缝覆盖张量")
def covered(attempt: Attempt) -> None:
    for size, ranks, _ in LAYOUTS:
        bounds = [attempt.bounds(size, rank, ranks) for rank in range(ranks)]
        equal((bounds[0][0], bounds[-1][1]), (0, size))
        require(all(a[1] == b[0] for a, b in pairwise(bounds)), "a gap", "有缺口")


@case("every rank ends up with its slice", "每个 rank 得到自己的片")
def rebuilt(attempt: Attempt) -> None:
    for size, saved, ranks in LAYOUTS:
        for rank in range(ranks):
            mine = [-1] * len(cut(size, rank, ranks))
            for read in attempt.plan(size, saved, rank, ranks):
                require(read.length > 0, "an empty read", "空读取")
                file = cut(size, read.source, saved)
                part = file[read.offset : read.offset + read.length]
                equal(len(part), read.length)
                mine[read.target_offset : read.target_offset + read.length] = part
            equal(mine, cut(size, rank, ranks))


@case("numbers read in all", "总读取量")
def volume(attempt: Attempt) -> Figure:
    reads = [read for rank in range(6) for read in attempt.plan(1000, 4, rank, 6)]
    return Figure(sum(read.length for read in reads), 1000, "numbers")
