"""Reads what a job itself prints when communication fails: torch's watchdog, gloo, mismatches found by torch.

    [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1241, OpType=ALLREDUCE, ...)
    Gloo connectFullMesh failed with ... remote=[127.0.0.1]:45001
    Detected mismatch between collectives on ranks. Rank 1 is running collective: ...
    [.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete
    watchdog: nothing has moved for 60 s. rank 1 on n7: ...           Cairn's own (`comm/watchdog`)

torch prints the victims of a hang; the culprit is the rank that is not among them, or that stopped at a smaller
number. Where the log cannot tell, the finding says who waited, and asks for dumps.
"""

import re

from cairn.comm.doctor.findings import CommFinding, ranked

CAUGHT = re.compile(
    r"\[Rank (\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
WORLD = re.compile(r"(?:world_size|WORLD_SIZE|nranks)[=: ]+(\d+)")
LOOPBACK = re.compile(r"connectFullMesh failed.*?remote=\[?(127\.[\d.]+|::1)\]?")
NO_MESH = re.compile(r"connectFullMesh failed[^\n]*")
MISMATCH = re.compile(r"Detected mismatch between collectives on ranks\.\s*Rank (\d+)[^\n]*")
GLOO = re.compile(r"Timed out waiting (\d+)ms for (\w+) operation to complete")
OWN_RANK = re.compile(
    r"\[rank(\d+)\]|^r(\d+)\|", re.MULTILINE
)  # torch's prefix, and that of `cairn launch`
WATCHDOG = re.compile(
    r"watchdog: (?:nothing has moved for (\d+) s\. |no sign of life from )([^\n]+)"
)
RANK_ON = re.compile(r"rank (\d+) on ([\w.-]+)")
CLOSED = re.compile(r"Connection (?:closed|reset) by peer \[([^\]]+)\][^\n]*")


def looks_like(text: str) -> bool:
    return any(rule.search(text) for rule in (CAUGHT, NO_MESH, MISMATCH, WATCHDOG, GLOO, CLOSED))


def examine_job_log(text: str) -> list[CommFinding]:
    """The first of these that applies: what follows it is its consequence."""
    for rule in (_interface, _mismatch, _timeout, _watchdog, _gloo, _closed):
        finding = rule(text)
        if finding is not None:
            return [finding]
    return []


def _interface(text: str) -> CommFinding | None:
    failed = NO_MESH.search(text)
    if failed is None:
        return None
    loopback = LOOPBACK.search(text)
    evidence = [failed[0][:200]]
    if loopback is not None:
        evidence.append(f"a rank was told to connect to {loopback[1]}, which is itself")
    return CommFinding(
        cause="wrong interface",
        where=loopback[1] if loopback else "gloo",
        evidence=evidence,
        advice="gloo took an address that other hosts cannot reach: set GLOO_SOCKET_IFNAME to the "
        "interface of the cluster network, and see that the host's name is not 127.0.1.1 in /etc/hosts",
    )


def _mismatch(text: str) -> CommFinding | None:
    match = MISMATCH.search(text)
    if match is None:
        return None
    return CommFinding(
        cause="mismatch",
        where=f"rank {match[1]}",
        evidence=[match[0][:300]],
        advice="all ranks must call the same collectives with the same sizes in the same order",
    )


def _timeout(text: str) -> CommFinding | None:
    caught = {int(r): (int(n), op) for r, n, op in CAUGHT.findall(text)}
    if not caught:
        return None
    first = min(number for number, _ in caught.values())
    op = next(op for number, op in caught.values() if number == first)
    waiting = sorted(rank for rank, (number, _) in caught.items() if number > first)
    behind = sorted(rank for rank, (number, _) in caught.items() if number == first)
    world = max((int(count) for count in WORLD.findall(text)), default=0)
    absent = [rank for rank in range(world) if rank not in caught]
    if waiting:
        last = max(number for number, _ in caught.values())
        where, why = behind, [f"{ranked(waiting)} had gone on to #{last}"]
    elif absent and len(absent) < len(caught):
        where, why = absent, [f"{ranked(absent)} did not time out: it was not there"]
    else:
        where, why = behind, ["the log does not show who is missing"]
    return CommFinding(
        cause="hang",
        where=ranked(where),
        evidence=[f"{ranked(behind)} timed out in {op.lower()} #{first}", *why],
        advice="give the flight-recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE=2000, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1): they name the rank that did not come",
    )


def _watchdog(text: str) -> CommFinding | None:
    """Cairn's own watchdog has compared all ranks, and names the one that the others wait for first."""
    match = WATCHDOG.search(text)
    if match is None:
        return None
    rank = RANK_ON.search(match[2])
    return CommFinding(
        cause="hang",
        where=f"rank {rank[1]} on {rank[2]}" if rank else "the job",
        evidence=[*([f"nothing moved for {match[1]} s"] if match[1] else []), match[2][:300]],
        advice="look at that process: is it stopped (kill -CONT), out of memory, in a debugger, on a dead host? "
        "With --recovery.on it is ended and the run goes on",
    )


def _gloo(text: str) -> CommFinding | None:
    match = GLOO.search(text)
    if match is None:
        return None
    waiting_ranks = sorted({int(one or other) for one, other in OWN_RANK.findall(text)})
    who = ranked(waiting_ranks) if waiting_ranks else "a rank"
    return CommFinding(
        cause="hang",
        where="a peer of " + who,
        evidence=[
            f"{who} waited {int(match[1]) / 1000:g} s for a {match[2]} of gloo, and nothing came"
        ],
        advice="a rank that is not in this log did not take part: it hangs, is stopped, or is far slower. Run with "
        "--recovery.on, or give the flight-recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE=2000)",
    )


def _closed(text: str) -> CommFinding | None:
    addresses = CLOSED.findall(text)
    if not addresses:
        return None
    peers = sorted(set(addresses))
    return CommFinding(
        cause="hang",
        where=", ".join(peers[:4]),
        evidence=[f"the connection was closed by {peer}" for peer in peers[:4]],
        advice="the process at that address has died: its own log says why",
    )
