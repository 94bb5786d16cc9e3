"""How much of the KV cache is reserved for tokens that never come?

    one slab per request   [ used ....... reserved up to max_tokens ]      no other request may use the rest
    pages of 16            [16][16][16][ 9 ]                               only the last page has a gap

The real block manager hands out the pages; the slab is what engines did before paging.
"""

import random

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.serving._engine import ask
from cairn.labs.workbench import Workbench

CONTEXT = 2048  # what a slab is reserved for
CACHE = 64 * CONTEXT  # tokens that the whole cache holds
PAGES = (1, 8, 16, 32, 64, 128, 256)


def fill(lengths: list[int], page: int) -> tuple[int, float]:
    """How many of these requests, whole as they will be, fit into the cache, and the share of it that is a gap."""
    from cairn.serve.engine.block_manager import BlockManager

    blocks = BlockManager(CACHE // page + 1, page, prefix_caching=False)
    count = tokens = 0
    for number, length in enumerate(lengths):
        if blocks.allocate(ask(number, [0], 1), length) is None:
            break
        count, tokens = count + 1, tokens + length
    return count, 1 - tokens / (blocks.usage().used * page)


def run(bench: Workbench) -> Outcome:
    draw = random.Random(3)
    # Prompt and answer together: a long tail around 350 tokens, cut at the context.
    lengths = [min(CONTEXT, 16 + int(draw.lognormvariate(5.5, 0.8))) for _ in range(8192)]
    mean = sum(lengths) / len(lengths)
    slabs = CACHE // CONTEXT
    rows: list[list[str | float | int]] = [
        ["slab of the context", slabs, sum(lengths[:slabs]) / slabs, 1 - mean / CONTEXT]
    ]
    waste, fits = [], {}
    for page in bench.pick(PAGES, (1, 16, 64, 256)):
        bench.step(f"pages of {page} tokens")
        fits[page], gap = fill(lengths, page)
        waste.append((float(page), gap * 100))
        rows.append([f"pages of {page}", fits[page], mean, gap])
    gap16 = 7.5 / (mean + 7.5)  # on average half a page less half a token is empty
    return Outcome(
        checks=_checks(gap16, waste, mean, fits),
        plots=[
            Plot(
                title=Words("Gaps by page size", "空洞随页大小的变化"),
                x=Words("tokens of a page", "每页 token 数"),
                y=Words("% of the cache", "占 cache 的百分比"),
                lines={"measured": waste},
                log_x=True,
                limit=("a slab for the context", (1 - mean / CONTEXT) * 100),
            )
        ],
        table=Table(
            columns=[
                Words("layout", "布局"),
                Words("requests that fit", "可容纳请求数"),
                Words("mean tokens", "平均 token 数"),
                Words("share that is a gap", "空洞比例"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                f"Pages of 16 hold {fits[16] / slabs:.1f} times as many requests as slabs: batch, and so throughput, "
                "grows with it.",
                f"页大小 16 能容纳的请求数是整块预留的 {fits[16] / slabs:.1f} 倍：批大小和吞吐随之增长。",
            )
        ],
    )


def _checks(gap16: float, waste: Points, mean: float, fits: dict[int, int]) -> list[Check]:
    return [
        Check(
            what=Words("share of a page-16 cache that is a gap", "页大小 16 时的空洞比例"),
            predicted=gap16 * 100,
            measured=dict(waste)[16.0],
            unit="%",
            within=0.15,
        ),
        Check(
            what=Words("requests that fit with pages of 16", "页大小 16 时能容纳的请求数"),
            predicted=CACHE / (mean + 7.5),
            measured=fits[16],
            unit="requests",
            within=0.1,
        ),
        Check(
            what=Words("gap at page 256 over gap at 16", "页 256 与页 16 的空洞之比"),
            predicted=(127.5 / (mean + 127.5)) / gap16,
            measured=dict(waste)[256.0] / dict(waste)[16.0],
            unit="x",
            within=0.2,
        ),
    ]


LAB = described(__file__, run)
