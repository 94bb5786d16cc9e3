"""Products and losses without a GPU: references against torch and the model, wrong arguments, who computes what."""

import pytest
import torch
import torch.nn.functional as F

from cairn.core.errors import ConfigError, HardwareError
from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.packed_matmul import random_packed
from cairn.kernels.loss.cross_entropy import cross_entropy, cross_entropy_
from cairn.kernels.loss.cross_entropy_plans import CANDIDATES, Plan
from cairn.kernels.loss.cross_entropy_rule import (
    LOG2E,
    Losses,
    Rule,
    VocabShard,
    cross_entropy_reference,
)
from cairn.kernels.loss.linear_cross_entropy import linear_cross_entropy
from cairn.kernels.matmul import matmul_fp8 as fp8
from cairn.kernels.matmul import skinny_matmul as skinny
from cairn.kernels.matmul.matmul import matmul
from cairn.kernels.matmul.matmul_fp8 import matmul_fp8
from cairn.kernels.matmul.packed_matmul import packed_matmul
from cairn.kernels.matmul.projections import QWEN3_06B, QWEN3_8B
from cairn.kernels.matmul.skinny_fp8 import skinny_fp8
from cairn.kernels.matmul.skinny_matmul import skinny_matmul
from cairn.kernels.matmul.skinny_plans import candidates, default_plan
from cairn.kernels.quantize.quantize import Quantized
from cairn.kernels.tiles import Tiles, row_bucket
from cairn.models.build import ModelBuild
from cairn.models.layers import FeedForward
from cairn.models.presets import preset

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


class TestReferences:
    @pytest.mark.parametrize("product", [matmul, skinny_matmul])
    @pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
    def test_a_product_is_a_linear_layer(self, product, impl):
        a, b, bias, residual = (
            torch.randn(5, 8),
            torch.randn(6, 8),
            torch.randn(6),
            torch.randn(5, 6),
        )
        y = product(a, b, bias_N=bias, residual_MN=residual, impl=impl)
        assert relative_error(y, F.linear(a, b, bias) + residual) < 1e-6

    @pytest.mark.parametrize("product", [matmul, skinny_matmul])
    def test_swiglu_is_the_model_s(self, product):
        spec = preset("tiny-qwen3")
        layer = FeedForward(ModelBuild("cpu", torch.float32, fused=True), spec, spec.intermediate)
        for parameter in layer.parameters():
            parameter.data.normal_(std=0.1)
        x = torch.randn(7, spec.hidden)
        weight = layer.inner.fused.weight.data
        inner = product(x, weight, activation="swiglu", impl="reference")
        y = product(inner, layer.down.weight.data, impl="reference")
        assert relative_error(y, layer(x).detach()) < 1e-5

    def test_quantised_results_saturate(self):
        a = torch.tensor([[1.0, 2.0], [300.0, 0.0]])
        y = matmul(a, torch.eye(2), out_scale=torch.tensor([0.5]))
        assert y.dtype == FP8
        assert y.float().tolist() == [[2.0, 4.0], [448.0, 0.0]]

    def test_fp8_scales(self):
        a, b = torch.randn(4, 16).to(FP8), torch.randn(6, 16).to(FP8)
        scale_a, scale_b = torch.rand(4, 1), torch.rand(6)
        y = matmul_fp8(a, b, scale_a, scale_b, out_dtype=torch.float32)
        exact = (a.double() * scale_a) @ (b.double() * scale_b[:, None]).T
        assert relative_error(y, exact) < 1e-5

    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_cross_entropy_is_torch_s(self, smoothing, reduction):
        logits = torch.randn(9, 31, requires_grad=True)
        targets = torch.randint(31, (9,))
        targets[3] = -100
        options = dict(label_smoothing=smoothing, reduction=reduction)
        ours = cross_entropy(logits, targets, **options)
        theirs = F.cross_entropy(logits, targets, **options)
        assert relative_error(ours.detach(), theirs.detach()) < 1e-6
        mine, other = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, theirs))
        assert relative_error(mine, other) < 1e-5

    def test_in_place_leaves_the_gradient(self):
        logits = torch.randn(4, 20)
        wide = logits.clone().requires_grad_()
        targets = torch.tensor([1, -100, 3, 19])
        losses = cross_entropy_reference(wide, targets, Rule(z_loss=0.1))
        [gradient] = torch.autograd.grad(losses.loss_T.sum() * 0.5, wide)
        found = cross_entropy_(logits, targets, z_loss=0.1, grad_scale=0.5)
        assert relative_error(logits, gradient) < 1e-6
        assert relative_error(found, [part.detach() for part in losses]) < 1e-6

    def test_linear_cross_entropy_is_both_in_a_row(self):
        x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        targets = torch.randint(30, (2, 5))
        losses = linear_cross_entropy(x, weight, targets)
        exact = F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())
        assert relative_error(losses.loss.detach(), exact.detach()) < 1e-5
        mine, other = (torch.autograd.grad(loss, (x, weight)) for loss in (losses.loss, exact))
        assert relative_error(mine, other) < 1e-5


