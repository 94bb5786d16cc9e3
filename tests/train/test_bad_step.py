"""What happens when a loss goes wrong: the policy by itself, and in a run with spoilt samples."""

import math

import msgspec
import pytest
import torch
from forked import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import TINY, Spoilt, loop, recipe

from cairn.train.bad_step import Watch, veto
from cairn.train.config import BadStep, Checkpoint, Precision
from cairn.train.data.batch import IGNORED
from cairn.train.loop import BadRun
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Layout
from cairn.train.random_tokens import RandomTokens

VOCAB = 64


@given(st.lists(st.one_of(st.floats(0, 5), st.just(math.nan), st.just(math.inf)), max_size=80))
def test_only_bad_losses_are_bad(losses):
    watch = Watch(BadStep(most=1000))
    for loss in losses:
        verdict = watch.judge(loss, 1.0, watch.limit())
        assert (verdict.action == "go on") == math.isfinite(loss)
    assert watch.in_a_row == next(
        (i for i, loss in enumerate(reversed(losses)) if math.isfinite(loss)), len(losses)
    )


@given(st.lists(st.sampled_from([1.9, 1.95, 2.0, 2.05, 2.1]), min_size=10, max_size=60))
def test_a_spike_is_far_above_the_recent_losses(losses):
    watch = Watch(BadStep(spike=6.0))
    for loss in losses:
        watch.judge(loss, 1.0, math.inf)
    assert sum(losses[-50:]) / len(losses[-50:]) < watch.limit() < 4
    assert watch.judge(4.0, 1.0, watch.limit()).action == "skip"
    assert 4.0 not in watch.recent
    assert watch.judge(2.0, 1.0, watch.limit()).action == "go on"


def test_too_many_in_a_row_stop_the_run():
    watch = Watch(BadStep(most=3))
    actions = [watch.judge(math.nan, 1.0, math.inf).action for _ in range(3)]
    assert actions == ["skip", "skip", "stop"]


def test_the_state_of_a_watch_comes_back():
    watch, other = Watch(BadStep(spike=4.0)), Watch(BadStep(spike=4.0))
    for loss in [2.0, 2.1, 1.9] * 6 + [math.nan]:
        watch.judge(loss, 1.0, math.inf)
    other.restore(watch.state())
    assert (other.limit(), other.in_a_row) == (watch.limit(), 1)


def test_a_veto_is_a_nan():
    one = torch.tensor(0.5)
    assert veto(one, torch.tensor(2.0), 3.0).item() == 0.5
    for loss in (math.nan, math.inf, 3.5):
        assert veto(one, torch.tensor(loss), 3.0).isnan()


def run(tmp_path, policy, bad, steps=12, said=None):
    config = recipe(
        tmp_path, bad_step=policy, steps=steps, checkpoint=Checkpoint(every=3, export=False)
    )
    one = loop(
        config, Spoilt(VOCAB, 32, bad=bad), log_line=(said if said is not None else []).append
    )
    with torch.no_grad():
        one.state.parallel.parameters()["embedding.weight"][VOCAB - 1] = math.nan
        # The head is tied to the embedding: the poisoned row must not reach the logits.
        one.state.loss = _without_last_row(one.state.loss)
    return one, one.run


def _without_last_row(loss):
    def shortened(hidden, vocabulary, batch, valid):
        logits = hidden @ vocabulary.weight[: VOCAB - 1].t()
        picked = torch.nn.functional.cross_entropy(logits, batch.targets_T, reduction="sum")
        return picked / valid

    return shortened


def bad_lines(tmp_path):
    return [
        msgspec.json.decode(line)
        for line in (tmp_path / "bad_steps.jsonl").read_bytes().splitlines()
    ]


def test_a_bad_step_is_skipped_and_its_samples_written_down(tmp_path):
    _, go = run(tmp_path, BadStep(action="skip"), bad=[17])
    outcome = go()
    assert (outcome.step, outcome.bad_steps) == (12, 1)
    [line] = bad_lines(tmp_path)
    assert (line["step"], line["samples"]) == (5, [16, 17, 18, 19])
    records = read_log(tmp_path)
    assert [r.step for r in records if r.bad] == [5]
    assert all(r.loss is not None for r in records if not r.bad)


def test_a_full_disk_costs_the_list_of_bad_samples_and_not_the_run(tmp_path):
    said: list[str] = []
    _, go = run(tmp_path, BadStep(action="skip"), bad=[17], said=said)
    (tmp_path / "bad_steps.jsonl").symlink_to("/dev/full")
    outcome = go()
    assert (outcome.step, outcome.bad_steps) == (12, 1)
    (told,) = [text for text in said if "step 5" in text]
    assert "samples [16, 17, 18, 19], not in" in told
    assert "No space left on device" in told


def test_a_run_rewinds_and_goes_on_behind_the_bad_samples(tmp_path):
    said: list[str] = []
    one, go = run(tmp_path, BadStep(action="rewind"), bad=[17], said=said)
    outcome = go()
    assert outcome.bad_steps == 1
    assert outcome.step == 12
    # Steps 0..3 and the bad one took 20 samples; 9 more steps after the rewind to step 3 took 36.
    assert one.state.samples == 20 + 36
    assert any("back at step 3" in text for text in said)
    # One history: the lines of steps that were done again are gone, and the bad one has a file of its own.
    assert [record.step for record in read_log(tmp_path)] == list(range(1, 13))
    assert [line["step"] for line in bad_lines(tmp_path)] == [5]


