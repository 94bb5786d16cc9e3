"""A pass without gradients gives every rank what the plain Transformer gives, in every layout."""

import functools

import pytest
import torch
from forked import run_ranks
from spread_training import SEED, batches, spec_of

from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.weights import random_model
from cairn.train.data.batch import IGNORED
from cairn.train.heads import HiddenStates, TargetLogProbs, loss_by_stream
from cairn.train.objective import Objective
from cairn.train.parallel.layout import Layout, Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize

TIED = spec_of("tiny-qwen3", layers=4)
UNTIED = spec_of("tiny-llama", layers=4, vocab=161)  # a vocabulary that no number of ranks divides
EXPERTS = spec_of("tiny-moe", layers=2)
CAPPED = spec_of("tiny-gemma3", logit_softcap=3.0)
COUNT, TOKENS = 4, 16


def streamed(spec):
    """Batches whose tokens belong to three streams."""
    made = batches(spec, 5, COUNT, TOKENS)
    return [b._replace(extra={"source": torch.arange(TOKENS) % 3}) for b in made]


@functools.cache
def expected(spec):
    """By the plain model, one batch after another, all logits at once."""
    model = random_model(spec, ModelBuild("cpu"), SEED)
    found, sums = [], torch.zeros(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for batch in streamed(spec):
            hidden_TD = model(batch.tokens_T, batch.positions_T, PackedDocuments(batch.lengths))
            logp_TV = model.logits(hidden_TD).float().log_softmax(-1)
            counts_T = batch.targets_T != IGNORED
            logp_T = logp_TV.gather(1, batch.targets_T.clamp(min=0)[:, None])[:, 0]
            logp_T = logp_T.where(counts_T, 0.0)
            entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
            found.append({"hidden": hidden_TD, "logp": logp_T, "entropy": entropy_T})
            for stream in range(3):
                here_T = counts_T & (batch.extra["source"] == stream)
                sums[stream] += torch.tensor([-logp_T[here_T].sum(), here_T.sum()])
    return found, sums


def values(rank, world, spec, layout, options, fused):
    parallel = parallelize(
        spec, Mesh.join(layout), options, seed=SEED, fused_context=TOKENS if fused else None
    )
    each = COUNT // parallel.data_ranks
    mine = slice(parallel.data_rank * each, (parallel.data_rank + 1) * each)
    every = streamed(spec)[mine]
    scored = parallel.forward(every, TargetLogProbs(spec, entropy=True, chunk=5))
    hidden = parallel.forward(every, HiddenStates())
    sums = parallel.sum_over_data(loss_by_stream(scored, every, "source", 3))
    # What a step does afterwards must not see that there was a pass without gradients.
    valid = torch.tensor(10.0)
    parallel.forward_backward(every, Objective(spec), valid)
    return mine, [a | b for a, b in zip(scored, hidden, strict=True)], sums, parallel.grad_norm()


def without_forward(rank, world, spec, layout, options):
    parallel = parallelize(spec, Mesh.join(layout), options, seed=SEED)
    each = COUNT // parallel.data_ranks
    every = streamed(spec)[parallel.data_rank * each :][:each]
    parallel.forward_backward(every, Objective(spec), torch.tensor(10.0))
    return parallel.grad_norm()


@pytest.mark.parametrize(
    ("spec", "layout", "options", "fused"),
    [
        pytest.param(TIED, Layout(), Strategy(), True, id="one-fused"),
        pytest.param(CAPPED, Layout(tp=2), Strategy(), False, id="tp-softcap"),
        pytest.param(UNTIED, Layout(tp=2), Strategy(sequence_parallel=True), True, id="sp-fused"),
        pytest.param(TIED, Layout(dp=2), Strategy(zero=2), False, id="zero2"),
        pytest.param(UNTIED, Layout(fsdp=2), Strategy(reshard=False), False, id="fsdp"),
        pytest.param(TIED, Layout(cp=2), Strategy(), False, id="ring"),
        pytest.param(UNTIED, Layout(cp=2), Strategy(attention="ulysses"), True, id="ulysses-fused"),
        pytest.param(TIED, Layout(pp=2), Strategy(order="interleaved"), False, id="interleaved"),
        pytest.param(UNTIED, Layout(pp=2), Strategy(order="zbv"), True, id="zbv-fused"),
        pytest.param(EXPERTS, Layout(dp=2, ep=2), Strategy(), False, id="ep"),
        pytest.param(
            TIED, Layout(pp=2, tp=2), Strategy(sequence_parallel=True), False, id="pp-tp-sp"
        ),
        pytest.param(UNTIED, Layout(fsdp=2, cp=2), Strategy(), False, id="fsdp-ring"),
    ],
)
def test_every_layout_gives_what_the_plain_model_gives(spec, layout, options, fused):
    plain, sums = expected(spec)
    results = run_ranks(layout.world(), values, spec, layout, options, fused)
    for rank, (mine, found, by_stream, _) in enumerate(results):
        for batch, wanted in zip(found, plain[mine], strict=True):
            assert batch.keys() == wanted.keys()
            for name, value in wanted.items():
                difference = (batch[name] - value).abs().max().item()
                assert difference < 2e-5, f"rank {rank}: {name} is off by {difference:.1e}"
        torch.testing.assert_close(by_stream, sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "options"),
    [(Layout(fsdp=2), Strategy(reshard=False)), (Layout(dp=2), Strategy(zero=1))],
    ids=["fsdp", "zero1"],
)
def test_a_step_after_it_computes_what_it_would_have(layout, options):
    before = run_ranks(2, without_forward, TIED, layout, options)
    after = [norm for *_, norm in run_ranks(2, values, TIED, layout, options, False)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def after_an_update(rank, world, layout, options, looks_before):
    parallel = parallelize(TIED, Mesh.join(layout), options, seed=SEED)
    if looks_before:
        parallel.forward(streamed(TIED)[:1], HiddenStates())
    with torch.no_grad():
        for parameter in parallel.parameters().values():
            parameter.mul_(0.9)
    for sync in parallel.syncs:
        sync.finish()  # as a step does before the optimizer: other ranks' rows are old now
    return parallel.forward(streamed(TIED)[:1], HiddenStates())[0]["hidden"]


@pytest.mark.parametrize("options", [Strategy(reshard=False), Strategy()], ids=["kept", "freed"])
def test_it_leaves_no_gathered_weights_that_an_update_does_not_reach(options):
    fresh = run_ranks(2, after_an_update, Layout(fsdp=2), options, False)
    again = run_ranks(2, after_an_update, Layout(fsdp=2), options, True)
    torch.testing.assert_close(again, fresh, rtol=0, atol=0)
