"""A small student learns from a teacher: what do soft labels carry beside right answers, and who should write the text?

    off policy     the teacher's likeliest tokens on given texts            KL(teacher || student)
    on policy      the student writes, the teacher judges each token        advantage = log teacher - log student

Students of one size learn from few sums: from right answers alone, from the teacher's distribution over the same ones,
and the last one goes on with answers of its own. All are judged by their divergence from the teacher on sums that no
student has seen.
"""

import copy
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cairn.models.transformer import Transformer

TOP = 4  # tokens of the teacher that are compared, of 12
SEEN = 3  # one of so many sums is shown to students
STUDENT = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64}


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    rows = _tiny.all_sums()
    for_training = torch.arange(len(rows)) % SEEN == 0
    teacher = _tiny.build(_tiny.small_spec(), seed=0)
    bench.step("the teacher learns sums")
    _tiny.train(teacher, rows, bench.pick(36, 20))
    hard = _tiny.build(_tiny.small_spec(**STUDENT), seed=1)
    soft = copy.deepcopy(hard)
    steps = bench.setting("steps", bench.pick(36, 20))
    bench.step("a student learns the right answers")
    _tiny.train(hard, rows[for_training], steps, rate=1e-2)
    bench.step("a student learns the teacher's distribution")
    curve = imitate(soft, teacher, rows[for_training], rows[~for_training], steps)
    apart = {
        name: divergence(one, teacher, rows[~for_training])
        for name, one in (("hard", hard), ("soft", soft))
    }
    bench.step("it goes on with answers of its own")
    begun = reverse(soft, teacher, rows[~for_training])
    practise(
        soft, teacher, rows[~for_training], bench.pick(40, 12), torch.Generator().manual_seed(0)
    )
    ended = reverse(soft, teacher, rows[~for_training])
    return Outcome(
        checks=_checks(apart, ended / begun, curve),
        plots=[_plot(curve)],
        notes=[_note(begun, ended)],
    )


def imitate(
    student: "Transformer", teacher: "Transformer", rows: "Tensor", unseen: "Tensor", steps: int
) -> list[float]:
    """Off policy, by the loss of `cairn train` with a teacher; divergences on unseen sums before each step."""
    import torch

    from cairn.train.distill import top_divergence

    with torch.no_grad():
        best = next_tokens(teacher, rows).topk(TOP, dim=-1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    curve = []
    for _ in range(steps):
        curve.append(divergence(student, teacher, unseen))
        got = next_tokens(student, rows).gather(-1, best.indices)
        optimizer.zero_grad()
        top_divergence(best.values, got).mean().backward()
        optimizer.step()
    return curve


def practise(
    student: "Transformer",
    teacher: "Transformer",
    rows: "Tensor",
    steps: int,
    generator: "torch.Generator",
) -> None:
    """On policy: the student's own answers, each token pushed by how much likelier the teacher finds it."""
    import torch

    from cairn.labs.llm.grpo import sample, token_logprobs
    from cairn.train.rules.on_policy import distillation_advantage
    from cairn.train.rules.policy import PolicyGradient

    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        answers = sample(student, rows.repeat_interleave(8, dim=0), generator)
        logp_BT = token_logprobs(student, answers)
        with torch.no_grad():
            advantage_BT = distillation_advantage(logp_BT, token_logprobs(teacher, answers))
        _, slope_BT = PolicyGradient()(
            logp_BT.detach(), {"old": logp_BT.detach(), "advantage": advantage_BT}
        )
        optimizer.zero_grad()
        (slope_BT * logp_BT).mean().backward()
        optimizer.step()


def next_tokens(model: "Transformer", rows: "Tensor") -> "Tensor":
    """Log-probabilities of every token of the answers."""
    return _tiny.logits(model, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)


def divergence(student: "Transformer", teacher: "Transformer", rows: "Tensor") -> float:
    """KL(teacher || student) of a token, mean."""
    import torch

    with torch.no_grad():
        expected, actual = next_tokens(teacher, rows), next_tokens(student, rows)
    return (expected.exp() * (expected - actual)).sum(-1).mean().item()


def reverse(student: "Transformer", teacher: "Transformer", rows: "Tensor") -> float:
    """KL(student || teacher) of a token, mean."""
    return divergence(teacher, student, rows)


def _checks(apart: dict[str, float], practised: float, curve: list[float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "divergence from the teacher on unseen sums: soft labels over right answers",
                "未见题上与教师的散度：软标签与正确答案之比",
            ),
            predicted=0.8,
            measured=apart["soft"] / apart["hard"],
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words(
                "reverse divergence on those sums after practice of its own, over before",
                "自行练习后与之前的反向散度之比",
            ),
            predicted=0.7,
            measured=practised,
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words(
                f"divergence on unseen sums, learnt from the {TOP} likeliest tokens: last over first",
                f"只学最可能的 {TOP} 个 token 时未见题上的散度：末值/初值",
            ),
            predicted=0.7,
            measured=curve[-1] / curve[0],
            unit="x",
            kind="at_most",
        ),
    ]


def _plot(curve: list[float]) -> Plot:
    return Plot(
        title=Words("Divergence from the teacher on unseen sums", "未见题上与教师的散度"),
        x=Words("step", "步"),
        y=Words("nats a token", "nats/token"),
        lines={"soft labels": list(enumerate(curve))},
    )


def _note(begun: float, ended: float) -> Words:
    return Words(
        f"Practice on its own answers took the reverse divergence from {begun:.2f} to {ended:.2f} nats a token: the "
        f"teacher corrects the states that the student really gets into.",
        f"用自己的答案练习后，反向散度从 {begun:.2f} 降到 {ended:.2f} nats/token：教师纠正的是学生真正会走到的状态。",
    )


LAB = described(__file__, run)
