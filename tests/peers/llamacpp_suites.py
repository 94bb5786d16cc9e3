"""Runs llama.cpp's tests of its own server against Cairn, and compares what fails with the list of known failures.

    python tests/peers/llamacpp_suites.py CHECKOUT MODEL [completion chat_completion ...] [-- more words for pytest]

CHECKOUT is a checkout of github.com/ggml-org/llama.cpp with tools/server/tests and models/templates, MODEL is
stories260K.gguf. Nothing of the checkout is changed: its tests are copied to a temporary folder and run there, with
`llamacpp_plugin` in place of the llama-server that they start. `llamacpp_failures.toml` has a reason for each failure
that remains; exit status 1: a test fails that is not in it, or one in it passes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAILURES = HERE / "llamacpp_failures.toml"


Lists = dict[str, dict[str, str]]


def read_lists() -> Lists:
    """Suites and those that are left out, tests that pass by chance, and tests that fail, each with a reason."""
    return tomllib.loads(FAILURES.read_text())


def reason_of(test: str, failures: dict[str, str]) -> str | None:
    """A name in the list that has no parameters means all of them."""
    name = test.removeprefix("unit/test_").replace(".py::test_", "::", 1)
    return failures.get(name, failures.get(name.partition("[")[0]))


def run(checkout: Path, model: Path, suites: list[str], words: list[str]) -> dict[str, str]:
    """The outcome of each test: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tools", "server", "tests")
        shutil.copytree(checkout / "tools" / "server" / "tests", folder)
        Path(scratch, "models").symlink_to((checkout / "models").resolve())
        outcomes = Path(scratch, "outcomes.json")
        env = os.environ | {
            "CAIRN_PEER_MODEL": str(model.resolve()),
            "CAIRN_PEER_OUTCOMES": str(outcomes),
            "CAIRN_PEER_SCRATCH": scratch,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), str(folder)]),
        }
        files = [f"unit/test_{suite}.py" for suite in suites]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "llamacpp_plugin",
            "-p",
            "no:cacheprovider",
        ]
        subprocess.run([*command, *words, *files], cwd=folder, env=env, check=False)
        return json.loads(outcomes.read_text())


def compare(outcomes: dict[str, str], lists: Lists) -> list[str]:
    """What is not as the lists say; nothing: all of it is."""
    wrong, failures = [], lists["failures"]
    for test, outcome in outcomes.items():
        if outcome == "failed" and reason_of(test, failures | lists["by_chance"]) is None:
            wrong.append(f"fails, and is not listed: {test}")
    for name in failures:
        found = [one for test, one in outcomes.items() if reason_of(test, {name: "x"}) is not None]
        if found and "failed" not in found:
            wrong.append(f"is listed, and does not fail: {name} ({', '.join(sorted(set(found)))})")
    return wrong


def main() -> int:
    words = sys.argv[1:]
    words, more = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    lists = read_lists()
    checkout, model, *chosen = words
    outcomes = run(Path(checkout), Path(model), chosen or list(lists["suites"]), more)
    for suite in chosen or lists["suites"]:
        counts = Counter(
            one for test, one in outcomes.items() if test.startswith(f"unit/test_{suite}.py")
        )
        print(
            f"{suite}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
        )
    wrong = compare(outcomes, lists)
    print("\n".join(wrong) or "every failure is listed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
