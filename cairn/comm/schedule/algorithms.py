"""Collective algorithms that need one network level: ring, chain, pairwise, direct, recursive doubling and Bruck.

| algorithm | collectives | steps for n ranks | bytes each rank sends, of a vector of one |
|---|---|---|---|
| ring | gather, reduce-scatter | n - 1 | (n - 1)/n |
| chain | broadcast of c chunks | n - 2 + c | 1 |
| pairwise | all-to-all | n - 1 | (n - 1)/n |
| direct | gather; one-shot all-reduce | 1 | (n - 1)/n; n - 1 |
| recursive halving and doubling | all-reduce | 2 log2 n | 2 (n - 1)/n |
| Bruck | gather; all-to-all | ceil(log2 n) | (n - 1)/n; log2(n)/2 |

A reversed gather is a reduce-scatter (`Plan.reversed`). Trees, PAT, two-level networks, sparse vectors and
in-network aggregation have files of their own.
"""

import numpy as np

from cairn.comm.schedule.plan import SchedulePlan


def ring_gather(ranks: int) -> SchedulePlan:
    """All-gather around a ring: in step s each rank forwards the chunk that it received s steps ago.

        0 -> 1 -> 2 -> 3 -> 0

    Every link carries the same number of bytes, and no algorithm sends fewer (Patarasuk and Yuan, 2009). The n - 1
    dependent steps make it the choice for large messages and few ranks.
    """
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)
    for step in range(ranks - 1):
        plan.send(rank, (rank + 1) % ranks, chunk=(rank - step) % ranks)
    return plan


def chain_broadcast(ranks: int, chunks: int, root: int = 0) -> SchedulePlan:
    """Pipelined broadcast: root -> root+1 -> ... -> root-1, one chunk after the other."""
    plan = SchedulePlan(ranks)
    hop, chunk = np.divmod(np.arange((ranks - 1) * chunks), max(chunks, 1))
    source = (root + hop) % ranks
    plan.send(source, (source + 1) % ranks, chunk, step=chunk * ranks + hop)
    return plan


def pairwise_all_to_all(ranks: int) -> tuple[SchedulePlan, int]:
    """All-to-all in n - 1 rounds: in round t rank r sends to r + t and receives from r - t.

    Returns the plan and its number of slots: n to send (by destination), then n received (by source). No two ranks send
    to the same rank in one round. Expert parallelism does this twice in each layer.
    """
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)
    plan.copy(rank, rank, to=ranks + rank)
    for offset in range(1, ranks):
        peer = (rank + offset) % ranks
        plan.send(rank, peer, chunk=peer, to=ranks + rank)
    return plan, 2 * ranks


def direct_gather(ranks: int) -> SchedulePlan:
    """All-gather in one step: every rank sends its chunk to every other rank.

    Message t of a step goes from rank r to r + t, so that the ranks do not all send to the same destination at once.
    With its reverse it is the two-shot all-reduce: the bytes of a ring in two steps.
    """
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)[:, None]
    plan.send(rank, (rank + np.arange(1, ranks)) % ranks, chunk=rank)
    return plan


def one_shot_all_reduce(ranks: int) -> tuple[SchedulePlan, int]:
    """All-reduce in one step: every rank receives all vectors and reduces them itself.

    Returns the plan and its number of slots: the vector, and a staging slot for the vector of each rank. Every rank
    adds in rank order, its own vector included: floating-point sums in different orders would differ between ranks.
    Two ranks need no staging: a + b equals b + a. Used for a few KiB between GPUs with peer access.
    """
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)
    if ranks == 2:
        plan.send(rank, 1 - rank, chunk=0, reduce=True)
        return plan, 1
    others = rank[1:]  # rank 0 starts with its own vector, which is already in slot 0
    plan.copy(others, 0, to=1 + others)
    source = rank[:, None]
    plan.send(source, (source + np.arange(1, ranks)) % ranks, chunk=0, to=1 + source)
    plan.copy(others, 1, to=0)
    for addend in range(1, ranks):
        plan.send(rank, -1, 1 + addend, to=0, reduce=True)
    return plan, 1 + ranks


def doubling_gather(members: np.ndarray, ranks: int) -> SchedulePlan:
    """Recursive doubling: member i holds chunk i, and the number of members must be a power of two.

    step 0   0<->1  2<->3  4<->5  6<->7        exchanges blocks of 1, 2, 4 chunks;
    step 1   0<->2  1<->3  4<->6  5<->7        the reverse is recursive halving
    step 2   0<->4  1<->5  2<->6  3<->7
    """
    plan = SchedulePlan(ranks)
    index = np.arange(len(members))
    distance = 1
    while distance < len(members):
        block_start = index // distance * distance
        chunk = block_start[:, None] + np.arange(distance)
        plan.send(members[index][:, None], members[index ^ distance][:, None], chunk)
        distance *= 2
    return plan


def halving_doubling(ranks: int) -> tuple[SchedulePlan, int]:
    """All-reduce by recursive halving and doubling; returns the plan and its number of chunks.

    The vector is cut into the largest power of two of chunks that is not above the number of ranks. The surplus ranks
    first reduce into a neighbour and receive the result at the end, as in Rabenseifner's algorithm (2004).
    """
    chunks = 1 << (ranks.bit_length() - 1)
    surplus = ranks - chunks
    folded = 2 * np.arange(surplus)  # the even ranks of the first pairs reduce into the odd ones
    members = np.concatenate([folded + 1, np.arange(2 * surplus, ranks)])
    all_chunks = np.arange(chunks)
    fold = SchedulePlan(ranks)
    fold.send(folded[:, None], folded[:, None] + 1, all_chunks, reduce=True)
    unfold = SchedulePlan(ranks)
    unfold.send(folded[:, None] + 1, folded[:, None], all_chunks)
    gather = doubling_gather(members, ranks)
    return fold.then(gather.reversed()).then(gather).then(unfold), chunks


def bruck_gather(ranks: int) -> SchedulePlan:
    """All-gather in ceil(log2 n) steps for any number of ranks (Bruck et al., 1997).

        step 0   0 <- 1   1 <- 2   2 <- 3   ...        runs of 1 chunk become runs of 2
        step 1   0 <- 2   1 <- 3   2 <- 4   ...        runs of 2 become runs of 4

    Every rank holds a run of chunks that starts with its own and sends the first 2^k of them to the rank 2^k below.
    """
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)[:, None]
    length = 1
    while length < ranks:
        run = np.arange(min(length, ranks - length))
        plan.send(rank, (rank - length) % ranks, chunk=(rank + run) % ranks)
        length *= 2
    return plan


def bruck_all_to_all(ranks: int) -> tuple[SchedulePlan, int]:
    """All-to-all in ceil(log2 n) steps: a chunk for the rank at distance d moves by 2^k for each bit k set in d.

    Returns the plan and its number of slots: n to send, n received, n in transit. Each chunk is sent log2(n)/2 times on
    average, which pays for small messages only.
    """
    plan = SchedulePlan(ranks)
    rank, offset = np.arange(ranks)[:, None], np.arange(ranks)
    transit = 2 * ranks + offset  # the slot of the chunk for the rank at distance `offset`
    plan.copy(rank, (rank + offset) % ranks, to=transit)
    distance = 1
    while distance < ranks:
        moving = transit[(offset & distance) != 0]
        plan.send(rank, (rank + distance) % ranks, chunk=moving)
        distance *= 2
    plan.copy(rank, transit, to=ranks + (rank - offset) % ranks)
    return plan, 3 * ranks
