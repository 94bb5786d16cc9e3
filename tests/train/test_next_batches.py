"""The loop asks for batches: a source with a state of its own may have none, and ranks may have different numbers."""

import shutil
import threading
import time

import msgspec
import pytest
import torch
from forked import run_ranks
from plain_model import PlainModel, named_gradients
from tiny_runs import loop, recipe, weights

from cairn.core.errors import DataError
from cairn.models.presets import preset
from cairn.train.checkpoint.folder import folder_of
from cairn.train.config import Checkpoint, Data, Schedule
from cairn.train.metrics_log import read_log
from cairn.train.next_batches import SourceBatches, check_counts
from cairn.train.objective import Objective
from cairn.train.parallel.layout import Layout, Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize
from cairn.train.random_tokens import RandomTokens


class Exclusive(RandomTokens):
    """Remembers what it did last, as a stream of files does: not for two threads at once."""

    def __init__(self):
        super().__init__(64, 32)
        self.lock, self.clashes = threading.Lock(), 0

    def batch(self, number):
        if not self.lock.acquire(blocking=False):
            self.clashes += 1
            return super().batch(number)
        time.sleep(0.05)
        self.lock.release()
        return super().batch(number)


def test_a_source_is_asked_by_one_thread_at_a_time(tmp_path):
    source = Exclusive()
    batches = SourceBatches(source, recipe(tmp_path), 0, 1, torch.device("cpu"))
    numbers = [batch.ids for consumed in (0, 40, 0) for batch in batches.after(consumed)]
    batches.close()
    assert numbers == [[0, 1, 2, 3], [40, 41, 42, 43], [0, 1, 2, 3]]
    assert source.clashes == 0


class Rollouts:
    """Remembers how often it was asked; every second time it has nothing."""

    fingerprint, may_be_empty = "rollouts", True

    def __init__(self):
        self.asked, self.closed, self.seen = 0, False, []
        self.tokens = RandomTokens(64, 32)

    def next_batches(self, state):
        self.asked += 1
        self.seen.append(
            (state.step, next(iter(state.parallel.parameters().values())).sum().item())
        )
        return [] if self.asked % 2 == 0 else [self.tokens.batch(self.asked)]

    def close(self):
        self.closed = True


def test_a_step_without_batches_changes_nothing_and_is_no_bad_step(tmp_path):
    source = Rollouts()
    run = loop(recipe(tmp_path, steps=6, checkpoint=Checkpoint(every=2, export=False)), source)
    outcome = run.run()
    assert (outcome.step, outcome.bad_steps, source.asked, source.closed) == (6, 0, 6, True)
    assert [record.step for record in read_log(tmp_path)] == [1, 3, 5]
    steps, sums = zip(*source.seen, strict=True)
    assert steps == tuple(range(6))
    assert [sums[i] == sums[i + 1] for i in range(5)] == [False, True, False, True, False]
    assert weights(run).keys()
    kept = [folder_of(tmp_path / "checkpoints", step).is_dir() for step in (4, 6)]
    assert kept == [True, True]  # also behind a step without batches


class Counting(Rollouts):
    """What it gives depends on what it gave before, not on the training state."""

    may_be_empty = False

    def __init__(self, rank=0):
        super().__init__()
        self.rank, self.loaded = rank, []

    def next_batches(self, state):
        self.asked += 1
        return [self.tokens.batch(100 * self.rank + self.asked * self.asked)]

    def state_dict(self):
        return {"asked": self.asked, "rank": self.rank}

    def load_state_dict(self, states):
        self.loaded, self.asked = list(states), states[self.rank]["asked"]


def test_a_stateful_source_goes_on_where_its_checkpoint_was(tmp_path):
    def losses(folder):
        return [record.loss for record in read_log(folder)]

    settings = dict(
        checkpoint=Checkpoint(every=2, export=False), schedule=Schedule(kind="constant")
    )
    loop(recipe(tmp_path / "whole", steps=6, **settings), Counting()).run()
    loop(recipe(tmp_path / "parts", steps=4, **settings), Counting()).run()
    shutil.rmtree(folder_of(tmp_path / "parts" / "checkpoints", 4))  # steps 3 and 4 are lost
    again = Counting()
    loop(recipe(tmp_path / "parts", steps=6, **settings), again).run()
    assert again.loaded == [{"asked": 2, "rank": 0}]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def resumed(rank, world, folder):
    """Two data ranks, each with a state of its own; the second life begins from a checkpoint of both."""
    saving = Checkpoint(every=0, export=False)
    data = Data(sources=["random"], sequence=32, sequences=2, microbatch=1)
    for steps in (2, 3):
        config = recipe(
            folder, steps=steps, checkpoint=saving, data=data, parallel=Layout(dp=world)
        )
        source = Counting(rank)
        loop(config, source, world=world, rank=rank).run()
    return source.loaded, source.asked


def test_every_data_rank_has_its_own_state(tmp_path):
    states = [{"asked": 2, "rank": rank} for rank in range(2)]
    assert run_ranks(2, resumed, tmp_path) == [(states, 3), (states, 3)]


SPEC = preset("tiny-qwen3")


def uneven(rank, world, zero):
    """Rank 1 has nothing to compute, and still gets the sum."""
    parallel = parallelize(SPEC, Mesh.join(Layout(dp=2)), Strategy(zero=zero), seed=3)
    mine = [RandomTokens(SPEC.vocab, 16).batch(n) for n in range(2)] if rank == 0 else []
    share = parallel.forward_backward(mine, Objective(SPEC), torch.tensor(32.0))
    pieces = parallel.named_state(parallel.gradients())
    return parallel.sum_over_data(share), {n: (p.tensor, p.offsets) for n, p in pieces.items()}


@pytest.mark.parametrize("zero", [0, 1])
def test_a_data_rank_may_have_none_while_others_have_some(zero):
    batches = [RandomTokens(SPEC.vocab, 16).batch(n) for n in range(2)]
    loss, expected = named_gradients(PlainModel(SPEC, 3), batches, None, 32)
    for found, gradients in run_ranks(2, uneven, zero):
        torch.testing.assert_close(found, loss)
        for name, (part, offsets) in gradients.items():
            here = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            torch.testing.assert_close(part, expected[name][here], rtol=1e-4, atol=1e-6)


def test_ranks_that_compute_together_need_equally_many():
    data = Data(sources=["random"], sequence=32, sequences=4, microbatch=2)
    config = recipe(data=data, parallel=Layout(fsdp=2))
    check_counts(2, 2, config)
    with pytest.raises(DataError, match="0 to 2 batches in one step, but with fsdp"):
        check_counts(0, 2, config)
    check_counts(0, 2, msgspec.structs.replace(config, parallel=Layout(dp=2)))
