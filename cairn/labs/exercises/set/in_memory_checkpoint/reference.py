"""Copies of checkpoints in the memory of other ranks."""


def holders(rank: int, ranks: int, per_node: int, copies: int) -> list[int]:
    """Who keeps the copies of a rank, in order of preference."""
    # begin answer
    return [(rank + k * per_node) % ranks for k in range(1, copies + 1)]
    # end answer


def recover(lost_nodes: set[int], ranks: int, per_node: int, copies: int) -> dict[int, int] | None:
    """From whom each rank of the lost nodes reads; None when one of them has no copy left."""
    # begin answer
    plan = {}
    for rank in range(ranks):
        if rank // per_node not in lost_nodes:
            continue
        for holder in holders(rank, ranks, per_node, copies):
            if holder // per_node not in lost_nodes:
                plan[rank] = holder
                break
        else:
            return None
    return plan
    # end answer
