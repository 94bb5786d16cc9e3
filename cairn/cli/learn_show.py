"""How the roadmap looks in a terminal: the map, a topic, a plan, a question. Lines of text; decides nothing."""

import shutil
import textwrap
import unicodedata
from collections.abc import Sequence

from cairn.labs.catalogue import all_labs
from cairn.labs.code_place import find_place
from cairn.labs.lab import Language
from cairn.labs.learner import Learner
from cairn.labs.progress import Standing
from cairn.labs.quiz import Asked
from cairn.labs.roadmap import Heading, Topic

SIGNS = {"done": "●", "begun": "◐", "ready": "○", "later": "·"}
HEADS: dict[Language, dict[str, str]] = {
    "en": {
        "done": "done", "begun": "begun", "ready": "ready", "later": "needs others first", "of": "topics done",
        "problem": "Which problem it solves", "debug": "How to see and debug it", "code": "The code here",
        "labs": "Labs", "commands": "Commands", "reading": "Reading", "ask": "Check yourself",
        "requires": "Learn first", "next": "Next", "months": "months", "hidden": "--answers shows the answer",
        "evidence": "Measured on this machine", "answer": "Model answer", "question": "Question",
    },
    "zh": {
        "done": "已完成", "begun": "进行中", "ready": "可以开始", "later": "需先学其他", "of": "个主题已完成",
        "problem": "解决什么问题", "debug": "如何观察与调试", "code": "本项目中的代码",
        "labs": "实验", "commands": "命令", "reading": "阅读", "ask": "自测",
        "requires": "先修", "next": "下一步", "months": "月", "hidden": "加 --answers 查看参考答案",
        "evidence": "本机实测", "answer": "参考答案", "question": "问题",
    },
}  # fmt: skip
PROMPTS: dict[Language, dict[str, str]] = {
    "en": {"think": "Answer aloud, then press Enter ", "judge": "Did you have it? [y/n, q to stop] "},
    "zh": {"think": "先口头回答，再按回车 ", "judge": "答对了吗？[y/n，q 退出] "},
}  # fmt: skip


def whole_map(learner: Learner, language: Language, course: str | None = None) -> list[str]:
    words = HEADS[language]
    lines = [f"{learner.done}/{len(learner.standings)} {words['of']}    " + _legend(language)]
    for one in learner.roadmap.map.course:
        if course is not None and one.id != course:
            continue
        lines += ["", _course_line(one, language)]
        for section in learner.roadmap.map.section:
            if section.course == one.id:
                lines += _section(learner, section, language)
    return [*lines, "", f"{words['next']}: cairn learn next | TOPIC | quiz | week | year"]


def proposals(learner: Learner, standings: Sequence[Standing], language: Language) -> list[str]:
    lines = []
    for one in standings:
        topic = learner.roadmap.topics[one.topic]
        lines += [f"{SIGNS[one.state]} {topic.id}: {topic.text(language).title}"]
        lines += [f"    cairn lab run {name}" for name in one.labs_left]
        if not one.answered:
            lines += [f"    cairn learn quiz --topic {topic.id}"]
    return lines


def topic(learner: Learner, one: Topic, language: Language, answers: bool) -> list[str]:
    words, text, state = HEADS[language], one.text(language), learner.standings[one.id]
    lines = [f"{text.title}  ({one.id}, {words[state.state]})", *_wrapped(text.what, "  ")]
    for key, said in (("problem", text.problem), ("debug", text.debug)):
        lines += ["", words[key], *_wrapped(said, "  ")]
    lines += ["", words["code"], *(f"  {find_place(written)}" for written in one.code)]
    if one.labs:
        lines += ["", words["labs"], *(_lab_line(learner, name, language) for name in one.labs)]
    if one.commands:
        lines += ["", words["commands"], *(f"  {command}" for command in one.commands)]
    if one.reading:
        lines += ["", words["reading"], *(f"  {title}" for title in one.reading)]
    if one.requires:
        lines += ["", f"{words['requires']}: {', '.join(one.requires)}"]
    lines += ["", words["ask"], *_wrapped(text.ask, "  ")]
    return [*lines, *(_wrapped(text.answer, "  > ") if answers else [f"  ({words['hidden']})"])]


