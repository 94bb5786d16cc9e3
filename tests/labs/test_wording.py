"""One list of words for the terminal and both pages: all of them are there, in both languages."""

import re
from pathlib import Path
from typing import get_args

import cairn
from cairn.labs.entry import Status
from cairn.labs.progress import State
from cairn.labs.wording import RUN_SIGNS, STATE_SIGNS, WORDS

CHINESE = re.compile(r"[\u4e00-\u9fff]")
ASKED = re.compile(r'word\("([^"]+)"\)|titled\("([^"]+)"')


def test_every_word_is_there_in_both_languages():
    faults = [
        name
        for name, word in WORDS.items()
        if not word.en or CHINESE.search(word.en) or not CHINESE.search(word.zh)
    ]
    assert faults == []


def test_every_state_has_a_sign_and_a_word():
    assert set(STATE_SIGNS) == set(get_args(State))
    assert set(RUN_SIGNS) == set(get_args(Status))
    assert set(STATE_SIGNS) | set(RUN_SIGNS) <= set(WORDS)


def test_the_servers_page_asks_for_words_that_exist():
    scripts = Path(cairn.__file__).parent / "web" / "static" / "learn"
    asked = {
        one or other
        for script in scripts.glob("*.js")
        for one, other in ASKED.findall(script.read_text(encoding="utf-8"))
    }
    assert len(asked) > 10
    assert asked <= set(WORDS)
