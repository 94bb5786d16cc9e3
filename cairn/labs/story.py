"""Project stories from the learner's own record: situation, task, action, result, with measured numbers.

    lab record + exercises passed ──drafts──> STAR in Markdown, and a checklist for a talk of three minutes

Everything in it was measured on the learner's machine or graded there; nothing is made up. Pure.
"""

from collections.abc import Mapping, Sequence

from cairn.labs.entry import Entry
from cairn.labs.figures import shown_gap, with_unit
from cairn.labs.lab import Lab, Language, Words

CHECKLIST: tuple[Words, ...] = (
    Words("0:00 one sentence: what it is and for whom", "0:00 一句话：是什么、给谁用"),
    Words("0:20 the limit of the machine, as a number", "0:20 机器的上限，用数字说"),
    Words("0:50 what you measured first, with its spread", "0:50 最先测了什么，波动多大"),
    Words(
        "1:30 the cause, and the evidence that ruled others out",
        "1:30 原因，以及排除其他原因的证据",
    ),
    Words("2:10 the change, and the same measurement after it", "2:10 改动，以及改后同样的测量"),
    Words("2:40 what is left to the limit, and the next step", "2:40 离上限还有多远，下一步"),
)


def drafts(
    entries: Mapping[str, Entry], labs: Mapping[str, Lab], passed: Sequence[str], language: Language
) -> str:
    """The runs with a prediction of the learner's own first, then those that were off: they make the best stories."""
    told = [entry for entry in entries.values() if entry.checks and entry.lab in labs]
    told.sort(key=lambda entry: (entry.guess is None, entry.status == "held", entry.lab))
    zh = language == "zh"
    lines = [f"# {'项目故事' if zh else 'Project stories'}", ""]
    if passed:
        names = ", ".join(sorted(passed))
        lines += [f"{'通过的练习' if zh else 'Exercises passed'}: {names}", ""]
    for entry in told[:3]:
        lines += _story(entry, labs[entry.lab], language)
    lines += [f"## {'三分钟讲解' if zh else 'A talk of three minutes'}", ""]
    return "\n".join([*lines, *(f"- [ ] {step.of(language)}" for step in CHECKLIST)]) + "\n"


def _story(entry: Entry, lab: Lab, language: Language) -> list[str]:
    check = entry.checks[0]
    got, wanted = (
        with_unit(value, check.unit).of(language) for value in (check.measured, check.predicted)
    )
    where = f"{entry.where.device_name}, {entry.at[:10]}"
    if language == "zh":
        guess = f"我事先预测 {entry.guess.value:g}。" if entry.guess else ""
        return [
            f"## {lab.title.zh}",
            "",
            f"- **情境**：{lab.hypothesis.zh}",
            f"- **任务**：在 {where} 上验证。{guess}",
            f"- **行动**：用 `{lab.code[0]}` 与 `cairn lab run {lab.name}` 测量。",
            f"- **结果**：{check.what.zh}：实测 {got}，预测 {wanted}（{shown_gap(check.gap)}）。{entry.verdict.zh}。",
            "",
        ]
    guess = f" My own prediction was {entry.guess.value:g}." if entry.guess else ""
    return [
        f"## {lab.title.en}",
        "",
        f"- **Situation**: {lab.hypothesis.en}",
        f"- **Task**: prove or refute it on {where}.{guess}",
        f"- **Action**: measured with `cairn lab run {lab.name}`, which exercises `{lab.code[0]}`.",
        f"- **Result**: {check.what.en}: {got} measured, "
        f"{wanted} predicted ({shown_gap(check.gap)}). {entry.verdict.en}.",
        "",
    ]
