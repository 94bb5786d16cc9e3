"""Why does a copy from ordinary memory crawl, and when does one cost nothing?

pageable   host memory may move: the driver copies through a pinned buffer of its own, and the host waits
pinned     fixed pages: the copy engine reads them by DMA, the host goes on, other streams compute meanwhile

copy and compute on two streams:   time = max(copy, compute), not their sum
"""

from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    import torch

    size = bench.pick(256, 64) << 20
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
    return Outcome(
        checks=[
            Check(
                what=Words("pinned copy", "pinned 拷贝"),
                predicted=expected["pinned"] / 1e9,
                measured=size / fast / 1e9,
                unit="GB/s",
                within=0.25,
            ),
            Check(
                what=Words("pageable copy", "pageable 拷贝"),
                predicted=expected["pageable"] / 1e9,
                measured=size / slow / 1e9,
                unit="GB/s",
                within=0.5,
            ),
            Check(
                what=Words(
                    "copy and products on two streams, over the longer of them",
                    "两个 stream 上拷贝与计算同时进行，与较长者之比",
                ),
                predicted=1.0,
                measured=both / max(copy, compute),
                unit="x",
                within=0.25,
            ),
        ],
        table=_table(copy, compute, both),
    )


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


LAB = Lab(
    name="pinned-copies",
    area="gpu",
    title=Words("Pinned memory and stream overlap", "Pinned 内存与 stream 重叠"),
    hypothesis=Words(
        "A pinned copy reaches the link's rate and overlaps with products on another stream, so that both "
        "take as long as the longer one; a pageable copy is slower and holds up the host.",
        "pinned 拷贝能跑满链路，并与另一个 stream 上的计算重叠，总时间等于较长者；pageable 拷贝更慢，"
        "还会阻塞主机。",
    ),
    run=run,
    causes=(
        Words(
            "the copy and the products share memory bandwidth or power",
            "拷贝与计算共享显存带宽或功耗",
        ),
        Words("host memory on another NUMA node than the GPU", "主机内存与 GPU 不在同一 NUMA 节点"),
    ),
    code=(
        "cairn/hw/measure_device.py:transfer_rate",
        "cairn/train/optim/optimizer.py:Offloaded",
        "cairn/serve/engine/runner.py",
    ),
    reading=("CUDA C++ Best Practices Guide, data transfer between host and device (2024)",),
    questions=(
        Question(
            Words("Why is pageable memory slower?", "为什么 pageable 内存更慢？"),
            Words(
                "The DMA engine needs physical addresses that stay: the driver first copies into a small "
                "pinned buffer with the CPU, piece by piece, so host memory is touched twice and the call "
                "waits.",
                "DMA 需要固定的物理地址：驱动先用 CPU 一块块拷到自己的小 pinned 缓冲区，主机内存多走一遍，"
                "调用还要等。",
            ),
        ),
        Question(
            Words(
                "non_blocking=True on a pageable tensor: what happens?",
                "对 pageable 张量用 non_blocking=True 会怎样？",
            ),
            Words(
                "To the device it is effectively synchronous for the host. From the device it may return "
                "before data has arrived, so reading it without a synchronise is a bug.",
                "拷到设备时对主机基本是同步的；从设备拷回时可能在数据到达前就返回，不同步就读是 bug。",
            ),
        ),
        Question(
            Words("What is the price of pinning?", "pin 内存的代价是什么？"),
            Words(
                "Page tables are walked and locked (about a millisecond per few MB), and the pages cannot be "
                "swapped or moved: pin a few buffers once and reuse them.",
                "要遍历并锁定页表（几 MB 约 1 ms），且这些页不能换出或迁移：一次 pin 少量缓冲区并复用。",
            ),
        ),
    ),
    needs=("gpu",),
    seconds=3.0,
)
