"""A small student learns the whole distribution of a teacher: what is the least loss it can reach?

cross entropy(teacher, student) = entropy(teacher) + KL(teacher || student)      the first term is the floor

The student learns from the teacher's most likely tokens alone, as a large vocabulary makes necessary: the divergence of
those and of all others as one outcome is never more than the whole one.
"""

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

TOP = 4  # tokens of the teacher that are compared, of 12


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.train.distill import top_divergence

    rows = _tiny.all_sums()
    teacher = _tiny.build(_tiny.small_spec(), seed=0)
    bench.step("the teacher learns sums")
    _tiny.train(teacher, rows, bench.pick(50, 15))
    with torch.no_grad():
        wanted = _tiny.logits(teacher, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
    entropy = -(wanted.exp() * wanted).sum(-1).mean().item()
    student = _tiny.build(
        _tiny.small_spec(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64), seed=1
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    best = wanted.topk(TOP, dim=-1)
    losses, gaps, learnt = [], [], []
    bench.step("the student learns the teacher")
    for _ in range(bench.pick(80, 20)):
        got = _tiny.logits(student, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
        loss = top_divergence(best.values, got.gather(-1, best.indices)).mean()
        gaps.append((wanted.exp() * (wanted - got)).sum(-1).mean().item())
        losses.append(-(wanted.exp() * got).sum(-1).mean().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learnt.append(loss.item())
    curve = [(float(step), loss) for step, loss in enumerate(losses)]
    return Outcome(
        checks=_checks(entropy, losses, gaps, learnt),
        plots=[
            Plot(
                title=Words("The student's loss", "学生模型的损失"),
                x=Words("step", "步"),
                y=Words("nats", "nats"),
                lines={"student": curve},
                limit=("entropy of the teacher", entropy),
            )
        ],
    )


def _checks(
    entropy: float, losses: list[float], gaps: list[float], learnt: list[float]
) -> list[Check]:
    return [
        Check(
            what=Words(
                f"divergence of the {TOP} likeliest tokens over the whole one, at most",
                f"最可能的 {TOP} 个 token 的散度与完整散度之比（最大值）",
            ),
            predicted=1.0,
            measured=max(top / whole for top, whole in zip(learnt, gaps, strict=True)),
            unit="x",
            kind="at_most",
            within=1e-3,
        ),
        Check(
            what=Words(
                "loss less KL is the teacher's entropy, at every step",
                "每一步：损失减去 KL 等于教师的熵",
            ),
            predicted=entropy,
            measured=max(
                (loss - gap for loss, gap in zip(losses, gaps, strict=True)),
                key=lambda e: abs(e - entropy),
            ),
            unit="nats",
            within=1e-3,
        ),
        Check(
            what=Words("the loss never falls below that floor", "损失不会低于这个下限"),
            predicted=entropy,
            measured=min(losses),
            unit="nats",
            kind="at_least",
            within=1e-4,
        ),
        Check(
            what=Words(
                "what is left to learn (KL), last over first", "剩余可学的部分（KL）：末值/初值"
            ),
            predicted=0.3,
            measured=gaps[-1] / gaps[0],
            unit="x",
            kind="at_most",
        ),
    ]


LAB = described(__file__, run)