def a_product(m=4, n=6, k=8, dtype=BF16):
    return torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype)


class TestWrongArguments:
    @pytest.mark.parametrize("product", [matmul, skinny_matmul])
    @pytest.mark.parametrize(
        ("named", "change"),
        [
            ("a_MK|x_MK", lambda a, b: (a.int(), b, {})),
            ("b_NK|w_NK", lambda a, b: (a, b[:, :4], {})),
            ("b_NK|w_NK", lambda a, b: (a, b.float(), {})),
            ("bias_N", lambda a, b: (a, b, {"bias_N": torch.zeros(5)})),
            ("bias_N", lambda a, b: (a, b, {"bias_N": torch.zeros(12)[::2]})),
            ("residual_MN", lambda a, b: (a, b, {"residual_MN": torch.zeros(4, 5, dtype=BF16)})),
            ("activation", lambda a, b: (a, b, {"activation": "relu"})),
            ("b_NK", lambda a, b: (a, b[:5], {"activation": "swiglu"})),
            ("out", lambda a, b: (a, b, {"out": torch.zeros(4, 6)})),
            ("stride", lambda a, b: (a.T.contiguous().T, b, {})),
        ],
    )
    def test_products(self, product, named, change):
        a, b, options = change(*a_product())
        with pytest.raises(ValueError, match=named):
            product(a, b, **options)

    def test_products_of_few_rows_have_no_gelu(self):
        few, w = torch.zeros(1, 128, dtype=BF16), torch.zeros(128, 128, dtype=FP8)
        for call in (
            lambda: skinny_matmul(few, w.to(BF16), activation="gelu"),
            lambda: skinny_fp8(few, Quantized(w, torch.ones(128, 1)), activation="gelu"),
            lambda: packed_matmul(few, random_packed(128, 128, device="cpu"), activation="gelu"),
        ):
            with pytest.raises(ValueError, match="activation: wanted 'swiglu' or None"):
                call()

    def test_shifts_of_4_bit_weights_have_the_type_of_their_scales(self):
        w = random_packed(128, 128, shifts=True, device="cpu")
        x = torch.zeros(1, 128, dtype=BF16)
        packed_matmul(x, w)
        with pytest.raises(ValueError, match=r"w\.scales"):
            packed_matmul(x, w._replace(scales=w.scales.to(BF16)))

    def test_what_only_one_product_has(self):
        a, b = a_product()
        with pytest.raises(ValueError, match="out_scale"):
            matmul(a, b, out_scale=torch.ones(2))
        with pytest.raises(ValueError, match="out_dtype"):
            matmul(a, b, out_dtype=FP8)
        with pytest.raises(ValueError, match="at most 256 rows"):
            skinny_matmul(torch.zeros(257, 8, dtype=BF16), b)

    def test_fp8(self):
        a, b = torch.zeros(4, 16).to(FP8), torch.zeros(6, 16).to(FP8)
        one = torch.ones(())
        with pytest.raises(ValueError, match="a_MK"):
            matmul_fp8(a.float(), b, one, one)
        with pytest.raises(ValueError, match="scale_a: wanted 1 or 4 numbers"):
            matmul_fp8(a, b, torch.ones(5), one)
        with pytest.raises(ValueError, match="scale_b"):
            matmul_fp8(a, b, one, one.double())
        with pytest.raises(ValueError, match="out_dtype"):
            matmul_fp8(a, b, one, one, out_dtype=FP8)

    @pytest.mark.parametrize(
        ("named", "logits", "targets", "options"),
        [
            ("logits_TV", torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3).long(), {}),
            ("logits_TV", torch.zeros(3), torch.zeros(3).long(), {}),
            ("logits_TV", torch.zeros(4, 3).T, torch.zeros(3).long(), {}),
            ("targets_T", torch.zeros(3, 4), torch.zeros(3), {}),
            ("targets_T", torch.zeros(3, 4), torch.zeros(2).long(), {}),
            ("z_loss", torch.zeros(3, 4), torch.zeros(3).long(), {"z_loss": -1.0}),
            ("label_smoothing", torch.zeros(3, 4), torch.zeros(3).long(), {"label_smoothing": 1.0}),
        ],
    )
    @pytest.mark.parametrize("loss", [cross_entropy, cross_entropy_])
    def test_losses(self, loss, named, logits, targets, options):
        with pytest.raises(ValueError, match=named):
            loss(logits, targets, **options)

    def test_scales_and_chunks(self):
        with pytest.raises(ValueError, match="grad_scale"):
            cross_entropy_(torch.zeros(3, 4), torch.zeros(3).long(), grad_scale=torch.ones(2))
        x, weight, targets = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3).long()
        with pytest.raises(ValueError, match="weight_VD"):
            linear_cross_entropy(x, weight.double(), targets)
        with pytest.raises(ValueError, match="weights_T"):
            linear_cross_entropy(x, weight, targets, weights_T=torch.ones(2))
        with pytest.raises(ValueError, match="accumulate"):
            linear_cross_entropy(x, weight, targets, accumulate=torch.float16)
        with pytest.raises(ValueError, match="reduction"):
            linear_cross_entropy(x, weight, targets, reduction="none")