def test_a_rewind_leaves_the_checkpoint_that_it_went_back_to_alone(tmp_path, monkeypatch):
    """Written again in its place, it would be gone if the run was killed meanwhile."""
    one, go = run(tmp_path, BadStep(action="rewind"), bad=[17])
    written, save = [], one.saver.save
    monkeypatch.setattr(
        one.saver, "save", lambda step, *rest: (written.append(step), save(step, *rest))
    )
    go()
    assert written == [0, 3, 6, 9, 12]


def test_a_last_step_that_is_bad_is_done_again_after_a_rewind(tmp_path):
    """Where numbers are read a step late, as on a GPU, that of the last one comes when no step follows."""
    one, go = run(tmp_path, BadStep(action="rewind"), bad=[4 * 11])
    one.lag = 1
    outcome = go()
    assert (outcome.step, outcome.bad_steps, outcome.stopped_early) == (12, 1, False)


def test_a_run_that_only_goes_back_stops(tmp_path):
    """Every second step is bad: each streak is short, and no checkpoint is ever reached."""
    bad = [number for number in range(4000) if number // 4 % 2]
    _, go = run(tmp_path, BadStep(action="rewind", most=3), bad=bad)
    with pytest.raises(BadRun, match="3 times back to step-00000000"):
        go()


class Silent(RandomTokens):
    """The samples of the third step have nothing to learn."""

    def batch(self, number):
        batch = super().batch(number)
        if number // 4 != 2:
            return batch
        return batch._replace(targets_T=torch.full_like(batch.targets_T, IGNORED))


def test_a_step_with_nothing_to_learn_says_so(tmp_path):
    said: list[str] = []
    outcome = loop(recipe(tmp_path, steps=4), Silent(64, 32), log_line=said.append).run()
    assert outcome.bad_steps == 1
    assert "no token of the step is to be learnt" in bad_lines(tmp_path)[0]["why"]
    assert any("step 3: no token" in text for text in said)


def test_the_way_out_fits_what_was_asked(tmp_path):
    _, go = run(tmp_path, BadStep(action="skip", most=2), bad=range(1000))
    with pytest.raises(BadRun) as stopped:
        go()
    assert "action" not in (stopped.value.hint or "")  # it was skip already


def test_a_run_stops_where_it_is_told_to(tmp_path):
    _, go = run(tmp_path, BadStep(action="stop"), bad=[9])
    with pytest.raises(BadRun, match="step 3: the loss is nan"):
        go()
    assert bad_lines(tmp_path)[0]["action"] == "stop"


class Overflow(torch.autograd.Function):
    """The loss as it is, with gradients that are not finite."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def test_float16_whose_factor_cannot_get_smaller_says_so(tmp_path):
    config = recipe(
        tmp_path, bad_step=BadStep(most=4), steps=40, precision=Precision(kind="float16")
    )
    one = loop(config, RandomTokens(VOCAB, 32))
    right = one.state.loss
    one.state.loss = lambda *args: Overflow.apply(right(*args))
    with pytest.raises(BadRun, match=r"step 28: .*norm of the gradients is .*4 steps in a row"):
        one.run()


def test_a_run_that_only_fails_stops(tmp_path):
    _, go = run(tmp_path, BadStep(action="rewind", most=4), bad=range(1000))
    with pytest.raises(BadRun, match="4 steps in a row"):
        go()


def trained_together(rank, world, folder, layout, action, limits=(), spoil=None, whose=-1):
    """What each rank found in each step; of rank `whose` the fourth loss is another number, by itself."""
    saving = Checkpoint(every=2, export=False, in_background=False)
    model = msgspec.structs.replace(TINY, kv_heads=2)
    fields = dict(parallel=layout, model=model, steps=6, checkpoint=saving)
    one = loop(recipe(folder, bad_step=BadStep(action=action), **fields), world=world, rank=rank)
    state, found, sums = one.state, [], []
    parallel, judge = state.parallel, state.watch.judge
    sum_over_data = parallel.sum_over_data

    def summed(value):
        sums.append(sum_over_data(value))  # first the tokens of a step, then its loss
        return spoil(sums[-1]) if rank == whose and len(sums) == 8 else sums[-1]

    def judged(loss, norm, limit, valid):
        verdict = judge(loss, norm, limit, valid)
        found.append((str(loss), norm, limit, verdict.action))
        return verdict

    parallel.sum_over_data, state.watch.judge = summed, judged
    state.watch.limit = lambda: dict(enumerate(limits)).get(len(found), math.inf)
    one.run()
    return found, state.samples


def an_ulp_more(loss):
    return loss.nextafter(torch.tensor(math.inf))


@pytest.mark.parametrize(
    ("layout", "action"), [(Layout(tp=2), "rewind"), (Layout(pp=2), "skip")], ids=["tp", "pp"]
)
def test_ranks_whose_losses_differ_by_an_ulp_decide_alike(tmp_path, layout, action):
    """The limit is the very loss of step 4. All go the way of the first rank, or wait for each other for ever."""
    (right, _), _ = run_ranks(2, trained_together, tmp_path / "right", layout, action)
    limits = [math.inf] * 3 + [float(right[3][0])]
    for whose, spoil, expected in (
        (0, an_ulp_more, action),
        (1, an_ulp_more, "go on"),
        (1, lambda loss: loss * math.nan, action),
    ):
        folder = tmp_path / f"{whose}-{expected}"
        args = (folder, layout, action, limits, spoil, whose)
        (first, samples), (second, others) = run_ranks(2, trained_together, *args, timeout_s=30)
        assert first == second  # to the bit: later limits come from these numbers
        assert [action for *_, action in first[:4]] == ["go on"] * 3 + [expected]
        assert samples == others
