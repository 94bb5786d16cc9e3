import random

from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


@case("the longest cached prefix wins", "最长缓存前缀优先")
def prefix(attempt: Attempt) -> None:
    replicas = [
        attempt.Replica(1, [[1, 2]]),
        attempt.Replica(1, [[1, 2, 3, 9]]),
        attempt.Replica(0),
    ]
    equal(attempt.matched([1, 2, 3, 4], replicas[1]), 3)
    equal(attempt.choose([1, 2, 3, 4], replicas), 1)


@case("without a match the least loaded", "无匹配时选最空闲")
def least(attempt: Attempt) -> None:
    replicas = [attempt.Replica(3), attempt.Replica(1), attempt.Replica(1)]
    equal(attempt.choose([5], replicas), 1)


@case("an overloaded replica loses its prefix", "过载副本让出请求")
def overloaded(attempt: Attempt) -> None:
    replicas = [attempt.Replica(9, [[1, 2, 3]]), attempt.Replica(1), attempt.Replica(2)]
    equal(attempt.choose([1, 2, 3, 4], replicas), 1)


@case("never one that is down", "绝不选宕机的副本")
def down(attempt: Attempt) -> None:
    replicas = [attempt.Replica(0, [[1, 2, 3]], up=False), attempt.Replica(5)]
    equal(attempt.choose([1, 2, 3], replicas), 1)
    try:
        attempt.choose([1], [attempt.Replica(up=False)])
    except LookupError:
        return
    require(False, "it must raise LookupError", "应抛出 LookupError")


@case("tokens computed for 60 chats on 4 replicas", "4 个副本、60 个会话需计算的 token")
def work(attempt: Attempt) -> Figure:
    dice, replicas, computed = random.Random(2), [attempt.Replica() for _ in range(4)], 0
    talks = [[n] * 50 for n in range(12)]
    for _ in range(60):
        talk = dice.choice(talks)
        talk.extend(dice.randrange(1000) for _ in range(20))
        at = attempt.choose(list(talk), replicas)
        computed += len(talk) - attempt.matched(list(talk), replicas[at])
        replicas[at].cached.append(list(talk))
        replicas[at].load += 1
        if dice.random() < 0.8:
            replicas[dice.randrange(4)].load = 0
    return Figure(computed, 12 * 50 + 60 * 20, "tokens", allowed=1.6)
