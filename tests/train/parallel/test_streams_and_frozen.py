"""Streams beside the tokens, and weights that are frozen, in every layout: equal to the plain Transformer."""

import functools

import pytest
import torch
from forked import run_ranks
from plain_model import PlainModel
from spread_training import RATE, SEED, assert_same, batches, spec_of

from cairn.core.errors import ConfigError
from cairn.train.config import Optim
from cairn.train.data.batch import IGNORED, Document, join, pack
from cairn.train.objective import Objective
from cairn.train.optim.optimizer import make_optimizer
from cairn.train.parallel.layout import Layout, Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize
from cairn.train.trainable import EVERYTHING, Trainable, frozen_parameters

TIED = spec_of("tiny-qwen3", layers=4)
UNTIED = spec_of("tiny-llama", layers=4, vocab=161)
EXPERTS = spec_of("tiny-moe", layers=2)
COUNT, TOKENS, STEPS = 4, 16, 2


class Weighed:
    """A test's own rule: the square root of the surprise, times a weight that the batch carries."""

    z_loss, is_cross_entropy = 0.0, False

    def __call__(self, logp_T, streams):
        weight_T = streams["weight"].sum(-1)
        root_T = (1.0 - logp_T).sqrt()
        return root_T * weight_T, -0.5 * weight_T / root_T


def weighed(logits_TV, batch):
    logp_T = -torch.nn.functional.cross_entropy(
        logits_TV, batch.targets_T.clamp(min=0), reduction="none"
    )
    loss_T = (1.0 - logp_T).sqrt() * batch.extra["weight"].sum(-1)
    return loss_T.where(batch.targets_T != IGNORED, 0.0)


def streamed(spec, step):
    """Each token has a row of two numbers."""
    make = torch.Generator().manual_seed(step)
    made = batches(spec, step, COUNT, TOKENS)
    return [b._replace(extra={"weight": torch.rand(TOKENS, 2, generator=make)}) for b in made]


def train(parallel, spec, rule, fused=False):
    loss, trace = Objective(spec, rule, fused, chunk=6), {"losses": [], "norms": []}
    for step in range(STEPS):
        each = COUNT // parallel.data_ranks
        mine = streamed(spec, step)[parallel.data_rank * each :][:each]
        valid = parallel.sum_over_data(torch.tensor(float(sum(b.valid() for b in mine))))
        share = parallel.forward_backward(mine, loss, valid)
        trace["losses"].append(float(parallel.sum_over_data(share)))
        trace["norms"].append(float(parallel.grad_norm()))
        gradients = {name: g.clone() for name, g in parallel.gradients().items()}
        trace["gradients"] = pieces(parallel.named_state(gradients))
        with torch.no_grad():
            for name, parameter in parallel.parameters().items():
                parameter.sub_(RATE * gradients[name])
        parallel.zero_grad()
    trace["weights"] = pieces(parallel.named_state())
    return trace


def pieces(state):
    return {name: (p.tensor.clone(), p.shape, p.offsets) for name, p in state.items()}


def one_rank(rank, world, spec, layout, options, fused, trainable, recompute="none"):
    parallel = parallelize(
        spec,
        Mesh.join(layout),
        options,
        seed=SEED,
        fused_context=TOKENS if fused else None,
        trainable=trainable,
        recompute=recompute,
    )
    before = {name: p.detach().clone() for name, p in all_parameters(parallel)}
    trace = train(parallel, spec, Weighed(), fused)
    trace["first_trained"] = parallel.first_trained
    for name, parameter in all_parameters(parallel):
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            assert name not in parallel.parameters(), name
            assert torch.equal(local(parameter), local(before[name])), name
    return trace


def all_parameters(parallel):
    return [entry for stage in parallel.stages for entry in stage.named_parameters()]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


@functools.cache
def expected(spec, trainable):
    names = [slot.name for slot in PlainModel(spec).slots]
    frozen = [name for name in names if not trainable(name)]
    return train(PlainModel(spec, SEED, loss_of=weighed, frozen=frozen), spec, None)


LAYOUTS = [
    pytest.param(Layout(), Strategy(), True, id="one-fused"),
    pytest.param(Layout(tp=2), Strategy(sequence_parallel=True), True, id="sp-fused"),
    pytest.param(Layout(dp=2), Strategy(zero=1), False, id="zero1"),
    pytest.param(Layout(fsdp=2), Strategy(), False, id="fsdp"),
    pytest.param(Layout(cp=2), Strategy(), False, id="ring"),
    pytest.param(Layout(cp=2), Strategy(attention="ulysses"), True, id="ulysses-fused"),
    pytest.param(Layout(pp=2), Strategy(order="zbv"), True, id="zbv-fused"),
    pytest.param(Layout(pp=2), Strategy(order="interleaved"), False, id="interleaved"),
]


