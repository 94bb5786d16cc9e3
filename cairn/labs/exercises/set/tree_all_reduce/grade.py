import math

from cairn.labs.exercises.grading import Attempt, Figure, case, require


@case("every rank gets every contribution exactly once", "每个 rank 恰好得到每份贡献一次")
def exact(attempt: Attempt) -> None:
    for n in (1, 2, 3, 5, 8, 13):
        sums = [{rank: 1} for rank in range(n)]
        for sends in attempt.tree_all_reduce(n):
            for send, content in [(send, dict(sums[send.source])) for send in sends]:
                mine = sums[send.target] if send.add else {}
                for rank, times in content.items():
                    mine[rank] = mine.get(rank, 0) + times
                sums[send.target] = mine
        for rank, content in enumerate(sums):
            require(
                content == dict.fromkeys(range(n), 1),
                f"rank {rank} of {n} holds {content}",
                f"{n} 个中的 rank {rank} 得到 {content}",
            )


@case("no rank sends or receives twice in a round", "一轮内不重复收发")
def single(attempt: Attempt) -> None:
    for sends in attempt.tree_all_reduce(11):
        for side in ([s.source for s in sends], [s.target for s in sends]):
            require(len(set(side)) == len(side), "a rank is used twice", "有 rank 被使用两次")


@case("rounds for 13 ranks", "13 个 rank 的轮数")
def rounds(attempt: Attempt) -> Figure:
    return Figure(len(attempt.tree_all_reduce(13)), 2 * math.ceil(math.log2(13)), "rounds")
