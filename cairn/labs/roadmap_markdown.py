"""The roadmap as a page of the documentation: every topic with its code and what runs.

    python -m cairn.labs.roadmap_markdown docs/roadmap.md

A test holds the page against the data, so that it cannot fall behind.
"""

import sys
from pathlib import Path

from cairn.labs.roadmap import Heading, Roadmap, Topic, load

HEAD = """# The roadmap

Every topic of the five courses, with the code here and what runs for it. `cairn learn` shows the same map with what
you have done, `cairn learn TOPIC` the whole text (what it is, which problem it solves, how to debug it, reading, a
self-check, and for many topics a lesson: picture, worked number, the code, mistakes, interview questions), `--lang
zh` all of it in Chinese. `cairn learn quiz` asks and you judge; `cairn learn interview` reads a typed answer and
grades it by a rubric, also of logs to diagnose (`--round diagnose`); `cairn learn placement --course SYS-602` tests
out of topics that you know (two questions each); `cairn learn plan week` (`12-weeks`, `year`)
gives hours, commands, an output and a check for each day, as Markdown with `--markdown`; `cairn learn story` drafts
project stories from your record; `cairn exercise list` has what you write yourself. The server's page has it under
Learn. This page is made by `python -m cairn.labs.roadmap_markdown docs/roadmap.md`.
"""


def markdown(roadmap: Roadmap) -> str:
    parts = [HEAD]
    for course in roadmap.map.course:
        after = f" (after {', '.join(course.requires)})" if course.requires else ""
        parts.append(f"## {course.id} {course.en} · {course.zh}{after}\n")
        sections = [one for one in roadmap.map.section if one.course == course.id]
        parts += [_section(roadmap, section) for section in sections]
    return "\n".join(parts)


def _section(roadmap: Roadmap, section: Heading) -> str:
    rows = [_row(topic) for topic in roadmap.of_section(section.id)]
    head = f"### {section.en} · {section.zh}\n\n| topic | code | labs and commands |\n|---|---|---|"
    return "\n".join([head, *rows]) + "\n"


def _row(topic: Topic) -> str:
    code = ", ".join(f"`{written.partition(':')[0]}`" for written in dict.fromkeys(topic.code))
    runs = [f"`cairn lab run {name}`" for name in topic.labs]
    runs += [f"`{command}`" for command in topic.commands]
    return (
        f"| **{topic.en.title}** · {topic.zh.title} (`{topic.id}`) | {code} | {', '.join(runs)} |"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(load()), encoding="utf-8")
