"""Training on a GPU: our kernels beside plain torch, fp8 beside bf16, a step that never waits, a run that resumes."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
from tiny_runs import losses, recipe, steps

from cairn.train.config import Checkpoint, Data, Model, Optim, Precision, Schedule
from cairn.train.data.batch import Batch, join
from cairn.train.data.source import microbatch
from cairn.train.loop import Loop
from cairn.train.metrics_log import read_log
from cairn.train.prepare import describe, prepare
from cairn.train.step import train_step

pytestmark = pytest.mark.gpu
SHAPE = Model(preset="tiny-qwen3", layers=4, hidden=512, heads=4, kv_heads=2, head_dim=128,
              intermediate=1536, context=1024)  # fmt: skip
STORIES = Data(sources=["stories"], vocab=768, sequence=512, sequences=8, microbatch=8)


def ready(folder, **changes):
    fields = dict(
        model=SHAPE, data=STORIES, device="cuda", steps=300, optim=Optim(lr=1e-3),
        schedule=Schedule(kind="cosine", warmup=20),
        checkpoint=Checkpoint(every=0, export=False),
    )  # fmt: skip
    return recipe(folder, **(fields | changes))


def curve(folder, precision, count, **changes):
    prepared = prepare(ready(folder, precision=precision, **changes))
    return losses(steps(prepared, count))


BF16 = Precision(kind="bfloat16", recompute="selective")


# Many tokens a step, a low rate and a long warm-up: where a model falls quickly, a step too few in 300 is a large
# difference of losses, and says nothing about arithmetic.
CURVES = Data(
    sources=["stories"], vocab=768, sequence=512, sequences=16, microbatch=16, document_mask=False
)
STEPS = 300


@functools.cache
def curves_halves() -> list:
    """The batches of all steps, each in two."""
    source = describe(calm(None, BF16))[0].source
    size = CURVES.sequences // 2
    starts = range(0, STEPS * CURVES.sequences, size)
    return [microbatch(source, range(start, start + size)) for start in starts]


def curves_batches(parts: int) -> Iterator[list[Batch]]:
    halves = curves_halves()
    for pair in zip(halves[::2], halves[1::2], strict=True):
        yield [half.to("cuda") for half in (pair if parts == 2 else [join(pair)])]


def calm(folder, precision, parts=1):
    data = msgspec.structs.replace(CURVES, microbatch=CURVES.sequences // parts)
    return ready(folder, precision=precision, data=data, steps=STEPS, optim=Optim(lr=3e-4),
                 schedule=Schedule(kind="cosine", warmup=50))  # fmt: skip


def smooth_curve(folder, precision, parts=1):
    """Losses of all steps, as means of ten."""
    state = prepare(calm(folder, precision, parts)).state
    found = [train_step(state, batches).loss for batches in curves_batches(parts)]
    return torch.stack(found).cpu().unfold(0, 10, 1).mean(-1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "other",
    [
        Precision(kind="bfloat16", kernels="plain"),
        Precision(kind="bfloat16", recompute="full"),
        Precision(kind="bfloat16", recompute="selective", fp8="tensor"),
        Precision(kind="bfloat16", recompute="selective", fp8="row"),
    ],
    ids=["plain torch", "full recompute", "fp8 by tensor", "fp8 by row"],
)
def test_loss_curves_overlap_over_300_steps(tmp_path, other):
    """Within 0.02; beside it is printed what adding up the same numbers in another order does."""
    ours = smooth_curve(tmp_path, BF16)
    noise = (ours - smooth_curve(tmp_path, BF16, parts=2)).abs().max().item()
    difference = (ours - smooth_curve(tmp_path, other)).abs()
    most, step = difference.max().item(), difference.argmax().item()
    print(
        f"loss {ours[0]:.2f} -> {ours[-1]:.2f}, other order {noise:.4f}, largest difference {most:.4f} at {step}"
    )
    assert ours[-1] < 0.6 * ours[0]
    assert most < 0.02


@pytest.mark.parametrize("states", ["bfloat16", "int8"])
def test_narrow_states_learn(tmp_path, states):
    narrow = Precision(kind="bfloat16", masters=False, recompute="selective")
    found = curve(tmp_path, narrow, 100, optim=Optim(lr=1e-3, states=states))
    wide = curve(tmp_path, BF16, 100)
    assert found[-1] == pytest.approx(wide[-1], rel=0.1)


def test_muon_learns(tmp_path):
    found = curve(tmp_path, BF16, 60, optim=Optim(kind="muon", lr=1e-3))
    assert found[-1] < 0.6 * found[0]


@contextmanager
def refusing_to_wait():
    """Whatever makes the host wait for the device is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it exists
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_never_waits_for_the_device(tmp_path):
    prepared = prepare(ready(tmp_path, precision=BF16))
    batch = [prepared.corpus.source.batch(0).to("cuda")]
    for _ in range(3):
        train_step(prepared.state, batch)
    torch.cuda.synchronize()
    with refusing_to_wait():
        for _ in range(3):
            result = train_step(prepared.state, batch)
    assert result.loss.isfinite().item()


def test_a_run_on_the_gpu_resumes_where_it_was(tmp_path):
    def run(folder, count):
        config = ready(folder, precision=BF16, steps=count, schedule=Schedule(kind="constant"))
        folder.mkdir(exist_ok=True)
        prepared = prepare(config)
        Loop(prepared.state, prepared.corpus.source, say=lambda text: None).run()

    run(tmp_path / "a", 12)
    run(tmp_path / "b", 6)
    run(tmp_path / "b", 12)
    one, two = ([r.loss for r in read_log(tmp_path / name)] for name in "ab")
    assert two == pytest.approx(one, abs=1e-3)
