from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


def execute(rounds, n: int) -> list[list[dict[int, int]]]:
    """Each chunk as who contributed how often."""
    chunks = [[{rank: 1} for _ in range(n)] for rank in range(n)]
    for sends in rounds:
        messages = [(send, dict(chunks[send.source][send.chunk])) for send in sends]
        for send, content in messages:
            if send.add:
                mine = chunks[send.target][send.chunk]
                for rank, times in content.items():
                    mine[rank] = mine.get(rank, 0) + times
            else:
                chunks[send.target][send.chunk] = content
    return chunks


@case("every rank gets every contribution exactly once", "每个 rank 恰好得到每份贡献一次")
def exact(attempt: Attempt) -> None:
    for n in (1, 2, 3, 4, 7):
        whole = dict.fromkeys(range(n), 1)
        for rank, chunks in enumerate(execute(attempt.ring_all_reduce(n), n)):
            for chunk in chunks:
                require(
                    chunk == whole,
                    f"rank {rank} of {n} holds {chunk}",
                    f"{n} 个中的 rank {rank} 得到 {chunk}",
                )


@case("each rank sends only to its neighbour, one chunk a round", "只发给邻居，每轮一块")
def neighbours(attempt: Attempt) -> None:
    n = 5
    for sends in attempt.ring_all_reduce(n):
        equal(sorted(send.source for send in sends), list(range(n)))
        require(all(s.target == (s.source + 1) % n for s in sends), "not a ring", "不是环")


@case("rounds", "轮数")
def rounds(attempt: Attempt) -> Figure:
    return Figure(len(attempt.ring_all_reduce(8)), 2 * 7, "rounds")


@case("bytes that a rank sends, as a share of its data", "每个 rank 发送量与数据量之比")
def bytes_sent(attempt: Attempt) -> Figure:
    n = 8
    sent = sum(send.source == 0 for sends in attempt.ring_all_reduce(n) for send in sends) / n
    return Figure(sent, 2 * (n - 1) / n, "x data")
