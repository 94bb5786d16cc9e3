"""A stop string is found where it first is complete, however the text was cut into pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.stop_strings import StopStrings

TEXTS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=3)


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first string that the text so far ends with, the longest if there are several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            found = max(complete, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in pairwise(bounds)]


@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 40)))
def test_any_cut_finds_what_brute_force_finds(text, stops, include, places):
    wanted, found = brute_force(text, stops, include)
    search = StopStrings(stops, include)
    given_out = ""
    for piece in cut(text, places):
        given_out += search.push(piece)
        assert wanted.startswith(given_out)  # nothing is ever taken back
        if search.found is not None:
            break
    assert search.found == found
    assert given_out + search.flush() == wanted


@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stops):
    search = StopStrings(stops)
    given_out = search.push(text)
    held = text[len(given_out) :]
    if search.found is None:
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_after_the_end_nothing_comes():
    search = StopStrings(["stop"])
    assert search.push("a sto") == "a "
    assert search.push("p b") == ""
    assert (search.push("more"), search.flush()) == ("", "")


def test_what_is_passed_over_is_not_searched():
    search = StopStrings(["ab"])
    assert search.push("a") == ""
    assert search.pass_over("b ab") == "ab ab"
    assert search.found is None
    assert search.push("ab") == ""
    assert search.found == "ab"
