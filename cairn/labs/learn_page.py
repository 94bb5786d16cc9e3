"""The roadmap as one self-contained page: the map with what is done, and every topic behind its chip.

    courses ── sections ── topics (● done ◐ begun ○ ready · later)
    below: each topic with what, why, how to debug it, code, labs with their newest verdict, reading, a self-check

For a person without a server; the Learn view of the server's page shows the same. Both languages are in it.
"""

from cairn.labs import bilingual_page
from cairn.labs.bilingual_page import both, language_tag, switch
from cairn.labs.catalogue import all_labs
from cairn.labs.code_location import find_place
from cairn.labs.lab import Language, Words
from cairn.labs.learner import Learner
from cairn.labs.lesson import Lesson, lesson_of, reading_of, snippet_of
from cairn.labs.roadmap import Heading, Topic
from cairn.labs.wording import STATE_SIGNS, WORDS
from cairn.report.page import Markup, element, heading, join, page


def map_page(learner: Learner, language: Language) -> str:
    """Everything: the map, then the topics section by section."""
    done = Words(
        f"{learner.done} of {len(learner.standings)} topics done",
        f"{len(learner.standings)} 个主题中已完成 {learner.done} 个",
    )
    sections = learner.roadmap.map.section
    return page(
        WORDS["title"].of(language),
        switch(language),
        both(done, "p"),
        *(_course(learner, course) for course in learner.roadmap.map.course),
        *(_topics(learner, section) for section in sections),
        style=bilingual_page.STYLE + STYLE,
        language=language_tag(language),
    )


def topic_page(learner: Learner, topic: Topic, language: Language) -> str:
    return page(
        topic.text(language).title,
        switch(language),
        *_about(learner, topic),
        style=bilingual_page.STYLE + STYLE,
        language=language_tag(language),
    )


def _course(learner: Learner, course: Heading) -> Markup:
    parts: list[Markup] = [element("h2", f"{course.id} ", both(Words(course.en, course.zh)))]
    if course.requires:
        parts.append(element("p", "← ", ", ".join(course.requires), class_="soft"))
    for section in learner.roadmap.map.section:
        if section.course == course.id:
            chips = [_chip(learner, topic) for topic in learner.roadmap.of_section(section.id)]
            parts += [heading(both(Words(section.en, section.zh)), 3)]
            parts += [element("p", *chips, class_="chips")]
    return element("section", *parts)


def _chip(learner: Learner, topic: Topic) -> Markup:
    state = learner.standings[topic.id].state
    title = both(Words(topic.en.title, topic.zh.title))
    return element(
        "a", f"{STATE_SIGNS[state]} ", title, href=f"#{topic.id}", class_=f"chip {state}"
    )


def _topics(learner: Learner, section: Heading) -> Markup:
    parts = [element("h2", both(Words(section.en, section.zh)))]
    for topic in learner.roadmap.of_section(section.id):
        title = both(Words(topic.en.title, topic.zh.title))
        parts.append(
            element("details", element("summary", title), *_about(learner, topic), id=topic.id)
        )
    return element("section", *parts)


def _about(learner: Learner, topic: Topic) -> list[Markup]:
    en, zh, lesson = topic.en, topic.zh, lesson_of(topic.id)
    places = (element("li", element("code", str(find_place(written)))) for written in topic.code)
    parts = [
        both(Words(en.what, zh.what), "p"),
        _titled("problem", both(Words(en.problem, zh.problem), "p")),
        *(_lesson(lesson) if lesson is not None else []),
        _titled("debug", both(Words(en.debug, zh.debug), "p")),
        _titled("code", element("ul", *places)),
    ]
    if topic.labs:
        labs = element("ul", *(_lab(learner, name) for name in topic.labs))
        parts.append(_titled("labs", labs))
    if topic.commands:
        commands = (element("li", element("code", command)) for command in topic.commands)
        parts.append(_titled("commands", element("ul", *commands)))
    reading = reading_of(topic.reading, lesson)
    if reading:
        titles = (element("li", title) for title in reading)
        parts.append(_titled("reading", element("ul", *titles)))
    parts.append(_titled("ask", _question(Words(en.ask, zh.ask), Words(en.answer, zh.answer))))
    if lesson is not None:
        asked = [_question(one.ask, one.answer) for one in lesson.interview]
        parts.append(_titled("asked", join(asked)))
    return parts


def _question(ask: Words, answer: Words) -> Markup:
    return element("details", element("summary", both(ask)), both(answer, "p"))


def _lesson(lesson: Lesson) -> list[Markup]:
    snippet = snippet_of(lesson)
    code = element("pre", "\n".join(snippet.lines))
    mistakes = (both(one, "li") for one in lesson.mistakes)
    return [
        _titled("picture", element("pre", lesson.picture)),
        _titled("worked", element("div", both(lesson.worked, "p"), class_="worked")),
        _titled("snippet", join([element("p", element("code", snippet.place)), code])),
        _titled("mistakes", element("ul", *mistakes)),
    ]


def _lab(learner: Learner, name: str) -> Markup:
    title = both(all_labs()[name].title)
    run = learner.runs.get(name)
    said = both(run.verdict) if run is not None else element("code", f"cairn lab run {name}")
    return element("li", title, ": ", said)


def _titled(name: str, part: Markup) -> Markup:
    return join([heading(both(WORDS[name]), 4), part])


STYLE = """
.chips { display: flex; flex-wrap: wrap; gap: .35rem; max-width: none; }
.chip { border: 1px solid var(--line); border-radius: 1rem; padding: .1rem .6rem; color: var(--ink);
  text-decoration: none; }
.chip.done { border-color: var(--good); } .chip.later { color: var(--soft); } .soft { color: var(--soft); }
h3 { font-size: .95rem; margin: .9rem 0 .3rem; } h4 { font-size: .85rem; margin: .8rem 0 .2rem; color: var(--soft); }
pre { overflow-x: auto; font-size: .8rem; line-height: 1.35; }   .worked p { white-space: pre-line; }
details { max-width: 75ch; margin: .3rem 0; } summary { cursor: pointer; } ul { margin: .2rem 0; padding-left: 1.2rem; }
"""
