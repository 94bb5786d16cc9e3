"""`cairn train schedule`: the picture, the numbers, and what is refused."""

import json
import subprocess
import sys

import pytest

from cairn.cli.train.pipeline import run
from cairn.core.errors import ConfigError, UsageError


def test_it_draws_and_says_what_it_costs(capsys):
    assert run(["1f1b", "--stages", "2", "--microbatches", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == [
        "rank",
        "0",
        "F0",
        "F1",
        ".",
        ".",
        "B0",
        "B0",
        ".",
        "B1",
        "B1",
    ]
    assert "bubble 33.3%" in printed


def test_json_has_every_action_with_its_time(capsys):
    assert run(["zbv", "--stages", "2", "--microbatches", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bubble"] == pytest.approx(0.5 / 12.5)
    assert [len(rank) for rank in document["ranks"]] == [2 * 3 * 4] * 2
    assert document["ranks"][0][0] == {
        "action": "F0",
        "kind": "F",
        "chunk": 0,
        "microbatch": 0,
        "start": 0.0,
        "end": 0.5,
    }


def test_all_are_compared_and_those_that_cannot_run_say_why(capsys):
    assert run(["all", "--stages", "4", "--microbatches", "6"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "bubble  33.3%" in lines["1f1b"]
    assert "6 microbatches % 4 ranks = 2" in lines["interleaved"]
    assert "needs 8 microbatches, not 6" in lines["dualpipev"]


def test_costs_change_the_picture(capsys):
    run(["gpipe", "--stages", "2", "--microbatches", "2", "--send", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["span"] == 9 + 2  # down once and up once


def test_the_page_stands_alone(tmp_path, capsys):
    page = tmp_path / "schedule.html"
    assert run(["dualpipev", "--html", str(page)]) == 0
    written = page.read_text()
    assert "<svg" in written
    assert "src=" not in written
    assert "wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["1f2b"], ConfigError, "no pipeline schedule is called '1f2b'"),
        (["1f1b", "--stages", "0"], ConfigError, "1f1b with 0 ranks"),
        (["1f1b", "--forward", "0"], UsageError, "--forward is 0.0"),
        (["1f1b", "--send", "-1"], UsageError, "--send is -1.0"),
        (["1f1b", "--chunks", "3"], ConfigError, "1f1b has 1 chunks on each rank, not 3"),
    ],
)
def test_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        run(arguments)


def test_it_needs_no_torch():
    code = "import sys; from cairn.cli.train.pipeline import run; run(['all']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
