"""Why does a copy from ordinary memory crawl, and when does one cost nothing?

pageable   host memory may move: the driver copies through a pinned buffer of its own, and the host waits
pinned     fixed pages: the copy engine reads them by DMA, the host goes on, other streams compute meanwhile

copy and compute on two streams:   time = max(copy, compute), not their sum
"""

from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    import torch

    size = bench.setting("mib", bench.pick(256, 64)) << 20
    remote = torch.empty(size, dtype=torch.uint8, device=bench.device)
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    bench.step("pageable and pinned copies")
    slow = bench.time(lambda: remote.copy_(pageable)).median_s
    fast = bench.time(lambda: remote.copy_(pinned, non_blocking=True)).median_s
    expected = {
        kind: ceiling(bench.ceilings, f"host_to_device_{kind}") for kind in ("pinned", "pageable")
    }
    copy, compute, both = _overlap(bench, remote, pinned)
    rates = {"pinned": size / fast, "pageable": size / slow}
    return Outcome(
        checks=_checks(expected, rates, both / max(copy, compute)),
        table=_table(copy, compute, both),
    )


def _checks(expected: dict[str, float], rates: dict[str, float], overlap: float) -> list[Check]:
    return [
        Check(
            what=Words("pinned copy", "pinned 拷贝"),
            predicted=expected["pinned"] / 1e9,
            measured=rates["pinned"] / 1e9,
            unit="GB/s",
            within=0.25,
        ),
        Check(
            what=Words("pageable copy", "pageable 拷贝"),
            predicted=expected["pageable"] / 1e9,
            measured=rates["pageable"] / 1e9,
            unit="GB/s",
            within=0.5,
        ),
        Check(
            what=Words(
                "copy and products on two streams, over the longer of them",
                "两个 stream 上拷贝与计算同时进行，与较长者之比",
            ),
            predicted=1.0,
            measured=overlap,
            unit="x",
            within=0.25,
        ),
    ]


def _table(copy: float, compute: float, both: float) -> Table:
    return Table(
        columns=[Words("what", "项目"), Words("ms", "ms")],
        rows=[
            ["copy alone", copy * 1e3],
            ["products alone", compute * 1e3],
            ["both", both * 1e3],
            ["their sum", (copy + compute) * 1e3],
        ],
    )


def _overlap(bench: Workbench, remote: object, pinned: object) -> tuple[float, float, float]:
    """Seconds of the copy, of products that take about as long, and of both at once."""
    import torch

    side = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    one = bench.time(lambda: torch.mm(a, a, out=out)).median_s
    copy = bench.time(lambda: remote.copy_(pinned, non_blocking=True)).median_s  # type: ignore[attr-defined]
    times = max(1, round(copy / one))

    def products() -> None:
        for _ in range(times):
            torch.mm(a, a, out=out)

    def together() -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            remote.copy_(pinned, non_blocking=True)  # type: ignore[attr-defined]
        products()
        here.wait_stream(side)

    bench.step("copy and products at once")
    return copy, bench.time(products).median_s, bench.time(together).median_s


LAB = described(__file__, run)
