"""A run that changes its layout at every restart, dies in between, and still is one run."""

import os
import signal

import msgspec
import pytest
from tiny_runs import TINY, loop, recipe

from cairn.train.config import Checkpoint, Data, Schedule
from cairn.train.launch import RankFailed, run_local
from cairn.train.loop import Loop
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Layout, Strategy
from cairn.train.prepare import prepare

DATA = Data(sources=["random"], sequence=32, sequences=4, microbatch=2)


def config(folder, steps, layout=Layout(), zero=0):  # noqa: B008
    model = msgspec.structs.replace(TINY, kv_heads=2)
    return recipe(
        folder,
        steps=steps,
        parallel=layout,
        data=DATA,
        schedule=Schedule(kind="constant"),
        model=model,
        checkpoint=Checkpoint(every=2, export=False),
        strategy=Strategy(zero=zero),
    )


def run_on(layout, folder, steps, kill=None, zero=0):
    """All ranks of a layout; `kill`: rank and step at which it dies."""

    def one_rank(rank, world):
        wanted = config(folder, steps, layout, zero)
        prepared = prepare(wanted)
        wanted.folder.mkdir(parents=True, exist_ok=True)
        one = Loop(prepared.state, prepared.corpus.source, world, rank, log_line=lambda text: None)
        if kill is not None and kill[0] == rank:

            def on_record(record):
                if record.step == kill[1]:
                    one.saver.wait()
                    os.kill(os.getpid(), signal.SIGKILL)

            one.log.on_record = on_record
        return one.run().step

    return run_local(layout.world(), one_rank)


def losses(folder):
    return [record.loss for record in read_log(folder)]


def test_one_run_over_five_layouts(tmp_path):
    loop(config(tmp_path / "a", 10)).run()
    folder = tmp_path / "b"
    layouts = (Layout(tp=2), Layout(pp=2), Layout(fsdp=2), Layout(dp=2))
    for number, layout in enumerate(layouts):  # dp with ZeRO: a rank reads only its own rows
        done = run_on(layout, folder, 2 * number + 2, zero=layout.dp - 1)
        assert done == 2 * number + 2
    loop(config(folder, 10)).run()
    assert losses(folder) == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


def test_a_killed_rank_is_named_and_another_layout_goes_on(tmp_path):
    loop(config(tmp_path / "a", 6)).run()
    folder = tmp_path / "b"
    with pytest.raises(RankFailed, match="rank 1 on"):
        run_on(Layout(dp=2), folder, 6, kill=(1, 3))
    run_on(Layout(tp=2), folder, 6)
    assert losses(folder) == pytest.approx(losses(tmp_path / "a"), rel=1e-5)