def plan(learner: Learner, which: str, language: Language) -> list[str]:
    stages = learner.roadmap.map.week if which == "week" else learner.roadmap.map.year
    lines = []
    for stage in stages:
        when, said = (stage.when_zh, stage.zh) if language == "zh" else (stage.when_en, stage.en)
        lines += [when, *_wrapped(said, "  ")]
        for section in stage.sections:
            topics = learner.roadmap.of_section(section)
            done = sum(learner.standings[topic.id].state == "done" for topic in topics)
            lines += [f"    {section}: {done}/{len(topics)} {HEADS[language]['of']}"]
        lines += [f"    {_signed(learner, name, language)}" for name in stage.topics]
    return lines


def question(asked: Asked, number: int, total: int, language: Language) -> list[str]:
    where = asked.topic if asked.lab is None else f"{asked.topic}, lab {asked.lab}"
    head = f"\n{HEADS[language]['question']} {number}/{total}  ({where})"
    return [head, *_wrapped(asked.ask.words.of(language), "  ")]


def answer(asked: Asked, language: Language) -> list[str]:
    words = HEADS[language]
    lines = [words["answer"], *_wrapped(asked.answer.words.of(language), "  ")]
    if asked.evidence:
        lines += [words["evidence"], *(f"  {line.words.of(language)}" for line in asked.evidence)]
    return lines


def _course_line(course: Heading, language: Language) -> str:
    months = (
        f"  ({HEADS[language]['months']} {course.months[0]}-{course.months[1]})"
        if course.months
        else ""
    )
    needs = f"  <- {', '.join(course.requires)}" if course.requires else ""
    return f"{course.id}  {course.title(language)}{months}{needs}"


def _section(learner: Learner, section: Heading, language: Language) -> list[str]:
    topics = learner.roadmap.of_section(section.id)
    done = sum(learner.standings[topic.id].state == "done" for topic in topics)
    signed = "  ".join(f"{SIGNS[learner.standings[topic.id].state]} {topic.id}" for topic in topics)
    return [
        f"  {section.title(language)}  {done}/{len(topics)}",
        *_wrapped(signed, "    ", whole="  "),
    ]


def _signed(learner: Learner, name: str, language: Language) -> str:
    one = learner.roadmap.topics[name]
    return f"{SIGNS[learner.standings[name].state]} {name}: {one.text(language).title}"


def _lab_line(learner: Learner, name: str, language: Language) -> str:
    title = all_labs()[name].title.of(language)
    if name in learner.runs:
        return f"  ✓ {name}: {title}; {learner.runs[name].verdict.words.of(language)}"
    return f"  ○ {name}: {title}; cairn lab run {name}"


def _legend(language: Language) -> str:
    return "  ".join(f"{sign} {HEADS[language][state]}" for state, sign in SIGNS.items())


def _wrapped(text: str, before: str, whole: str | None = None) -> list[str]:
    """Lines of the terminal's width. `whole`: break at this text only."""
    width = min(shutil.get_terminal_size().columns, 110) - len(before)
    if whole is not None:
        return [before + line for line in _filled(text.split(whole), whole, width)]
    if any(unicodedata.east_asian_width(letter) == "W" for letter in text):
        return [before + line for line in _filled(list(text), "", width)]
    return [before + line for line in textwrap.wrap(text, width) or [""]]


def _filled(parts: list[str], between: str, width: int) -> list[str]:
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{between}{part}" if lines[-1] else part
        if lines[-1] and _cells(longer) > width and part not in "，。；：、）”":
            lines.append(part)
        else:
            lines[-1] = longer
    return lines


def _cells(text: str) -> int:
    """Columns of a terminal: Chinese letters take two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
