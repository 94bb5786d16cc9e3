"""A lab that the page has started ends, however it ends, so that the next one can begin."""

import asyncio

import pytest

from cairn.core.errors import RequestError
from cairn.labs import live_runs
from cairn.labs.live_runs import LiveRuns


def test_a_lab_without_a_process_has_failed_and_the_next_one_begins(monkeypatch):
    async def nowhere(*command, **options):
        raise OSError("no more processes")

    async def run():
        runs = LiveRuns()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", nowhere)
        runs.start("roofline")
        with pytest.raises(RequestError, match="lab roofline is running"):
            runs.start("gil")
        await runs.runs["roofline"].task
        assert runs.state("roofline")["status"] == "failed"
        assert "no more processes" in runs.state("roofline")["steps"][-1]
        runs.start("gil")
        await runs.runs["gil"].task

    asyncio.run(run())


def test_what_others_print_is_no_word_of_the_lab(monkeypatch):
    printed = '42\n["a"]\n{"a": 1}\nnothing\n{"step": "one"}\n{"status": "held", "verdict": null}\n'
    real = asyncio.create_subprocess_exec

    async def printing(*command, **options):
        return await real("printf", "%s", printed, **options)

    async def run():
        monkeypatch.setattr(live_runs.asyncio, "create_subprocess_exec", printing)
        runs = LiveRuns()
        runs.start("roofline")
        await runs.runs["roofline"].task
        assert runs.state("roofline") == {
            "running": False,
            "steps": ["one"],
            "status": "held",
            "verdict": None,
        }

    asyncio.run(run())
