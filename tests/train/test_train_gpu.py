"""Training on a GPU: our kernels beside plain torch, fp8 beside bf16, a step that never waits, a run that resumes."""

import pytest
import torch
from tiny_runs import losses, recipe, steps

from cairn.train.config import Checkpoint, Data, Model, Optim, Precision, Schedule
from cairn.train.loop import Loop
from cairn.train.metrics_log import read_log
from cairn.train.prepare import prepare
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
    results = steps_on_gpu(prepared, count)
    return losses(results)


def steps_on_gpu(prepared, count):
    source = prepared.corpus.source

    class Moved:
        def batch(self, number):
            return source.batch(number).to("cuda")

    return steps(prepared, count, Moved())


BF16 = Precision(kind="bfloat16", recompute="selective")


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
    ours = curve(tmp_path, BF16, 300)
    theirs = curve(tmp_path, other, 300)
    smooth = torch.tensor([ours, theirs]).unfold(1, 10, 1).mean(-1)
    difference = (smooth[0] - smooth[1]).abs()
    print(f"largest difference {difference.max():.4f} at step {difference.argmax().item()}")
    assert ours[-1] < 0.3 * ours[0]
    assert difference.max() < 0.02


@pytest.mark.parametrize("states", ["bfloat16", "int8"])
def test_narrow_states_learn(tmp_path, states):
    narrow = Precision(kind="bfloat16", masters=False, recompute="selective")
    found = curve(tmp_path, narrow, 100, optim=Optim(lr=1e-3, states=states))
    wide = curve(tmp_path, BF16, 100)
    assert found[-1] == pytest.approx(wide[-1], rel=0.1)


def test_muon_learns(tmp_path):
    found = curve(tmp_path, BF16, 60, optim=Optim(kind="muon", lr=1e-3))
    assert found[-1] < 0.6 * found[0]


def test_a_step_never_waits_for_the_device(tmp_path):
    prepared = prepare(ready(tmp_path, precision=BF16))
    batch = [prepared.corpus.source.batch(0).to("cuda")]
    for _ in range(3):
        train_step(prepared.state, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            result = train_step(prepared.state, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
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
