"""A differential equation by a solver and by a network: what does each cost for its error?

    -u''(x) = pi^2 sin(pi x) on [0, 1], u = 0 at both ends         u(x) = sin(pi x) is known

    finite differences   error falls with the square of the step: twice the points, a quarter of the error
    physics-informed     a network whose loss is the equation's residual at random points

The order of the solver is predicted by Taylor's theorem; the network is asked for a percent, and for what it costs.
"""

import math
import time
from typing import NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

WIDTH, POINTS = 24, 48


class Solved(NamedTuple):
    error: float  # largest, against sin(pi x)
    seconds: float


def by_differences(points: int) -> Solved:
    """-u'' as (2u_i - u_i-1 - u_i+1) / h^2 at the inner points."""
    import numpy as np

    began = time.perf_counter()
    h = 1.0 / (points + 1)
    x = np.linspace(h, 1 - h, points)
    matrix = (2 * np.eye(points) - np.eye(points, k=1) - np.eye(points, k=-1)) / h**2
    u = np.linalg.solve(matrix, np.pi**2 * np.sin(np.pi * x))
    return Solved(float(np.abs(u - np.sin(np.pi * x)).max()), time.perf_counter() - began)


def by_network(steps: int) -> Solved:
    """u = x (1 - x) net(x) has the right ends by itself; the loss is the residual."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    began = time.perf_counter()
    net = nn.Sequential(
        nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        x = torch.rand(POINTS, 1, requires_grad=True)
        u = x * (1 - x) * net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        loss = (bend + math.pi**2 * torch.sin(math.pi * x)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.linspace(0, 1, 201)[:, None]
    with torch.no_grad():
        error = float((x * (1 - x) * net(x) - torch.sin(math.pi * x)).abs().max())
    return Solved(error, time.perf_counter() - began)


@one_thread()
def run(bench: Workbench) -> Outcome:
    sizes = (16, 32, 64, 128)
    bench.step("finite differences on four grids")
    solved = {points: by_differences(points) for points in sizes}
    bench.step("a network and the equation's residual")
    learnt = by_network(bench.setting("steps", bench.pick(600, 300)))
    # Steps are 1/(n+1), so that the ratio of two grids is not exactly two.
    ratio = math.log(129 / 65)
    order = math.log(solved[64].error / solved[128].error) / ratio
    line = [(float(points), one.error) for points, one in solved.items()]
    return Outcome(
        checks=_checks(order, learnt, solved[16]),
        plots=[_plot(line, learnt)],
        table=Table(
            columns=[Words("method", "方法"), Words("error", "误差"), Words("ms", "毫秒")],
            rows=[
                *[
                    [f"differences, {n} points", s.error, s.seconds * 1e3]
                    for n, s in solved.items()
                ],
                ["network", learnt.error, learnt.seconds * 1e3],
            ],
        ),
    )


def _checks(order: float, learnt: Solved, coarse: Solved) -> list[Check]:
    return [
        Check(
            what=Words("order of the solver's error", "求解器误差的阶"),
            predicted=2.0,
            measured=order,
            unit="",
            within=0.03,
        ),
        Check(
            what=Words("error of the network", "网络的误差"),
            predicted=0.02,
            measured=learnt.error,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "time of the network over a solver that is at least as exact",
                "网络用时与同等精度求解器之比",
            ),
            predicted=20.0,
            measured=learnt.seconds / coarse.seconds,
            unit="x",
            kind="at_least",
        ),
    ]


def _plot(line: Points, learnt: Solved) -> Plot:
    return Plot(
        title=Words("Error of the solution", "解的误差"),
        x=Words("points of the grid", "网格点数"),
        y=Words("largest error", "最大误差"),
        lines={"differences": line},
        log_x=True,
        log_y=True,
        limit=("network", learnt.error),
    )


LAB = described(__file__, run)
