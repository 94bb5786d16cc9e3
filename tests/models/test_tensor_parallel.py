"""Split over ranks, the model computes what it computes alone, forward and backward."""

import msgspec
import pytest
import torch
import torch.distributed as dist
from forked import RankFailed, run_ranks

from cairn.core.errors import ConfigError
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.presets import preset
from cairn.models.spec import ShortConvSizes
from cairn.models.weights import random_model

LENGTHS = [9, 4]
NAMES = ("tiny-llama", "tiny-qwen3", "tiny-moe", "tiny-gemma3", "tiny-gpt2", "tiny-qwen3-next")
SPECS = {name: preset(name) for name in NAMES}
SPECS["convolutions"] = msgspec.structs.replace(
    SPECS["tiny-llama"],
    mixers=("short_conv", "attention", "short_conv"),
    short_conv=ShortConvSizes(bias=True),
)


class GlooShards:
    """The verbs over gloo, with the backward of each as Megatron has it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def enter(self, x):
        return _Enter.apply(x)

    def reduce(self, x):
        return _Reduce.apply(x)

    def gather(self, x):
        return _Gather.apply(x, self.rank, self.size)

    def whole(self, weight):
        return _Enter.apply(weight)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rank, size):
        ctx.rank, ctx.width = rank, x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[..., ctx.rank * ctx.width : (ctx.rank + 1) * ctx.width], None, None


def loss_and_gradients(spec, build) -> tuple[float, dict[str, torch.Tensor]]:
    """A loss that touches every logit, and this rank's gradient of every slot."""
    model = random_model(spec, build, seed=7)
    tokens_T = torch.arange(sum(LENGTHS)) * 13 % spec.vocab
    attend = PackedDocuments(LENGTHS)
    logits_TV = model.logits(model(tokens_T, attend.positions_T(), attend))
    weights_V = torch.linspace(-1, 1, spec.vocab)
    loss = (logits_TV.float().log_softmax(-1) * weights_V).sum()
    loss.backward()
    gradients = {
        slot.name: model.get_parameter(slot.parameter).grad[slot.index].clone()
        for slot in model.slots()
    }
    return loss.item(), gradients


def one_rank(rank, world, spec, fused):
    build = ModelBuild("cpu", torch.float32, GlooShards(rank, world), fused)
    return loss_and_gradients(spec, build)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_two_ranks_equal_one(name, fused):
    spec = SPECS[name]
    expected_loss, expected = loss_and_gradients(spec, ModelBuild("cpu", torch.float32))
    results = run_ranks(2, one_rank, spec, fused)
    layouts = [{s.name: s for s in random_model_slots(spec, rank, fused)} for rank in range(2)]
    for rank, (loss, gradients) in enumerate(results):
        # Terms of a few thousand cancel to less than one: float32 leaves the fourth decimal open.
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-3)
        for slot_name, gradient in gradients.items():
            share = layouts[rank][slot_name].share(expected[slot_name])
            error = (gradient - share).norm() / share.norm().clamp(min=1e-3)
            assert error < 1e-4, slot_name


def random_model_slots(spec, rank, fused):
    from cairn.models.transformer import Transformer

    return Transformer(spec, ModelBuild("meta", torch.float32, GlooShards(rank, 2), fused)).slots()


def test_a_vocabulary_that_does_not_divide_is_padded():
    spec = preset("tiny-llama")
    odd = type(spec)(**{f: getattr(spec, f) for f in spec.__struct_fields__} | {"vocab": 161})
    expected_loss, _ = loss_and_gradients(odd, ModelBuild("cpu", torch.float32))
    for loss, _ in run_ranks(2, one_rank, odd, False):
        assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_too_many_shards_for_the_heads_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="tensor parallel 3 does not divide 2 key/value heads"):
        random_model(preset("tiny-llama"), ModelBuild("cpu", torch.float32, GlooShards(0, 3)))


def test_a_rank_s_exception_reaches_the_test_once_with_its_traceback():
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, fail_on_rank_one)
    assert str(caught.value).count("ValueError: rank 1 is unhappy") == 1
    assert "fail_on_rank_one" in str(caught.value)


def fail_on_rank_one(rank, world):
    if rank == 1:
        raise ValueError(f"rank {rank} is unhappy")
    dist.barrier()


def test_a_rank_that_dies_silently_is_reported():
    with pytest.raises(RankFailed, match="rank 0 died with exit code 9"):
        run_ranks(1, die)


def die(rank, world):
    import os

    os._exit(9)