@pytest.mark.parametrize(("layout", "options", "fused"), LAYOUTS)
def test_a_rule_reads_its_streams_in_every_layout(layout, options, fused):
    results = run_ranks(layout.world(), one_rank, UNTIED, layout, options, fused, EVERYTHING)
    assert_same(results, expected(UNTIED, EVERYTHING))


FROZEN = {
    # The whole first stage of a pipeline, and some of the second.
    UNTIED: Trainable(("embedding.*", "layers.0.*", "layers.1.*", "layers.3.attention.*")),
    TIED: Trainable(("embedding.weight", "layers.2.feed_forward.*", "layers.[01].*norm*")),
    EXPERTS: Trainable(("layers.0.feed_forward.*", "norm.weight")),
}


@pytest.mark.parametrize(
    ("spec", "layout", "options", "fused"),
    [
        pytest.param(TIED, Layout(), Strategy(), True, id="one-fused"),
        pytest.param(UNTIED, Layout(tp=2), Strategy(sequence_parallel=True), True, id="sp-fused"),
        pytest.param(TIED, Layout(dp=2), Strategy(zero=2), False, id="zero2"),
        pytest.param(TIED, Layout(fsdp=2), Strategy(), False, id="fsdp"),
        pytest.param(UNTIED, Layout(fsdp=2), Strategy(reshard=False), True, id="fsdp-fused"),
        pytest.param(TIED, Layout(cp=2), Strategy(), False, id="ring"),
        pytest.param(UNTIED, Layout(pp=2), Strategy(), False, id="pp-frozen-stage"),
        pytest.param(TIED, Layout(pp=2), Strategy(order="zb-h1"), True, id="zb-h1-fused"),
        pytest.param(EXPERTS, Layout(dp=2, ep=2), Strategy(), False, id="ep"),
    ],
)
def test_frozen_weights_have_no_gradient_and_the_others_what_one_process_has(
    spec, layout, options, fused
):
    trainable = FROZEN[spec]
    results = run_ranks(layout.world(), one_rank, spec, layout, options, fused, trainable)
    assert_same(results, expected(spec, trainable))
    frozen_stage = spec is UNTIED and layout.pp > 1
    assert all(trace["first_trained"] == int(frozen_stage) for trace in results)


def test_what_cannot_be_frozen_is_refused():
    assert frozen_parameters(TIED, Trainable(("norm.weight",))) == TIED.hidden
    with pytest.raises(ConfigError, match=r"'layer\.0' fits no weight"):
        frozen_parameters(TIED, Trainable(("layer.0",)))
    with pytest.raises(ConfigError, match="nothing to train"):
        frozen_parameters(TIED, Trainable(("*",)))
    with pytest.raises(ConfigError, match="stored in one matrix with"):
        parallelize(TIED, Mesh.alone(), fused_context=8, trainable=Trainable(("*.qkv.q.weight",)))


def test_muon_updates_what_is_left():
    trainable = FROZEN[TIED]
    parallel = parallelize(TIED, Mesh.alone(), seed=SEED, trainable=trainable)
    matrices = parallel.matrices()
    assert matrices
    assert all(trainable(name) for name in matrices)
    optimizer = make_optimizer(
        parallel.parameters(), Optim(kind="muon"), False, 0, parallel.named_state, matrices
    )
    held = {name for tensors in optimizer.tensors().values() for name in tensors}
    assert held == parallel.parameters().keys()


def test_streams_are_packed_padded_and_joined():
    document = Document(torch.tensor([5, 6]), torch.tensor([6, IGNORED]), {"w": torch.ones(2, 3)})
    packed = pack([document, document], 6, pad_id=9, ids=[0])
    assert packed.tokens_T.tolist() == [5, 6, 5, 6, 9, 9]
    assert packed.extra["w"].sum(-1).tolist() == [3, 3, 3, 3, 0, 0]
    both = join([packed, packed])
    assert both.extra["w"].shape == (12, 3)
    assert both.at(torch.tensor([0, 5])).extra["w"].sum(-1).tolist() == [3, 0]
    with pytest.raises(ValueError, match="different streams"):
        join([packed, packed._replace(extra={})])
    with pytest.raises(ValueError, match="stream w has 1 rows for 2 tokens"):
        pack([document._replace(extra={"w": torch.ones(1)})], 2, 0, [0])
