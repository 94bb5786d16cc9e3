"""llama.cpp's tests of its own server, where a checkout is named; the list of those that fail, always."""

import os
import subprocess
import sys
from pathlib import Path

import llamacpp_suites
import pytest
import shared_data

CHECKOUT = os.environ.get("CAIRN_LLAMACPP")
LISTS = ("suites", "left_out", "by_chance", "failures")


def test_every_entry_of_the_list_has_a_suite_and_a_reason():
    listed = llamacpp_suites.read_lists()
    assert tuple(listed) == LISTS
    assert all(reason.strip() for entries in listed.values() for reason in entries.values())
    assert not set(listed["suites"]) & set(listed["left_out"])
    for name in (*listed["by_chance"], *listed["failures"]):
        suite, _, test = name.partition("::")
        assert suite in listed["suites"], name
        assert test, name
    assert not set(listed["by_chance"]) & set(listed["failures"])


def test_outcomes_are_compared_with_the_list():
    listed = {"by_chance": {"a::luck": "seed"}, "failures": {"a::one": "x", "a::two[3]": "y"}}
    place = "unit/test_a.py::test_"
    expected = {
        "one[1]": "failed",
        "one[2]": "passed",
        "two[3]": "failed",
        "luck": "passed",
        "luck[2]": "failed",
    }
    assert llamacpp_suites.compare({place + k: v for k, v in expected.items()}, listed) == []
    wrong = llamacpp_suites.compare(
        {place + "one": "passed", place + "two[3]": "skipped", place + "two[4]": "failed"}, listed
    )
    assert [line.partition(":")[0] for line in wrong] == [
        "fails, and is not listed",
        "is listed, and does not fail",
        "is listed, and does not fail",
    ]


@pytest.mark.skipif(CHECKOUT is None, reason="needs llama.cpp: set CAIRN_LLAMACPP to a checkout")
@pytest.mark.timeout(3600)
def test_llama_cpps_own_tests_fail_as_listed():
    model = shared_data.shared("models", "stories260K.gguf")
    script = Path(llamacpp_suites.__file__)
    command = [sys.executable, str(script), str(CHECKOUT), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
