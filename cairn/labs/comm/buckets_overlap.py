"""How much of the communication hides behind backward, and which bucket size hides most?

    backward  |layer 8|layer 7|layer 6| ... |layer 1|
    wire              |bucket |bucket |         |bucket|   <- only the last bucket sticks out

One bucket for everything starts when backward is over: nothing is hidden. Many buckets leave while backward goes on,
but each pays the wire's latency. The buckets are those of the trainer, filled and launched by a real backward; the wire
is a link of known alpha and beta that gets each bucket at the moment it is launched.
"""

import time
from statistics import median

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

LAYERS = 16
ALPHA_SHARE = 0.02  # of backward: what each bucket costs besides its bytes
WIRE_SHARE = 0.7  # of backward: all bytes on the wire


class Wire:
    """A link of known rate that carries one bucket after another, beside the computation."""

    def __init__(self, alpha_s: float, bytes_per_s: float) -> None:
        self.alpha_s, self.rate = alpha_s, bytes_per_s
        self.free_at = 0.0

    def send(self, nbytes: int, now: float) -> None:
        self.free_at = max(self.free_at, now) + self.alpha_s + nbytes / self.rate


def exposed_s(backward_s: float, wire_s: float, alpha_s: float, buckets: int) -> float:
    """What sticks out when `buckets` equal ones become ready one after another."""
    each, free = alpha_s + wire_s / buckets, 0.0
    for number in range(1, buckets + 1):
        free = max(free, backward_s * number / buckets) + each
    return free - backward_s


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch
    from torch import nn

    from cairn.train.parallel.buckets import Buckets

    width, rows_of_x, repeats = bench.pick(256, 192), 256, bench.pick(6, 5)
    x = torch.randn(rows_of_x, width)
    total = LAYERS * width * width * 4

    def backward(buckets: int, wire: Wire) -> tuple[float, float]:
        """Seconds of backward, and from its end until the wire has carried everything."""
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        parameters = dict(model.named_parameters())

        def launch(names: list[str]) -> None:
            wire.send(sum(parameters[name].nbytes for name in names), time.perf_counter())

        loss = model(x).square().mean()
        Buckets(parameters, launch, total // buckets).arm()
        began = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        return ended - began, max(0.0, wire.free_at - ended)

    bench.step("backward alone")
    alone = min(backward(1, Wire(0.0, 1e12))[0] for _ in range(repeats + 2))
    alpha, wire_s = ALPHA_SHARE * alone, WIRE_SHARE * alone
    measured, predicted, rows = [], [], []
    for count in (1, 2, 4, 8, 16):
        bench.step(f"{count} buckets")
        rests = [backward(count, Wire(alpha, total / wire_s))[1] for _ in range(repeats)]
        exposed = median(rests) / alone
        expected = exposed_s(alone, wire_s, alpha, count) / alone
        measured.append((float(count), exposed))
        predicted.append((float(count), expected))
        rows.append([count, total // count, expected, exposed])
    return Outcome(
        checks=_checks(predicted, measured),
        plots=[_plot(predicted, measured)],
        table=_table(rows),
    )


def _checks(predicted: Points, measured: Points) -> list[Check]:
    return [
        Check(
            what=Words("one bucket: exposed, of backward", "单个桶：暴露时间占反向的比例"),
            predicted=predicted[0][1],
            measured=measured[0][1],
            unit="share",
            within=0.4,
        ),
        Check(
            what=Words("8 buckets: exposed, of one bucket's", "8 个桶与 1 个桶的暴露时间之比"),
            predicted=predicted[3][1] / predicted[0][1],
            measured=measured[3][1] / measured[0][1],
            unit="x",
            within=0.4,
        ),
    ]


def _plot(predicted: Points, measured: Points) -> Plot:
    return Plot(
        title=Words("Communication that backward does not hide", "反向没有掩盖掉的通信"),
        x=Words("buckets", "桶数"),
        y=Words("share of backward", "占反向时间的比例"),
        lines={"predicted": predicted, "measured": measured},
        log_x=True,
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("buckets", "桶数"),
            Words("bytes each", "每桶字节"),
            Words("predicted exposed", "预测暴露比例"),
            Words("measured exposed", "实测暴露比例"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
