"""A small student learns the whole distribution of a teacher: what is the least loss it can reach?

cross entropy(teacher, student) = entropy(teacher) + KL(teacher || student)      the first term is the floor
"""

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Words
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

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
    losses, gaps = [], []
    bench.step("the student learns the teacher")
    for _ in range(bench.pick(80, 20)):
        got = _tiny.logits(student, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
        loss = -(wanted.exp() * got).sum(-1).mean()
        gaps.append((wanted.exp() * (wanted - got)).sum(-1).mean().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    curve = [(float(step), loss) for step, loss in enumerate(losses)]
    return Outcome(
        checks=_checks(entropy, losses, gaps),
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


def _checks(entropy: float, losses: list[float], gaps: list[float]) -> list[Check]:
    return [
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


LAB = Lab(
    name="distillation",
    area="llm",
    title=Words("Distillation", "知识蒸馏"),
    hypothesis=Words(
        "The student's loss is the teacher's entropy plus their KL divergence: it "
        "cannot fall below that entropy, and everything it gains is KL.",
        "学生的损失等于教师的熵加上两者的 KL 散度：它不可能低于该熵，学到的全部都是 KL 的下降。",
    ),
    run=run,
    causes=(
        Words(
            "a student too small, or too few steps, to follow the teacher",
            "学生模型太小或步数太少，跟不上教师",
        ),
        Words(
            "probabilities rounded on their way (16 bits, or only the top few kept)",
            "概率在传递中被舍入（16 位，或只保留前几个）",
        ),
    ),
    code=("cairn/labs/llm/distillation.py:run", "cairn/models/transformer.py:Transformer"),
    reading=(
        "Distilling the Knowledge in a Neural Network (2015)",
        "MiniLLM: Knowledge Distillation of Large Language Models (2023)",
    ),
    questions=(
        Question(
            Words(
                "What does a soft label carry that the right answer does not?",
                "软标签比正确答案多带来什么？",
            ),
            Words(
                "How likely the wrong answers are, that is which mistakes are near misses: "
                "several bits per token instead of one choice.",
                "错误答案各自的可能性，也就是哪些错误“差一点就对”：每个 token 多出好几个比特的"
                "信息。",
            ),
        ),
        Question(
            Words(
                "Why is forward KL called mass-covering and reverse KL mode-seeking?",
                "为什么前向 KL 被称为覆盖型、反向 KL 被称为寻模型？",
            ),
            Words(
                "Forward KL punishes missing what the teacher does, so a small student spreads "
                "out; reverse KL punishes doing what the teacher does not, so it picks a few "
                "modes and does those well.",
                "前向 KL 惩罚遗漏教师会做的事，小模型会摊得很开；反向 KL 惩罚做教师不做的事，小"
                "模型会选少数模式做好。",
            ),
        ),
        Question(
            Words("What does the temperature in distillation do?", "蒸馏中的温度有什么作用？"),
            Words(
                "It flattens the teacher so that small probabilities get weight; gradients "
                "shrink with 1/T², hence the usual factor T².",
                "温度把教师分布变平，让小概率也有权重；梯度按 1/T² 缩小，因此通常乘以 T²。",
            ),
        ),
    ),
    seconds=6.0,
)
