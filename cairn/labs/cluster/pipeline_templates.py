"""A node of a pipeline-parallel job dies. Throw the whole replica away, or rearrange?

    8 nodes, depth 4     [0 1 2 3] [4 5 6 7]          node 5 dies
    drop the replica     [0 1 2 3]                    three healthy nodes stand idle
    templates            [0 1 2 3] [4 6 7]            a pipeline of depth 3, planned beforehand

Which depths to prepare, and how to cover any number of nodes with them, is arithmetic that can be done beforehand.
"""

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

NODES, DEPTH, MICROBATCHES, LAYERS = 16, 4, 16, 48
SIZES = (3, 4, 5)


def rate(depth: int) -> float:
    """Of a pipeline, in units of one node without bubbles: the slowest stage, and the fill and drain of 1F1B."""
    slowest = -(-LAYERS // depth)
    return LAYERS / slowest * MICROBATCHES / (MICROBATCHES + depth - 1)


def all_covers(nodes: int) -> float:
    """The best total rate over every multiset of sizes, by trying all of them."""
    best = 0.0
    for threes in range(nodes // 3 + 1):
        for fours in range((nodes - 3 * threes) // 4 + 1):
            fives = (nodes - 3 * threes - 4 * fours) // 5
            best = max(best, threes * rate(3) + fours * rate(4) + fives * rate(5))
    return best


def run(bench: Workbench) -> Outcome:
    from cairn.train.parallel.layout import Layout
    from cairn.train.recovery.templates import cover, templates

    ours, dropped, rows = [], [], []
    wrong = uncovered = 0
    for nodes in range(NODES, 2, -1):
        chosen = cover(nodes, SIZES, rate)
        total = sum(map(rate, chosen))
        wrong += abs(total - all_covers(nodes)) > 1e-9
        uncovered += nodes - sum(chosen) if nodes >= 6 else 0
        ours.append((float(nodes), total))
        dropped.append((float(nodes), nodes // DEPTH * rate(DEPTH)))
        rows.append([nodes, " ".join(map(str, chosen)), total, dropped[-1][1]])
    bench.step("the trainer's own grids")
    grids = templates(Layout(dp=4, pp=2), lambda one: 12 % (one.dp * one.fsdp) == 0)
    used = {ranks: layout.world() for ranks, layout in grids.items()}
    # Unlike Oobleck's, our ranks form a full grid with one depth for all: 7 and 6 ranks run as 3 x 2.
    lost_one = dict(ours)[NODES - 1.0] / dict(dropped)[NODES - 1.0]
    return Outcome(
        checks=_checks(wrong, uncovered, lost_one, used),
        plots=[
            Plot(
                title=Words("Rate by nodes that are left", "速率随剩余节点的变化"),
                x=Words("nodes", "节点数"),
                y=Words("rate, nodes without bubbles", "速率（无气泡节点当量）"),
                lines={"templates": ours, "whole replicas only": dropped},
                limit=("16 nodes, no bubbles", float(NODES)),
            )
        ],
        table=Table(
            columns=[
                Words("nodes", "节点数"),
                Words("pipelines", "流水线组成"),
                Words("rate", "速率"),
                Words("with whole replicas only", "仅整副本"),
            ],
            rows=rows,
        ),
    )


def _checks(wrong: int, uncovered: int, lost_one: float, used: dict[int, int]) -> list[Check]:
    return [
        Check(
            what=Words(
                "counts of nodes for which the cover is not the best of all",
                "覆盖方案非最优的节点数个数",
            ),
            predicted=0,
            measured=wrong,
            unit="counts",
        ),
        Check(
            what=Words(
                "nodes left idle from 16 down to 6 (sizes 3, 4, 5 cover all)",
                "16 到 6 个节点时空闲的节点数（3、4、5 可覆盖）",
            ),
            predicted=0,
            measured=uncovered,
            unit="nodes",
        ),
        Check(
            what=Words(
                "rate after one of 16 is lost, templates over dropping a replica",
                "丢 1/16 后的速率：模板 / 丢弃副本",
            ),
            predicted=15 / 12,
            measured=lost_one,
            unit="x",
            within=0.1,
        ),
        Check(
            what=Words(
                "ranks at work of 7, in the trainer's grid",
                "7 个 rank 中在工作的（训练器网格）",
            ),
            predicted=6,
            measured=used.get(7, 0),
            unit="ranks",
        ),
    ]


LAB = described(__file__, run)
