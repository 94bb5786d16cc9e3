"""`cairn learn`: the roadmap, what of it is done, and what to do next.

    cairn learn                 the map
    cairn learn next            a few topics that are ready now
    cairn learn kv-cache        one topic: what, why, how to debug it, code, labs, reading, a self-check
    cairn learn quiz            questions of the topics, with evidence from this machine
    cairn learn interview       nine rounds; typed answers are graded by a rubric
    cairn learn placement       tests out of topics that you know: two questions each, both right
    cairn learn story           project stories (STAR) from your own record, as Markdown
    cairn learn plan week       hours, commands, output and check for each day; also 12-weeks, year
    cairn learn week | year     which sections of the map come when

A topic is done when its labs have run (`cairn lab run`) and its question was answered (`cairn learn quiz`). Chooses and
asks; `learn_show` draws, `cairn.labs` knows.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.learn.lab import require_place
from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from cairn.labs.learner import Learner
    from cairn.labs.quiz import Asked
    from cairn.labs.roadmap import Topic

Language = Literal["en", "zh"]
VIEWS = ("map", "next", "quiz", "interview", "placement", "story", "plan", "week", "year")


class Learn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The roadmap: the map, one topic, what is next, a quiz, plans for a week and a year."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[TOPIC]")] = "map"
    """a topic by its id, or one of: next, quiz, interview, placement, story, plan, week, year; nothing shows the map"""
    which: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PLAN]")] = ""
    """of plan: week, 12-weeks or year"""
    lang: Language = "en"
    """en or zh"""
    course: str | None = None
    """map, quiz and placement: this course only (SYS-601 ... SYS-605)"""
    topic: str | None = None
    """quiz and placement: this topic only"""
    count: int = 5
    """quiz and next: how many; placement: how many topics"""
    round: str | None = None
    """interview: one round: systems, kernels, training, networking, inference, cluster, project, diagnose,
    topics"""
    seed: int | None = None
    """quiz and interview: the same questions again"""
    answers: bool = False
    """a topic: show the model answer below the question"""
    html: Path | None = None
    """write the map, or the topic, as one page to this file"""
    markdown: Path | None = None
    """plan and story: write them as Markdown to this file"""
    json: bool = False
    """print one JSON document"""


def run(args: list[str]) -> int:
    options = load(Learn, args=args, env_prefix="CAIRN_LEARN_").value
    _check(options)
    if options.what in ("plan", "story", "interview"):
        from cairn.cli.learn import learn_interview, learn_plan

        page = {"plan": learn_plan.run_plan, "story": learn_plan.run_story}.get(options.what)
        return learn_interview.run_interview(options) if page is None else page(options)
    from cairn.labs.learner import look

    learner = look()
    for trouble in learner.trouble:
        print(trouble, file=sys.stderr)
    if options.course is not None:
        _require_course(learner, options.course)
    match options.what:
        case "quiz":
            return run_quiz(learner, options)
        case "placement":
            from cairn.cli.learn.learn_interview import run_placement

            return run_placement(learner, _asked_topics(learner, options), options)
        case "map" | "next" | "week" | "year":
            return show_map(learner, options)
        case name:
            return show_topic(learner, _find(learner, name), options)


def show_map(learner: "Learner", options: Learn) -> int:
    from cairn.cli.learn import learn_show
    from cairn.labs.learner import map_document
    from cairn.labs.progress import next_topics

    if options.html is not None:
        from cairn.labs.learn_page import map_page

        _write(options.html, map_page(learner, options.lang))
    if options.json:
        document = map_document(learner)
        if options.what == "next":
            document = {
                "next": [one.topic for one in next_topics(learner.standings, options.count)]
            }
        elif options.what in ("week", "year"):
            document = {options.what: document["plans"][options.what]}
        _print_json(document)
    elif options.what == "next":
        proposals = next_topics(learner.standings, options.count)
        print("\n".join(learn_show.proposals(learner, proposals, options.lang)))
    elif options.what in ("week", "year"):
        print("\n".join(learn_show.plan(learner, options.what, options.lang)))
    else:
        print("\n".join(learn_show.whole_map(learner, options.lang, options.course)))
    return 0


def show_topic(learner: "Learner", topic: "Topic", options: Learn) -> int:
    from cairn.cli.learn import learn_show
    from cairn.labs.learner import topic_document

    if options.html is not None:
        from cairn.labs.learn_page import topic_page

        _write(options.html, topic_page(learner, topic, options.lang))
    if options.json:
        _print_json(topic_document(learner, topic))
    else:
        print("\n".join(learn_show.topic(learner, topic, options.lang, options.answers)))
    return 0


def run_quiz(learner: "Learner", options: Learn) -> int:
    import secrets

    from cairn.labs.learner import answers
    from cairn.labs.quiz import choose, pool

    kept = answers()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    asked = choose(
        pool(learner, _asked_topics(learner, options)), kept.right(), options.count, seed
    )
    if options.json:
        _print_json({"seed": seed, "questions": asked})
        return 0
    if not sys.stdin.isatty():
        raise UsageError(
            "the quiz asks and waits for answers, and standard input is no terminal",
            hint="`cairn learn quiz --json` prints questions, answers and evidence",
        )
    right = 0
    for number, question in enumerate(asked, start=1):
        verdict = _ask(question, number, len(asked), options.lang)
        if verdict is None:
            break
        right += verdict
        if question.lab is None:
            kept.add(question.topic, verdict)
    print(
        {"en": f"{right} of {len(asked)}", "zh": f"{len(asked)} 题中答对 {right} 题"}[options.lang]
    )
    return 0


def _ask(question: "Asked", number: int, total: int, language: Language) -> bool | None:
    """Asks, grades what is typed by the rubric and shows the answer and the evidence; None: enough for now.

    A lab's question has no rubric: there the person judges.
    """
    from cairn.cli.learn import learn_show
    from cairn.labs.rubric import grade_answer
    from cairn.labs.wording import WORDS

    print("\n".join(learn_show.question(question, number, total, language)))
    try:
        reply = input(WORDS["type an answer"].of(language)).strip()
        if reply.lower() in ("q", "quit"):
            return None
        graded = grade_answer(reply, question.points) if question.points else None
        print("\n".join(learn_show.answer(question, language, graded)))
        if graded is not None:
            return graded.right
        judged = input(WORDS["judge"].of(language)).strip().lower()
    except EOFError:
        return None
    return None if judged.startswith("q") else judged.startswith(("y", "是", "对"))


def _asked_topics(learner: "Learner", options: Learn) -> "list[Topic]":
    if options.topic is not None:
        return [_find(learner, options.topic)]
    topics = list(learner.roadmap.topics.values())
    if options.course is None:
        return topics
    sections = {one.id for one in learner.roadmap.map.section if one.course == options.course}
    return [topic for topic in topics if topic.section in sections]


def _find(learner: "Learner", name: str) -> "Topic":
    if name not in learner.roadmap.topics:
        choices = [*learner.roadmap.topics, *VIEWS]
        hint = did_you_mean(name, choices, otherwise="`cairn learn` shows all topics")
        raise UsageError(f"there is no topic '{name}'", hint=hint)
    return learner.roadmap.topics[name]


def _require_course(learner: "Learner", course: str) -> None:
    known = [one.id for one in learner.roadmap.map.course]
    if course not in known:
        hint = did_you_mean(course, known, otherwise=f"courses are: {', '.join(known)}")
        raise UsageError(f"there is no course '{course}'", hint=hint)


def _check(options: Learn) -> None:
    if options.which and options.what != "plan":
        raise UsageError(
            f"'{options.which}' is one word too many behind '{options.what}'",
            hint="only `cairn learn plan` takes a second word: week, 12-weeks or year",
        )
    if options.markdown is not None:
        require_place(options.markdown)
    if options.count < 1:
        raise UsageError(f"--count is at least 1, not {options.count}")
    if options.html is not None:
        require_place(options.html)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