class TestChoices:
    def test_a_kernel_that_cannot_run_says_why(self):
        a, b = a_product()
        with pytest.raises(HardwareError, match="not on a GPU"):
            matmul(a, b.new_zeros(8, 8), impl="triton")
        with pytest.raises(HardwareError, match="not a multiple of 16 bytes"):
            matmul(a, b, impl="triton")
        with pytest.raises(HardwareError, match="multiples of 16 bytes"):
            skinny_matmul(
                torch.zeros(4, 6, dtype=BF16), torch.zeros(8, 6, dtype=BF16), impl="triton"
            )
        with pytest.raises(HardwareError, match="no backward"):
            skinny_matmul(a.clone().requires_grad_(), b, impl="triton")
        with pytest.raises(HardwareError, match="float32"):
            matmul(a.float(), b.float(), impl="triton")
        with pytest.raises(ConfigError, match="no implementation 'gluon'"):
            matmul(a, b, impl="gluon")

    def test_gradients_take_the_way_that_has_them(self):
        a, b = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8)
        matmul(a, b, residual_MN=torch.zeros(4, 6)).sum().backward()
        assert relative_error(a.grad, b.sum(0).expand(4, 8)) < 1e-6


class TestPlans:
    def test_every_projection_occupies_the_chip(self):
        for p in (*QWEN3_8B, *QWEN3_06B):
            for m in (1, 3, 8, 16, 33, 64):
                plan = default_plan(m, p.n, p.k)
                programs = -(-p.n // plan.block_n) * plan.parts(p.k)
                assert programs >= 64
                assert plan in candidates(m, p.n, p.k)

    def test_shared_memory_suffices(self):
        for p in (*QWEN3_8B, *QWEN3_06B):
            for m in (1, 8, 16, 32, 64):
                for plan in candidates(m, p.n, p.k):
                    if plan.kernel == "stream":
                        rows = plan.block_n + max(8, m)
                        assert plan.stages * rows * plan.block_k * 2 + 1024 < 232448

    def test_pieces_fit_a_cooperative_launch(self):
        for plan in CANDIDATES:
            if plan.kernel == "pieces":
                registers = plan.per_sm * plan.warps * 32 * plan.maxnreg
                assert registers <= 65536
                assert plan.per_sm * 132 >= plan.pieces(262144)

    def test_numbers(self):
        assert [row_bucket(m) for m in (1, 16, 17, 8192, 9000)] == [16, 16, 32, 8192, 8192]
        assert Tiles().number(129, 257) == 4
        constants = Plan().constants(151936)
        assert (constants["PIECES"], constants["WIDTH"]) == (38, 64)
        assert constants["PIECES"] * constants["SIZE"] >= 151936 // 2
        assert skinny.cost(1, 4096, 4096).bytes == 2 * (4096 * 4096 + 4096 + 4096)
        assert fp8.cost(64, 24576, 4096).flops == 2 * 64 * 24576 * 4096


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("sizes", [(30, 30), (7, 50, 3)])
def test_the_reference_joins_shards_of_the_vocabulary(sizes, smoothing):
    """Each rank computes on its own, and twice: first its sums are noted, then it gets those of all."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, sum(sizes), generator=generator, dtype=torch.float64)
    logits[:, 5] = 0.0 if smoothing else -torch.inf
    targets = torch.tensor([0, 6, sum(sizes) - 1, -100, 8, 31])
    highest, sums, found = logits.amax(1) * LOG2E, [], []

    def losses_of(rank: int, part: torch.Tensor, all_sum) -> Losses:
        shard = VocabShard(sum(sizes[:rank]), sum(sizes), lambda _: highest, all_sum)
        return cross_entropy_(
            part, targets, grad_scale=0.25, z_loss=1e-2, label_smoothing=smoothing, shard=shard
        )

    for rank, part in enumerate(logits.split(sizes, dim=1)):
        losses_of(rank, part.clone(), lambda rest: sums.append(rest.clone()) or rest)
    whole = logits.clone()
    wanted = cross_entropy_(whole, targets, grad_scale=0.25, z_loss=1e-2, label_smoothing=smoothing)
    for rank, part in enumerate(logits.split(sizes, dim=1)):
        found.append(part.clone())
        joined = losses_of(rank, found[-1], lambda _: torch.stack(sums).sum(0))
        assert relative_error(joined, wanted) < 1e-7
    assert relative_error(torch.cat(found, 1), whole) < 1e-7


def test_a_single_shard_is_the_whole_vocabulary():
    torch.manual_seed(0)
    shard = VocabShard(0, 9, lambda top: top, lambda rest: rest)
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8)
    targets = torch.tensor([0, 8, -100, 3])
    losses = [linear_cross_entropy(x, weight, targets, shard=s).loss for s in (None, shard)]
    plain, sharded = (torch.autograd.grad(loss, x)[0] for loss in losses)
    assert relative_error(sharded, plain) < 1e-5
    assert relative_error(losses[1].detach(), losses[0].detach()) < 1e-5
