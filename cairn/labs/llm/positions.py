"""What does a position embedding promise? RoPE: scores depend on the distance alone. How well, and who else?

q at m, k at n   ->   q at m + s, k at n + s      the score must not change
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lines, Outcome, Plot, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

SHIFTS = (0, 1, 16, 256, 4096)
HEAD = 64


def run(bench: Workbench) -> Outcome:
    import torch

    generator = torch.Generator().manual_seed(0)
    pairs = bench.pick(256, 64)
    q, k = (torch.randn(pairs, 1, HEAD, generator=generator) for _ in range(2))
    m, n = (torch.randint(0, 512, (pairs,), generator=generator) for _ in range(2))
    kinds = {"RoPE": rope_scores, "ALiBi": alibi_scores, "sinusoidal": sinusoidal_scores}
    drift: dict[str, list[tuple[float, float]]] = {}
    for name, scores in kinds.items():
        bench.step(name)
        start = scores(q, k, m, n)
        drift[name] = [
            (float(s), ((scores(q, k, m + s, n + s) - start).norm() / start.norm()).item())
            for s in SHIFTS
        ]
    return Outcome(
        checks=_checks(drift),
        plots=[
            Plot(
                title=Words(
                    "Change of attention scores under a shift", "整体平移引起的注意力分数变化"
                ),
                x=Words("shift", "平移量"),
                y=Words("relative change", "相对变化"),
                lines=drift,
            )
        ],
        notes=[
            Words(
                "The bound for RoPE is float32's: an angle of 4,096 radians has a rounding "
                "error of 4,096 x 2^-24.",
                "RoPE 的界来自 float32：4,096 弧度的角有 4,096 × 2^-24 的舍入误差。",
            )
        ],
    )


def _checks(drift: Lines) -> list[Check]:
    return [
        Check(
            what=Words(
                "RoPE: change of the scores when both tokens move on by 4,096",
                "RoPE：两个 token 同时后移 4,096 时分数的变化",
            ),
            predicted=4096 * 2**-24 * 8,
            measured=drift["RoPE"][-1][1],
            unit="relative",
            kind="at_most",
        ),
        Check(
            what=Words("ALiBi: the same", "ALiBi：同样的移动"),
            predicted=0.0,
            measured=drift["ALiBi"][-1][1],
            unit="relative",
        ),
        Check(
            what=Words(
                "sinusoidal (added to the input): it does change",
                "正弦位置（加在输入上）：确实会变",
            ),
            predicted=0.02,
            measured=drift["sinusoidal"][-1][1],
            unit="relative",
            kind="at_least",
        ),
    ]


def rope_scores(q: "Tensor", k: "Tensor", m: "Tensor", n: "Tensor") -> "Tensor":
    """q.k after each was rotated by its own position: the rotation of `cairn.models.rope`."""
    import torch

    from cairn.labs.llm._tiny import small_spec
    from cairn.models.rope import rotation
    from cairn.models.spec import Rope

    spec = small_spec(head_dim=HEAD, context=8192)
    turn_q, turn_k = (rotation(Rope(), spec, at, None, torch.float32) for at in (m, n))
    return (turn_q(q) * turn_k(k)).sum((1, 2))


def alibi_scores(
    q: "Tensor", k: "Tensor", m: "Tensor", n: "Tensor", slope: float = 0.5
) -> "Tensor":
    """A penalty that grows with the distance, and nothing else."""
    return (q * k).sum((1, 2)) - slope * (m - n).abs()


def sinusoidal_scores(q: "Tensor", k: "Tensor", m: "Tensor", n: "Tensor") -> "Tensor":
    """Waves added to both vectors: content meets position, and those terms do not cancel."""
    import torch

    angles = 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)

    def wave(at: "Tensor") -> "Tensor":
        angles_TD = at[:, None, None].float() * angles
        return torch.cat((angles_TD.sin(), angles_TD.cos()), dim=-1)

    return ((q + wave(m)) * (k + wave(n))).sum((1, 2))


LAB = described(__file__, run)
