"""`cairn learn plan` and `cairn learn story`: Markdown to the terminal or to a file. Chooses and prints."""

import sys
from typing import TYPE_CHECKING

import msgspec

from cairn.core.prose import in_terminal

if TYPE_CHECKING:
    from cairn.cli.learn.learn import Learn


def run_plan(options: "Learn") -> int:
    from cairn.labs.plans import find_plan, load, markdown

    plan = find_plan(options.which or "week")
    if options.json:
        document = {"plan": plan, "hours": plan.hours, "capstones": load().capstone}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
        return 0
    return _hand_out(markdown(plan, options.lang), options)


def run_story(options: "Learn") -> int:
    from cairn.labs import record
    from cairn.labs.catalogue import all_labs
    from cairn.labs.exercises import journal
    from cairn.labs.story import drafts

    newest = record.latest(record.read().entries)
    passed = sorted(journal.passed(journal.read()))
    story = drafts(newest, all_labs(), passed, options.lang)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode({"markdown": story})).decode())
        return 0
    return _hand_out(story, options)


def _hand_out(text: str, options: "Learn") -> int:
    if options.markdown is None:
        for line in text.splitlines():
            print(in_terminal(line, "  "))
        return 0
    options.markdown.write_text(text, encoding="utf-8")
    print(f"wrote {options.markdown}", file=sys.stderr)
    return 0
