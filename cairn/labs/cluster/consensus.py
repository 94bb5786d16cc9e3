"""Who decides, when machines fail and messages are late? Majorities, on a virtual clock.

    register   a write reaches W of N, a read asks R of N:  R + W > N  always meet, otherwise reads may be old
    election   a candidate needs the votes of a majority; everybody votes once a term: a term has one leader at most

Both are small enough to read (`_quorum`), and what they promise is counted, not believed. This project keeps no
consensus of its own: it relies on engines that do, and this is what they promise.
"""

import math
import random

from cairn.labs.cluster._quorum import Election, stale_chance, stale_share
from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

NODES = 5


def run(bench: Workbench) -> Outcome:
    times = bench.setting("draws", bench.pick(20_000, 4_000))
    draw = random.Random(3)
    rows, lines = [], {"formula": [], "drawn": []}
    for readers in range(1, NODES + 1):
        bench.step(f"writes to 3 of {NODES}, reads from {readers}")
        exact, measured = (
            stale_chance(NODES, 3, readers),
            stale_share(NODES, 3, readers, times, draw),
        )
        lines["formula"].append((float(readers), exact))
        lines["drawn"].append((float(readers), measured))
        rows.append([f"W 3, R {readers}", exact, measured, "yes" if readers + 3 > NODES else "no"])
    elections = bench.pick(2000, 400)
    doubled = leaderless = 0
    terms: dict[str, list[int]] = {"narrow": [], "wide": []}
    for number in range(elections):
        for name, spread in (("narrow", 5.0), ("wide", 150.0)):
            one = Election(NODES, down=2, spread_ms=spread, delay_ms=5.0, seed=number).run(
                limit_ms=60_000
            )
            doubled += one.leaders_of_one_term > 1
            terms[name].append(one.terms)
        minority = Election(NODES, down=3, spread_ms=150.0, delay_ms=5.0, seed=number).run(
            limit_ms=2_000
        )
        leaderless += minority.elected_ms is None
    mean = {name: sum(values) / len(values) for name, values in terms.items()}
    for name, value in mean.items():
        rows.append([f"election, {name} timeouts", "-", value, "terms until a leader"])
    return Outcome(
        checks=_checks(lines, doubled, elections, leaderless, mean),
        plots=[
            Plot(
                title=Words("Stale reads, writes to 3 of 5", "陈旧读（写 5 中的 3）"),
                x=Words("nodes that a read asks", "读询问的节点数"),
                y=Words("share of stale reads", "陈旧读比例"),
                lines=lines,
            )
        ],
        table=Table(
            columns=[
                Words("what", "项目"),
                Words("predicted", "预测"),
                Words("measured", "实测"),
                Words("quorums meet", "法定人数相交"),
            ],
            rows=rows,
        ),
    )


def _checks(
    lines: Lines, doubled: int, elections: int, leaderless: int, mean: dict[str, float]
) -> list[Check]:
    return [
        Check(
            what=Words("stale reads with W 3, R 1 of 5", "W=3、R=1、N=5 的陈旧读比例"),
            predicted=math.comb(2, 1) / math.comb(5, 1),
            measured=dict(lines["drawn"])[1.0],
            unit="share",
            within=0.1,
        ),
        Check(
            what=Words("stale reads with W 3, R 3", "W=3、R=3 的陈旧读比例"),
            predicted=0.0,
            measured=dict(lines["drawn"])[3.0],
            unit="share",
        ),
        Check(
            what=Words("terms with two leaders", "出现两个 leader 的 term 数"),
            predicted=0,
            measured=doubled,
            unit="terms",
        ),
        Check(
            what=Words(
                "elections without a majority that stayed without a leader",
                "无多数派时始终无 leader 的选举数",
            ),
            predicted=elections,
            measured=leaderless,
            unit="elections",
        ),
        Check(
            what=Words(
                "terms until a leader, timeouts spread over 5 ms against 150 ms",
                "选出 leader 所需 term 数：超时分散 5 毫秒 / 150 毫秒",
            ),
            predicted=1.5,
            measured=mean["narrow"] / mean["wide"],
            unit="x",
            kind="at_least",
        ),
    ]


LAB = described(__file__, run)
