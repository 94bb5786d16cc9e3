from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


@case("copies lie on other nodes, and on different ones", "副本在其他且互不相同的节点")
def apart(attempt: Attempt) -> None:
    for rank in range(24):
        nodes = [holder // 4 for holder in attempt.holders(rank, 24, 4, 2)]
        require(
            rank // 4 not in nodes and len(set(nodes)) == 2,
            f"rank {rank}: nodes {nodes}",
            f"rank {rank} 的副本在节点 {nodes}",
        )


@case("one lost node is always survived", "丢一个节点总能恢复")
def one(attempt: Attempt) -> None:
    for node in range(6):
        plan = attempt.recover({node}, 24, 4, 1)
        require(plan is not None, f"node {node} cannot be lost", f"丢失节点 {node} 无法恢复")
        equal(sorted(plan), list(range(node * 4, node * 4 + 4)))
        require(
            all(holder // 4 != node for holder in plan.values()),
            "a lost rank is read",
            "从已丢失的 rank 读取",
        )


@case("two lost neighbours need two copies", "相邻两节点丢失需要两份副本")
def two(attempt: Attempt) -> None:
    equal(attempt.recover({1, 2}, 24, 4, 1), None)
    require(
        attempt.recover({1, 2}, 24, 4, 2) is not None,
        "two copies survive two nodes",
        "两份副本应能承受两个节点",
    )
    equal(attempt.recover(set(), 24, 4, 1), {})


@case("copies that the fullest rank stores", "存储最多的 rank 的副本数")
def even(attempt: Attempt) -> Figure:
    kept = [holder for rank in range(24) for holder in attempt.holders(rank, 24, 4, 2)]
    return Figure(max(kept.count(rank) for rank in range(24)), 2, "copies")
