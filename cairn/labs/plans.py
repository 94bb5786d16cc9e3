"""Plans with outputs: for each day, week or month the hours, the commands, what to hand in and how to check it.

    plans.toml   week, 12-weeks, year; capstones with a rubric and this project's code as the reference

`markdown` writes a plan as a list to tick off. Pure: reads its file once.
"""

from functools import cache
from pathlib import Path

import msgspec

from cairn.core.errors import UsageError, did_you_mean
from cairn.labs.lab import Language, Words

FILE = Path(__file__).with_name("plans.toml")


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A day, a week or a month."""

    when: Words
    theme: Words
    hours: int
    commands: list[str]
    output: Words  # what to hand in
    check: Words  # how to know that it is done


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    title: Words
    stage: list[Stage]

    @property
    def hours(self) -> int:
        return sum(stage.hours for stage in self.stage)


class Capstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A project at the end of a course."""

    course: str
    title: Words
    build: Words
    reference: list[str]  # this project's own code
    rubric: list[Words]  # one line each, worth the same


class Plans(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: list[Plan]
    capstone: list[Capstone]


@cache
def load() -> Plans:
    try:
        return msgspec.toml.decode(FILE.read_bytes(), type=Plans)
    except msgspec.DecodeError as error:
        raise ValueError(f"{FILE.name}: {error}") from error


def find_plan(name: str) -> Plan:
    plans = {plan.id: plan for plan in load().plan}
    if name not in plans:
        hint = did_you_mean(name, plans, otherwise=f"plans are: {', '.join(plans)}")
        raise UsageError(f"there is no plan '{name}'", hint=hint)
    return plans[name]


def markdown(plan: Plan, language: Language) -> str:
    """The plan as a list to tick off, with the capstones behind it."""
    words = WORDS_ZH if language == "zh" else WORDS_EN
    colon = words["colon"]
    lines = [f"# {plan.title.of(language)}", "", words["hours"].format(plan.hours), ""]
    for stage in plan.stage:
        lines += [f"## {stage.when.of(language)}{colon}{stage.theme.of(language)}", ""]
        lines += [f"- {words['time']}{colon}{stage.hours} {words['h']}"]
        lines += [f"- [ ] `{command}`" for command in stage.commands]
        lines += [f"- [ ] {words['output']}{colon}{stage.output.of(language)}"]
        lines += [f"- [ ] {words['check']}{colon}{stage.check.of(language)}", ""]
    lines += [f"# {words['capstones']}", ""]
    for capstone in load().capstone:
        lines += [f"## {capstone.course}{colon}{capstone.title.of(language)}", ""]
        lines += [capstone.build.of(language), ""]
        lines += [f"- [ ] {point.of(language)}" for point in capstone.rubric]
        lines += [
            f"- {words['reference']}{colon}{', '.join(f'`{one}`' for one in capstone.reference)}",
            "",
        ]
    return "\n".join(lines)


WORDS_EN = {
    "hours": "{0} hours in all.",
    "h": "h",
    "colon": ": ",
    "time": "time",
    "output": "hand in",
    "check": "done when",
    "capstones": "Capstones",
    "reference": "reference",
}
WORDS_ZH = {
    "hours": "共 {0} 小时。",
    "h": "小时",
    "colon": "：",
    "time": "时间",
    "output": "产出",
    "check": "完成标准",
    "capstones": "结课项目",
    "reference": "参考实现",
}
