"""`cairn comm simulate`: the document, the page, the other questions, and what is refused."""

import json

import pytest

from cairn.cli.comm.comm import run
from cairn.comm.published import NAMED
from cairn.comm.validate_fabrics import GOAL, markdown, report
from cairn.core.errors import CairnError

SMALL = ["simulate", "--gpus", "512", "--size", "64MiB", "--topology", "rail-2tier"]


def asked(capsys, *words):
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_document_and_a_page(capsys, tmp_path):
    page = tmp_path / "out.html"
    found = asked(capsys, *SMALL, "--html", str(page))
    assert found["nodes"] == 64
    assert found["result"]["busbw_gb_per_s"] > 0
    assert found["healthy"] is None
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "Chunks at the last node" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_faults_are_beside_what_healthy_would_be(capsys):
    found = asked(capsys, *SMALL, "--slow-nics", "1")
    assert found["result"]["us"] > found["healthy"]["us"]
    assert run([*SMALL, "--slow-nics", "1"]) == 0
    assert "slow NIC" in capsys.readouterr().out


def test_the_other_questions(capsys, tmp_path):
    jam = asked(capsys, "simulate", "--incast", "8", "--size", "1MiB")
    assert jam["bystander_us"] > 4 * jam["bystander_alone_us"]
    stuck = asked(capsys, "simulate", "--circle", "4", "--size", "8MiB")
    assert sorted(stuck["deadlock"]) == [0, 1, 2, 3]
    fates = asked(capsys, "simulate", "--jobs", "example")
    assert sum(fate["missed"] for fate in fates["deadline"]) == 0
    mine = tmp_path / "jobs.toml"
    mine.write_text(
        'links = [50.0]\n[[job]]\nname = "a"\nlinks = [0]\nbytes = 1e6\ncompute_us = 100\n'
    )
    assert asked(capsys, "simulate", "--jobs", str(mine))["fair"][0]["name"] == "a"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "0 GPU"),
        (["--gpus", "100"], "do not fill"),
        (["--size", "1Gib"], "unit"),
        (["--size", "1B"], "nothing to send"),
        (["--op", "all_red"], "unknown collective"),
        (["--topology", "rail-4tier"], "unknown topology"),
        (["--oversubscription", "0"], "0.0:1"),
        (["--late", "5"], "duration"),
        (["--incast", "2", "--validate"], "different questions"),
        (["--jobs", "/nowhere.toml"], "cannot read"),
        (["--html", "/nowhere/page.html"], "cannot write"),
        (["--chunks", "0"], "0 chunks"),
        (["--circle", "2"], "ring of 2 switches"),
        (["--circle", "3"], "ring of 3 switches"),
        (["--rails", "0"], "0 rails"),
        (["--seed", "-1", "--slow-nics", "1"], "seed -1"),
        (["--paths", "1000"], "1000 paths"),
        (["--nic", "inf"], "network of inf"),
        (["--gpus", "98304", "--topology", "nvlink"], "NVLink domain of 98,304"),
        (["--incast", "-1"], "-1 senders"),
    ],
)
def test_impossible_questions_are_refused(words, message):
    with pytest.raises(CairnError, match=message):
        run([*SMALL, *words])


def test_a_file_of_jobs_that_says_something_else_is_refused(tmp_path):
    bad = tmp_path / "jobs.toml"
    for text in ("links = [", "links = [1.0]\n[[job]]\nname = 3\n", "\x00"):
        bad.write_text(text)
        with pytest.raises(CairnError, match=r"jobs\.toml"):
            run(["simulate", "--jobs", str(bad)])


def test_published_figures_are_met():
    """Three constants for each fabric; GB200 is one, from 72 to 1,440 GPUs."""
    found = report()
    assert found.ok
    assert all(len(row.constants) == 3 for row in found.compared)
    assert all(row.median_error <= GOAL for row in found.compared)
    simulated = [row for row in found.compared if row.model == "simulator"]
    assert sum(len(row.figures) for row in simulated) >= 100
    assert max(found.median_error.values()) <= GOAL
    gb200 = next(row for row in simulated if row.fabric.startswith("GB200"))
    assert gb200.worst_error <= GOAL
    assert max(point.factor for point in found.switches if point.model == "cost") <= 2
    named = [point for point in found.switches if point.how == NAMED]
    assert len(named) == 2
    assert all(point.factor <= 2 for point in named)
    assert "| GB200 NVL72 | simulator |" in markdown(found)
