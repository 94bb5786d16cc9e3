from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


def text(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + at * 31) % 997 for at in range(length)]


@case("a prompt that was seen hits all but its last block", "见过的 prompt 命中除最后部分外的全部")
def hits(attempt: Attempt) -> None:
    cache = attempt.PrefixCache(100, 4)
    tokens = text(1, 18)
    equal(cache.lookup(tokens), 0)
    cache.insert(tokens)
    equal(cache.lookup(tokens), 16)
    equal(cache.lookup(tokens[:16]), 12)
    equal(cache.lookup([*tokens[:9], 1, 2, 3, 4, 5, 6]), 8)
    equal(cache.lookup(tokens[:4]), 0)


@case("the same tokens after another beginning miss", "前文不同则不命中")
def chained(attempt: Attempt) -> None:
    cache = attempt.PrefixCache(100, 4)
    cache.insert([1, 2, 3, 4, 5, 6, 7, 8])
    equal(cache.lookup([9, 9, 9, 9, 5, 6, 7, 8, 1]), 0)
    cache.insert([9, 9, 9, 9, 1, 1, 1, 1])
    equal(cache.lookup([9, 9, 9, 9, 5, 6, 7, 8, 1]), 4)


@case("never more blocks than there are", "块数不超过上限")
def bounded(attempt: Attempt) -> None:
    cache = attempt.PrefixCache(6, 4)
    for seed in range(12):
        cache.insert(text(seed, 12))
        require(
            len(cache.used) <= 6,
            f"{len(cache.used)} blocks are kept",
            f"保留了 {len(cache.used)} 块",
        )
        equal(cache.lookup(text(seed, 13)), 12)


@case("only leaves are evicted", "只淘汰叶子块")
def leaves(attempt: Attempt) -> None:
    cache = attempt.PrefixCache(4, 2)
    cache.insert([1, 2, 3, 4, 5, 6])
    cache.insert([8, 9, 8, 9])
    for name, parent in cache.parent.items():
        require(
            parent == 0 or parent in cache.used,
            f"block {name} lost its parent",
            f"块 {name} 失去了前驱",
        )


@case("what was used last stays", "最近使用的留下")
def recency(attempt: Attempt) -> None:
    cache = attempt.PrefixCache(3, 2)
    for pair in ([1, 1], [2, 2], [3, 3]):
        cache.insert(pair)
    equal(cache.lookup([1, 1, 0]), 2)
    cache.insert([4, 4])
    equal(cache.lookup([1, 1, 0]), 2)
    equal(cache.lookup([2, 2, 0]), 0)


@case("tokens computed for 20 turns of a chat", "20 轮对话需要计算的 token")
def chat(attempt: Attempt) -> Figure:
    cache, computed, talk = attempt.PrefixCache(1000, 16), 0, []
    for turn in range(20):
        talk = talk + text(turn, 100)
        computed += len(talk) - cache.lookup(talk)
        cache.insert(talk)
    return Figure(computed, 20 * 100, "tokens", allowed=1.16)
