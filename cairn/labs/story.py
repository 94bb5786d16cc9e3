"""Project stories from the learner's own record: situation, task, action, result, with measured numbers.

    lab record + exercises passed ──drafts──> STAR in Markdown, and a checklist for a talk of three minutes

Everything in it was measured on the learner's machine or graded there; nothing is made up. Pure.
"""

from collections.abc import Mapping, Sequence

from cairn.labs.entry import CheckLine, Entry, Guess
from cairn.labs.figures import shown_gap, with_unit
from cairn.labs.lab import Lab, Language, Words

SITUATION, TASK = Words("Situation", "情境"), Words("Task", "任务")
ACTION, RESULT = Words("Action", "行动"), Words("Result", "结果")
SURPRISE, LEARNT = Words("What surprised me", "意外之处"), Words("What I learnt", "收获")
NEXT = Words("They will ask next", "可能的追问")
TASK_TEXT = Words("prove or refute it on {where}.", "在 {where} 上证实或推翻它。")
ACTION_TEXT = Words(
    "took the prediction from the model and measured with `{command}`; the code behind it is `{code}`.",
    "由模型得出预测，用 `{command}` 测量；背后的代码是 `{code}`。",
)
RESULT_TEXT = Words("{figures}. {verdict}.", "{figures}。{verdict}。")
FIGURE = Words(
    "{what}: {got} measured, {wanted} predicted ({gap})",
    "{what}：实测 {got}，预测 {wanted}（{gap}）",
)
NO_GUESS = Words(
    "say here what you expected; run it again with --predict to have a number.",
    "写下你原来的预期；用 --predict 重跑即可得到数字。",
)

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
    """The runs with a prediction of the learner's own first, then those that were off: they make the best stories.

    A run on a busy machine says nothing about its lab, so it is no story.
    """
    selected = [
        entry
        for entry in entries.values()
        if entry.checks and entry.lab in labs and entry.status != "busy"
    ]
    selected.sort(key=lambda entry: (entry.guess is None, entry.status == "held", entry.lab))
    zh = language == "zh"
    lines = [f"# {'项目故事' if zh else 'Project stories'}", ""]
    if passed:
        names = ", ".join(sorted(passed))
        lines += [f"{'通过的练习' if zh else 'Exercises passed'}: {names}", ""]
    for entry in selected[:3]:
        lines += _story(entry, labs[entry.lab], language)
    lines += [f"## {'三分钟讲解' if zh else 'A talk of three minutes'}", ""]
    return "\n".join([*lines, *(f"- [ ] {step.of(language)}" for step in CHECKLIST)]) + "\n"


def _story(entry: Entry, lab: Lab, language: Language) -> list[str]:
    predicted_check = next(
        (one for one in entry.checks if lab.predict_of in one.what.en), entry.checks[0]
    )
    others = [one for one in entry.checks if one is not predicted_check and one.kind == "near"][:2]
    facts = {
        "where": f"{entry.where.device_name}, {entry.at[:10]}",
        "command": f"cairn lab run {lab.name}",
        "code": lab.code[0],
        "figures": "; ".join(_figure(one, language) for one in (predicted_check, *others)),
        "verdict": entry.verdict.of(language),
    }
    mine = entry.guess
    scored = NO_GUESS if mine is None or mine.measured is None else _expected(mine, predicted_check)
    paragraphs = [
        (SITUATION, lab.hypothesis.of(language)),
        (TASK, TASK_TEXT.of(language).format(**facts)),
        (ACTION, ACTION_TEXT.of(language).format(**facts)),
        (RESULT, RESULT_TEXT.of(language).format(**facts)),
        (SURPRISE, scored.of(language)),
        (LEARNT, lab.why.of(language) if lab.why else ""),
        (NEXT, " ".join(one.ask.of(language) for one in lab.questions)),
    ]
    colon = "：" if language == "zh" else ": "
    rows = [f"- **{head.of(language)}**{colon}{text}" for head, text in paragraphs if text]
    return [f"## {lab.title.of(language)}", "", *rows, ""]


def _expected(guess: Guess, check: CheckLine) -> Words:
    mine, measured = with_unit(guess.value, check.unit), with_unit(guess.measured, check.unit)
    off = "" if guess.factor is None else f"{guess.factor:.2f}"
    return Words(
        f"I expected {mine.en} and measured {measured.en}" + (f", {off}x off." if off else "."),
        f"我预期 {mine.zh}，实测 {measured.zh}" + (f"，相差 {off} 倍。" if off else "。"),
    )


def _figure(check: CheckLine, language: Language) -> str:
    measured, predicted = (
        with_unit(value, check.unit).of(language) for value in (check.measured, check.predicted)
    )
    return FIGURE.of(language).format(
        what=check.what.of(language), got=measured, wanted=predicted, gap=shown_gap(check.gap)
    )
