"""Rules for a probe of every pair of ranks: slow host, slow link, lossy link, wrong interface, bad mapping.

    to:      0     1     2     3          all pairs of one rank slow     -> its host is slow
    0        -    10    10    90          one pair slow                  -> that link
    1       10     -    10    90          usually quick, sometimes 20x   -> it loses packets
    2       10    10     -    90          a ring over slow pairs         -> the mapping
    3       90    90    90     -  <- host of rank 3

The best time of several is a link's speed; how much the others differ from it is its loss. Compute
times tell a host that is slow altogether from one that only sends slowly.
"""

import itertools

import msgspec
import numpy as np

from cairn.comm.doctor.findings import CommFinding, PairProbe, ranked

SLOW = 2.5  # times the median of the other pairs
LEAST_SLOWER_US = 1000.0  # and so much more; less is the scheduler of the host
TAIL = 8.0  # times its own best, in at least a few of the tries
TRIES_LATE = 0.15
# TCP sends again after 200 ms at the soonest; less is the scheduler of the host.
LEAST_LATE_US = 190_000
BRUTE = 8  # ranks whose orders are all tried
VIRTUAL = ("lo", "docker", "virbr", "veth", "br-", "cni")


def merged(first: PairProbe, second: PairProbe) -> PairProbe:
    """The tries of both: what only the load of the host made slow is quick in one of them."""
    table = [
        [one + other for one, other in zip(row, also, strict=True)]
        for row, also in zip(first.pair_us, second.pair_us, strict=True)
    ]
    work = [min(pair) for pair in zip(first.compute_us, second.compute_us, strict=True)]
    return msgspec.structs.replace(first, pair_us=table, compute_us=work)


def examine_probe(probe: PairProbe) -> list[CommFinding]:
    findings = _interface(probe)
    if len(probe.pair_us) < 3:
        return findings
    best = _both_ways(np.array([[min(t) if t else np.nan for t in row] for row in probe.pair_us]))
    slow_hosts = _slow_hosts(probe, best)
    findings += slow_hosts
    bad = {rank for finding in slow_hosts for rank in _ranks_in(finding.where)}
    if not slow_hosts:
        mapping = _mapping(best)
        findings += mapping or _slow_links(best, bad)
    return findings + _lossy(probe)


def _much_slower(time: float, usual: float) -> bool:
    return time > SLOW * usual and time > usual + LEAST_SLOWER_US


def _both_ways(times: np.ndarray) -> np.ndarray:
    """A pair is as slow as its slower direction."""
    return np.fmax(times, times.T)


def _others(best: np.ndarray, without: set[int]) -> float:
    ranks = [r for r in range(len(best)) if r not in without]
    values = [best[a, b] for a, b in itertools.combinations(ranks, 2) if np.isfinite(best[a, b])]
    return float(np.median(values)) if values else float("nan")


def _slow_hosts(probe: PairProbe, best: np.ndarray) -> list[CommFinding]:
    hosts = [fact.host for fact in sorted(probe.facts, key=lambda fact: fact.rank)]
    findings = []
    for rank in range(len(best)):
        rest = _others(best, {rank})
        mine = np.delete(best[rank], rank)
        if not _much_slower(float(np.nanmin(mine)), rest):
            continue
        work = np.array(probe.compute_us)
        compute = work[rank] > 1.5 * np.median(np.delete(work, rank))
        why = (
            f"the same computation takes {work[rank]:.0f} us there, "
            f"{np.median(np.delete(work, rank)):.0f} us elsewhere: the host itself is slow"
            if compute
            else "its computation is as quick as that of the others: it is its network"
        )
        findings.append(
            CommFinding(
                cause="slow host",
                where=f"rank {rank} on {hosts[rank]}",
                evidence=[
                    f"all its pairs take {np.nanmin(mine):.0f} us or more for {probe.bytes} bytes, "
                    f"pairs of the others {rest:.0f} us",
                    why,
                ],
                advice="look at its NIC, cable and port (speed, errors, duplex), and its load; or leave it out",
            )
        )
    return findings


def _slow_links(best: np.ndarray, without: set[int]) -> list[CommFinding]:
    usual, findings = _others(best, without), []
    for one, other in itertools.combinations(range(len(best)), 2):
        if {one, other} & without or not _much_slower(best[one, other], usual):
            continue
        findings.append(
            CommFinding(
                cause="slow link",
                where=f"ranks {one} and {other}",
                evidence=[
                    f"{best[one, other]:.0f} us between them at best, {usual:.0f} us between others",
                    f"both are quick with all others: {_elsewhere(best, one, other):.0f} us",
                ],
                advice="the path between these two: a bad cable, a full uplink, two flows hashed onto one link",
            )
        )
    return findings


