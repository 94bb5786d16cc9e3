"""Errors of the system in plain words."""

import ssl
import urllib.error
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import closest, edit_distance, system_words

SHORT = st.text("abc", max_size=5)


def test_the_words_of_the_system_stand_without_their_wrapping():
    refused = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)")
    assert system_words(refused) == "connection refused"
    assert system_words(urllib.error.URLError(refused)) == "connection refused"
    assert (
        system_words(OSError(-2, "Name or service not known"))
        == "[Errno -2] Name or service not known"
    )
    assert system_words(TimeoutError()) == "TimeoutError"
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    assert "certificate verify failed" in system_words(urllib.error.URLError(untrusted))


@given(SHORT, SHORT)
def test_the_distance_of_two_words_is_that_of_its_definition(one, other):
    @cache
    def least(i, j):
        if not i or not j:
            return i + j
        ways = [least(i - 1, j) + 1, least(i, j - 1) + 1]
        ways.append(least(i - 1, j - 1) + (one[i - 1] != other[j - 1]))
        if i > 1 and j > 1 and one[i - 2 : i] == other[j - 2 : j][::-1]:
            ways.append(least(i - 2, j - 2) + 1)
        return min(ways)

    assert edit_distance(one, other) == least(len(one), len(other))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian", "train"),
        ("quantise", "quantize"),
        ("dctr", "doctor"),
        ("aline", "align"),
        ("deploy", None),  # replay is as many letters away as some slips are
        ("infer", None),  # tinker
        ("x", None),
    ],
)
def test_a_guess_that_is_far_is_none(typed, meant):
    verbs = ["align", "chat", "doctor", "quantize", "replay", "tinker", "train", "tune"]
    assert closest(typed, verbs) == meant
