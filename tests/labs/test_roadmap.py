"""The roadmap maps every topic it was given to code that exists and to something that runs."""

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import msgspec
import pytest
from shared_data import shared

from cairn.cli.main import VERBS, main
from cairn.labs import roadmap
from cairn.labs.code_location import find_place
from cairn.labs.roadmap import load, problems

ITEMS = Path(__file__).with_name("roadmap_items.txt")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def items():
    lines = ITEMS.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def named():
    return {name for topic in load().topics.values() for name in topic.names}


def test_every_item_of_the_roadmap_is_a_topic():
    assert [item for item in items() if item not in named()] == []


def asked_for(text):
    """The topics of the document that the roadmap was made from: between dots, up to a colon or a bracket."""
    sections = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    for section in sections:
        for topic in " ".join(section.split()).split(" · "):
            yield re.split(r": | \(| \[", topic.strip(" ."))[0].strip(" .")


def test_the_list_of_items_is_that_of_the_document_it_was_made_from():
    """The list in this folder is ours; the document is not."""
    topics = [topic for topic in asked_for(shared("roadmap.md").read_text()) if topic]
    words = [set(re.findall(r"[a-z0-9]+", item.lower())) for item in items()]

    def is_listed(topic):
        wanted = set(re.findall(r"[a-z0-9]+", topic.lower()))
        return any(len(wanted & found) >= 0.6 * len(wanted) for found in words)

    assert len(topics) > 150
    assert [topic for topic in topics if not is_listed(topic)] == []


def test_nothing_points_nowhere():
    assert problems(load()) == []


def test_every_text_is_there_in_both_languages():
    faults = []
    for topic in load().topics.values():
        for field in topic.en.__struct_fields__:
            english, chinese = getattr(topic.en, field), getattr(topic.zh, field)
            if not english.strip() or CHINESE.search(english):
                faults.append(f"{topic.id}.en.{field}")
            if not chinese.strip() or (field != "title" and not CHINESE.search(chinese)):
                faults.append(f"{topic.id}.zh.{field}")
    assert faults == []


def test_one_chinese_term_for_one_thing():
    """A GPU kernel is "kernel", the operating system's is 内核; prefill and decode apart are PD 分离."""
    folder = Path(roadmap.__file__).parent
    faults = []
    for file in folder.rglob("*.toml"):
        text = file.read_text()
        faults += [
            f"{file.name}: {term}" for term in ("存算分离", "核函数", "寻模型") if term in text
        ]
        about_gpus = file.parent.name in ("gpu", "pytorch") or file.name == "sys-601.toml"
        lines = [line for line in text.splitlines() if "内核" in line] if about_gpus else []
        faults += [f"{file.name}: {line}" for line in lines if "系统调用" not in line]
    assert faults == []


def commands():
    found = {command for topic in load().topics.values() for command in topic.commands}
    return sorted(command for command in found if command.startswith("cairn "))


def test_commands_name_verbs_and_flags_that_exist():
    """Each verb is asked for its help once, and must know every flag that a topic shows."""
    faults = []
    for command in commands():
        words = shlex.split(command)[1:]
        if words[0] not in VERBS:
            faults.append(f"{command}: no verb {words[0]}")
            continue
        verb = _verb_of(words)
        status, text = _help(verb)
        if status != 0:
            faults.append(f"{command}: `cairn {' '.join(verb)} --help` leaves with {status}")
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            if flag not in ("--help", "--json") and flag not in text:
                faults.append(f"{command}: no flag {flag}")
    assert faults == []


def _verb_of(words):
    """`lab run roofline` is the verb `lab run`; `train tiny-cpu` is the verb `train`."""
    verb, rest = words[0], words[1:]
    if rest and not rest[0].startswith("-"):
        status, text = _help((verb, rest[0]))
        if status == 0 and text != _help((verb,))[1]:
            return verb, rest[0]
    return (verb,)


@cache
def _help(verb):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main([*verb, "--help"])
    return status, out.getvalue()


def test_a_place_is_found_with_its_line():
    place = find_place("cairn/labs/roadmap.py:Roadmap.topic")
    lines = (Path(roadmap.__file__)).read_text().splitlines()
    assert lines[place.line - 1].strip().startswith("def topic(")


@pytest.mark.parametrize(
    "written",
    ["cairn/labs/nowhere.py", "cairn/labs/roadmap.py:nobody", "../etc/passwd", "cairn/../setup.py"],
)
def test_a_place_that_is_not_there_is_an_error(written):
    with pytest.raises(ValueError, match=re.escape(written)):
        find_place(written)


def test_a_circle_of_prerequisites_is_named():
    one, other = list(load().topics.values())[:2]
    circle = {
        "a": msgspec.structs.replace(one, id="a", requires=["b"]),
        "b": msgspec.structs.replace(other, id="b", requires=["a"]),
    }
    assert any("a -> b -> a" in line for line in problems(roadmap.Roadmap(load().map, circle)))