def _elsewhere(best: np.ndarray, one: int, other: int) -> float:
    rest = [r for r in range(len(best)) if r not in (one, other)]
    return float(np.nanmedian([best[r, end] for r in rest for end in (one, other)]))


def _lossy(probe: PairProbe) -> list[CommFinding]:
    """Both directions together: a retransmission on one delays the answer of the other."""
    pairs = list(itertools.combinations(range(len(probe.pair_us)), 2))
    times = {(a, b): np.array(probe.pair_us[a][b] + probe.pair_us[b][a]) for a, b in pairs}
    late = {
        pair: mine > float(mine.min()) + max((TAIL - 1) * float(mine.min()), LEAST_LATE_US)
        for pair, mine in times.items()
        if len(mine) >= 6
    }
    findings = []
    for (one, other), mine in late.items():
        elsewhere = [float(m.mean()) for pair, m in late.items() if pair != (one, other)]
        usual = (
            float(np.median(elsewhere)) if elsewhere else 0.0
        )  # a loaded host is late everywhere
        if mine.sum() < 3 or mine.mean() < TRIES_LATE + 3 * usual:
            continue
        times_us = times[one, other]
        findings.append(
            CommFinding(
                cause="lossy link",
                where=f"ranks {one} and {other}",
                evidence=[
                    f"{int(mine.sum())} of {len(times_us)} messages took {np.median(times_us[mine]) / 1e3:.0f} ms, "
                    f"the others {np.median(times_us[~mine]) / 1e3:.2f} ms: as if packets were sent again",
                ],
                advice="error and drop counters of that path (ethtool -S, switch ports), its cable and optics",
            )
        )
    return findings


def _mapping(best: np.ndarray) -> list[CommFinding]:
    """Two classes of pairs, and a ring 0, 1, 2, .. that uses the slow ones more than it must."""
    n = len(best)
    values = np.array([best[a, b] for a, b in itertools.combinations(range(n), 2)])
    if n < 4 or n > BRUTE or not np.isfinite(values).all():
        return []
    order = np.sort(values)
    gap = order[1:] / order[:-1]
    cut = int(gap.argmax())
    if gap[cut] < SLOW or order[cut + 1] - order[cut] < LEAST_SLOWER_US:
        return []
    slow = best > order[cut] * 1.01
    groups = _together(slow, n)
    # Only hosts of several ranks can be mapped wrongly: quick within, slow between.
    if len(groups) < 2 or max(map(len, groups)) < 2 or len(groups) == n:
        return []
    if any(slow[a, b] for group in groups for a, b in itertools.combinations(group, 2)):
        return []
    ring = list(range(n))
    now, least = _crossings(ring, slow), len(groups)
    if now <= least:
        return []
    better = [rank for group in groups for rank in group]
    return [
        CommFinding(
            cause="rank mapping",
            where="the ring " + " ".join(map(str, ring)),
            evidence=[
                f"it crosses slow pairs {now} times, {_crossings(better, slow)} times in the order "
                f"{' '.join(map(str, better))}",
                "quick within "
                + ", ".join(str(group) for group in groups)
                + f" ({order[: cut + 1].mean():.0f} us), slow between ({order[cut + 1 :].mean():.0f} us)",
            ],
            advice="number the ranks host by host, so that neighbours share a host",
        )
    ]


def _together(slow: np.ndarray, n: int) -> list[list[int]]:
    """Ranks that are joined by quick pairs."""
    ungrouped, groups = set(range(n)), []
    while ungrouped:
        group, edge = set(), {min(ungrouped)}
        while edge:
            group |= edge
            edge = {r for r in ungrouped - group if any(not slow[r, m] for m in group)}
        groups.append(sorted(group))
        ungrouped -= group
    return groups


def _crossings(ring: list[int], slow: np.ndarray) -> int:
    return sum(bool(slow[a, b]) for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True))


def _interface(probe: PairProbe) -> list[CommFinding]:
    facts = probe.facts
    if len({fact.host for fact in facts}) < 2:
        return []
    bad = [f for f in facts if f.address.startswith("127.") or f.interface.startswith(VIRTUAL)]
    if not bad:
        return []
    return [
        CommFinding(
            cause="wrong interface",
            where=ranked([fact.rank for fact in bad]),
            evidence=[
                f"rank {f.rank} on {f.host} uses {f.interface} ({f.address})" for f in bad[:8]
            ],
            advice="other hosts cannot reach that address: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    ]


def _ranks_in(where: str) -> list[int]:
    return [int(word) for word in where.replace(",", " ").split() if word.isdigit()]
