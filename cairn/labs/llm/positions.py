"""What does a position embedding promise? RoPE: scores depend on the distance alone. How well, and who else?

q at m, k at n   ->   q at m + s, k at n + s      the score must not change
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Lines, Outcome, Plot, Question, Words
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
    """q.k after each was turned by its own position: the rotation of `cairn.models.rope`."""
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
        turned = at[:, None, None].float() * angles
        return torch.cat((turned.sin(), turned.cos()), dim=-1)

    return ((q + wave(m)) * (k + wave(n))).sum((1, 2))


LAB = Lab(
    name="positions",
    area="llm",
    title=Words("Positions: sinusoidal, RoPE, ALiBi", "位置编码：正弦、RoPE、ALiBi"),
    hypothesis=Words(
        "RoPE and ALiBi make attention scores a function of the distance between two "
        "tokens, up to the rounding of the angles; sinusoidal positions added to the "
        "input do not.",
        "RoPE 与 ALiBi 使注意力分数只取决于两个 token 的距离（误差仅来自角度的舍入）；"
        "加在输入上的正弦位置做不到。",
    ),
    run=run,
    causes=(
        Words(
            "angles computed in 16 bits: at position 4,096 they are off by whole radians",
            "角度用 16 位计算：在位置 4,096 处误差可达整弧度",
        ),
        Words(
            "a rotation that pairs other dimensions for q than for k", "q 与 k 的旋转配对维度不一致"
        ),
    ),
    code=(
        "cairn/models/rope.py:rotation",
        "cairn/models/rope.py:frequencies",
        "cairn/labs/llm/positions.py:alibi_scores",
    ),
    reading=(
        "RoFormer: Enhanced Transformer with Rotary Position Embedding (2021)",
        "Train Short, Test Long: Attention with Linear Biases (2021)",
        "YaRN: Efficient Context Window Extension of Large Language Models (2023)",
    ),
    questions=(
        Question(
            Words(
                "Why are rotary angles computed in float32 even in a bf16 model?",
                "为什么 bf16 模型也要用 float32 计算旋转角？",
            ),
            Words(
                "bf16 has 8 bits of precision: at position 4,096 neighbouring angles differ by "
                "16-32 radians, so distances would be noise.",
                "bf16 只有 8 位精度：在位置 4,096 处相邻可表示的角度相差 16–32 弧度，距离信息会"
                "变成噪声。",
            ),
        ),
        Question(
            Words(
                "What does stretching RoPE linearly by 4 do, and what does it cost?",
                "把 RoPE 线性拉伸 4 倍会怎样，代价是什么？",
            ),
            Words(
                "Positions shrink to a quarter, so 4x the context stays inside trained angles; "
                "neighbouring tokens come 4x closer in angle, which blurs local order. NTK, "
                "Llama-3 and YaRN stretch the low frequencies only.",
                "位置缩小到四分之一，4 倍上下文仍落在训练过的角度内；但相邻 token 的角度差也缩"
                "小 4 倍，局部次序变模糊。NTK、Llama-3、YaRN 只拉伸低频。",
            ),
        ),
        Question(
            Words(
                "Which of the three needs nothing in the KV cache to be recomputed when a "
                "prefix is cut?",
                "三者中哪一个在截掉前缀时不需要重算 KV cache？",
            ),
            Words(
                "ALiBi: keys hold no position. RoPE's keys are stored turned; since only "
                "distances count they may stay as they are, as long as new tokens continue the "
                "old numbering.",
                "ALiBi：key 不含位置。RoPE 的 key 存的是旋转后的值，但因为只有距离有意义，只要"
                "新 token 延续原编号就可以保留。",
            ),
        ),
    ),
    seconds=1.0,
)
