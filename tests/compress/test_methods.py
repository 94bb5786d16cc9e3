"""The numeric methods against their definitions, and what they promise of the output of a matrix."""

import copy

import msgspec
import pytest
import torch
from torch import Tensor

from cairn.compress.awq import best_scale
from cairn.compress.gptq import DAMPING, gptq, inverse_factor
from cairn.compress.layer_by_layer import final_hidden, walk
from cairn.compress.prune_experts import expert_layers, keep_best, saliencies
from cairn.compress.prune_masks import magnitude, smallest, sparsegpt, wanda
from cairn.compress.quality import Reference
from cairn.compress.quantize import QuantizeSettings, quantize_model
from cairn.compress.scaling import apply_scales, folds_of, storable_scale
from cairn.compress.sensitivity import with_kept
from cairn.compress.smoothquant import smoothing_scale
from cairn.compress.statistics import InputStatistics
from cairn.core.errors import CairnError
from cairn.models.build import ModelBuild
from cairn.models.experts import Router
from cairn.models.quantized.matrices import matrices_of
from cairn.models.quantized.planes import dequantized
from cairn.models.quantized.rounding import SCHEMES, QuantizationGrid, nearest_levels, rounded
from cairn.models.spec import Experts, ModelSpec
from cairn.models.weights import random_model

SPEC = ModelSpec(
    family="qwen3", vocab=128, hidden=64, layers=2, heads=4, kv_heads=4, head_dim=16,
    intermediate=96, context=64, tied=True, qk_norm=True,
)  # fmt: skip
EXPERTS = Experts(count=4, per_token=2, intermediate=32)
SPECS = {
    "dense": SPEC,
    "biases": msgspec.structs.replace(SPEC, qkv_bias=True, mlp_bias=True),
    "layer norm": msgspec.structs.replace(SPEC, norm="layer", qk_norm=False),
    "plus one": msgspec.structs.replace(SPEC, norm_plus_one=True, post_norms=True),
    "experts": msgspec.structs.replace(SPEC, experts=EXPERTS),
    "shared expert with a gate": msgspec.structs.replace(
        SPEC,
        experts=msgspec.structs.replace(EXPERTS, shared_intermediate=24, shared_gate=True),
    ),
    "biased experts": msgspec.structs.replace(
        SPEC, experts=msgspec.structs.replace(EXPERTS, biases=True)
    ),
    "clamped": msgspec.structs.replace(
        SPEC,
        activation="clamped_silu",
        activation_limit=1.0,
        experts=msgspec.structs.replace(EXPERTS, biases=True),
    ),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def correlated(rows: int, columns: int) -> Tensor:
    """Inputs with a few directions that matter most, and a few large columns."""
    mix = torch.randn(columns, columns, generator=seeded(1)) * torch.logspace(0, -2, columns)
    x = torch.randn(rows, columns, generator=seeded(2)) @ mix.t()
    x[:, :3] *= 10
    return x


def model_of(spec: ModelSpec):
    model = random_model(spec, ModelBuild("cpu", torch.float32), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide mistakes
                parameter.add_(torch.randn(parameter.shape, generator=seeded(3)) * 0.1)
            else:
                parameter.mul_(6)
    return model


def text(windows: int = 6, length: int = 24) -> Tensor:
    return torch.randint(0, SPEC.vocab, (windows, length), generator=seeded(9))


def test_a_giant_row_does_not_decide_for_all_others():
    """First tokens of a text are often hundreds of times as long as others where they enter a down projection."""
    x, w = correlated(256, 64), torch.randn(48, 64, generator=seeded(4))
    giant = 300 * torch.randn(2, 64, generator=seeded(5))
    found = InputStatistics(64, x.device, 1, True)
    found.add(torch.cat((giant, x)))
    whole = torch.cat((giant, x))
    grid = QuantizationGrid("int4", 64)

    def lost(hessian_KK: Tensor) -> float:
        return float((x @ (dequantized(gptq(w, hessian_KK, grid, torch.float32)) - w).t()).norm())

    assert lost(found.hessian_KK) < 0.8 * lost(2 / len(whole) * whole.t() @ whole)


def test_a_hessian_is_the_sum_of_products_of_all_its_rows():
    x_MK = torch.randn(40, 600, generator=torch.Generator().manual_seed(0))
    found = InputStatistics(600, x_MK.device, 2, True)
    for part_MK in x_MK.split(25):
        found.add(part_MK)
    expected_KK = 2 / 40 * x_MK.double().t() @ x_MK.double()
    torch.testing.assert_close(found.hessian_KK.double(), expected_KK, rtol=1e-4, atol=1e-4)


def plainly(w_NK: Tensor, hessian_KK: Tensor, scale_N: Tensor, grid: QuantizationGrid) -> Tensor:
    """GPTQ as it is derived: after each column, its row and column leave the inverse Hessian."""
    w, inverse = w_NK.double().clone(), hessian_KK.double().clone()
    inverse.diagonal().add_(DAMPING[0] * float(hessian_KK.diagonal().mean()))
    inverse = torch.linalg.inv(inverse)
    levels = []
    for i in range(w.shape[1]):
        level_N = nearest_levels(w[:, i].float(), scale_N, None, grid)
        error_N = (w[:, i] - scale_N * level_N.double()) / inverse[i, i]
        w[:, i + 1 :] -= error_N[:, None] * inverse[i, i + 1 :]
        inverse = inverse - inverse[:, i : i + 1] * inverse[i : i + 1] / inverse[i, i]
        levels.append(level_N)
    return torch.stack(levels, 1)


def test_gptq_is_what_its_derivation_says():
    w_NK, x_MK = torch.randn(5, 24, generator=seeded(4)), correlated(200, 24)
    hessian_KK, grid = x_MK.t() @ x_MK / 100, SCHEMES["w8a8"]
    made = gptq(w_NK, hessian_KK, grid, torch.float32, ordered=False)
    assert torch.equal(made.levels_NK, plainly(w_NK, hessian_KK, made.scales[:, 0], grid))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8", "fp8-block", "mxfp4", "nvfp4"])
def test_gptq_loses_less_of_the_output_than_nearest(scheme: str, ordered: bool):
    grid = SCHEMES[scheme]
    w_NK, x_MK = torch.randn(40, 256, generator=seeded(5)), correlated(600, 256)
    hessian_KK = x_MK.t() @ x_MK
    made = dequantized(gptq(w_NK, hessian_KK, grid, torch.bfloat16, ordered=ordered))
    nearest = dequantized(rounded(w_NK, grid, torch.bfloat16))
    lost, lost_by_nearest = ((x_MK @ (w - w_NK).t()).norm() for w in (made, nearest))
    assert lost < 0.9 * lost_by_nearest


def test_gptq_with_zero_points_keeps_its_scales_in_the_file_type():
    grid = QuantizationGrid("int4", 32, symmetric=False)
    w_NK, x_MK = torch.randn(8, 64, generator=seeded(6)) + 0.5, correlated(100, 64)
    made = gptq(w_NK, x_MK.t() @ x_MK, grid, torch.bfloat16, ordered=False)
    assert torch.equal(made.scales, made.scales.bfloat16().float())
    zeros = -made.shifts / made.scales
    assert torch.allclose(zeros, zeros.round(), atol=1e-5)


def test_a_hessian_without_a_factor_gets_damping_and_is_then_refused_by_name():
    x_MK = torch.randn(3, 16, generator=seeded(7))  # far fewer rows than columns
    assert inverse_factor(x_MK.t() @ x_MK, "few rows").isfinite().all()
    with pytest.raises(CairnError, match=r"layers\.3\.out has no Cholesky factor") as refused:
        inverse_factor(-torch.eye(4), "layers.3.out")
    assert "rtn" in str(refused.value.hint)
    with pytest.raises(CairnError, match="not finite"):
        inverse_factor(torch.full((2, 2), float("nan")), "x")


def test_a_column_that_no_input_reaches_becomes_zero():
    x_MK = correlated(50, 32)
    x_MK[:, 5] = 0
    made = gptq(
        torch.randn(4, 32, generator=seeded(8)), x_MK.t() @ x_MK, SCHEMES["w8a8"], torch.float32
    )
    assert (dequantized(made)[:, 5] == 0).all()


@pytest.mark.parametrize("name", SPECS)
def test_folded_scales_leave_the_model_as_it_was(name: str):
    model = model_of(SPECS[name])
    before = final_hidden(model, text())
    folded = 0
    for walked in walk(model, text(), hessian=False):
        for fold in folds_of(walked):
            scale_K = torch.rand(fold.weights()[0].shape[1], generator=seeded(folded)) + 0.5
            apply_scales(fold, storable_scale(fold, scale_K, torch.float32))
            folded += 1
    assert folded >= 6
    torch.testing.assert_close(final_hidden(model, text()), before, atol=2e-4, rtol=1e-3)


def test_awq_is_never_worse_than_nearest_on_what_it_sees():
    model = model_of(SPEC)
    with torch.no_grad():
        model.layers[0].attention_norm.weight[:4] *= 30  # outliers, as trained models have
    for walked in walk(model, text(), hessian=False):
        for fold in folds_of(walked):
            scale_K = best_scale(fold, SCHEMES["mxfp4"], torch.bfloat16)
            x_MK, (w_NK, *_) = fold.inputs.sample_MK, fold.weights()
            made = dequantized(rounded(w_NK * scale_K, SCHEMES["mxfp4"], torch.bfloat16)) / scale_K
            nearest = dequantized(rounded(w_NK, SCHEMES["mxfp4"], torch.bfloat16))
            errors = [(x_MK @ (w - w_NK).t()).norm() for w in (made, nearest)]
            assert errors[0] <= errors[1] * (1 + 1e-5)
            if walked.number == 0 and fold.name == "norm -> qkv":
                assert errors[0] < 0.95 * errors[1]  # the outliers are worth protecting


def test_smoothing_helps_where_activations_have_outliers():
    spec, grid = SPEC, SCHEMES["w8a8"]
    lost = {}
    for method in ("rtn", "smoothquant"):
        model = model_of(spec)
        with torch.no_grad():
            for number, layer in enumerate(model.layers):
                layer.attention_norm.weight[:2] *= 100
                up = matrices_of(layer, number)[2]
                w_NK = up.read().clone()
                w_NK[-2:] *= 100  # which makes two large columns for the down projection
                up.write(w_NK)
        errors = quantize_model(
            model, text(), grid, QuantizeSettings(method=method), torch.float32
        ).errors
        lost[method] = {one.matrix: one.error for one in errors}
        assert all(one.error <= one.nearest * (1 + 1e-3) for one in errors)
    for name in ("attention.qkv", "feed_forward.down"):
        name = f"layers.0.{name}"
        assert lost["smoothquant"][name] < 0.6 * lost["rtn"][name]


def test_what_matrices_cost_adds_up_to_the_divergence():
    model = model_of(SPEC)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # a model so sure of itself would not be the limit of small errors
            if parameter.ndim == 2:
                parameter.div_(3)
    reference = Reference(model, text())
    settings = QuantizeSettings(method="rtn", most_added=1.0)
    made = quantize_model(
        model, text(), QuantizationGrid("int8", activations="token"), settings, torch.float32
    )
    expected = sum(one.nats for one in made.costs)
    assert not made.kept
    assert 0.6 < expected / reference.compare(model).kl < 1.6
    kept = [one for one in with_kept(made.costs, expected / 2) if one.kept]
    assert expected / 2 < sum(one.nats for one in kept) + max(one.nats for one in kept)
    assert not with_kept(made.costs, expected)[0].kept


def test_smoothing_scale_moves_half_of_the_range():
    walked = next(walk(model_of(SPEC), text(), hessian=False))
    fold = next(folds_of(walked))
    scale_K = smoothing_scale(fold, 0.5)
    after_x, after_w = fold.inputs.max_abs_K / scale_K, fold.weights()[0].abs().amax(0) * scale_K
    torch.testing.assert_close(after_x, after_w, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["dense", "experts"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_every_matrix_is_rounded_on_the_output_of_the_rounded_ones_before(name: str, method: str):
    model, grid = model_of(SPECS[name]), QuantizationGrid("int4", 32)
    made = quantize_model(model, text(), grid, QuantizeSettings(method=method), torch.bfloat16)
    slots = {slot.name for slot in model.slots() if len(slot.shape) == 2 and "layers" in slot.name}
    assert set(made.planes) == {slot for slot in slots if "router" not in slot}
    if method == "gptq" or name == "dense":
        assert all(one.error <= one.nearest * (1 + 1e-4) for one in made.errors)
    else:  # one scale for the inputs of all experts serves them together
        assert sum(one.error for one in made.errors) <= sum(one.nearest for one in made.errors)
    for slot in model.slots():  # the model computes with what the file will hold
        if slot.name in made.planes:
            held = model.get_parameter(slot.parameter).detach()[slot.index]
            torch.testing.assert_close(held, dequantized(made.planes[slot.name]))


def test_a_layer_is_calibrated_on_the_changed_layer_before_it_and_experts_see_every_token():
    model, seen = model_of(SPECS["experts"]), []
    for walked in walk(model, text(), hessian=False):
        seen.append(walked.sites[0].inputs.sum_abs_K.clone())
        assert {site.inputs.rows for site in walked.sites} == {text().numel()}
        for site in walked.sites:
            site.matrix.write(site.matrix.read() * 0.5)
    again = [walked.sites[0].inputs.sum_abs_K for walked in walk(model, text(), hessian=False)]
    torch.testing.assert_close(seen, again, rtol=1e-4, atol=1e-4)


# -- pruning ------------------------------------------------------------------------------------


def test_smallest_takes_as_many_as_it_should():
    scores_NK = torch.rand(6, 32, generator=seeded(1))
    assert smallest(scores_NK, 0.25, None, by_row=False).sum() == 48
    assert (smallest(scores_NK, 0.25, None, by_row=True).sum(1) == 8).all()
    pairs = smallest(scores_NK, 0.5, (2, 4), by_row=False).view(-1, 4)
    assert (pairs.sum(1) == 2).all()
    kept = scores_NK.view(-1, 4).masked_fill(pairs, float("inf")).amin(1)
    assert (kept >= scores_NK.view(-1, 4).masked_fill(~pairs, 0).amax(1)).all()


@pytest.mark.parametrize("pattern", [(1, 3), (100, 192)])
def test_every_group_of_neighbours_keeps_as_many_as_the_pattern_says(pattern: tuple[int, int]):
    """Also where groups do not divide the blocks of columns in which errors are made up for."""
    w_NK, x_MK = torch.randn(6, 384, generator=seeded(2)), correlated(500, 384)
    made_NK = sparsegpt(w_NK, x_MK.t() @ x_MK, 0.0, pattern)
    assert ((made_NK.view(-1, pattern[1]) != 0).sum(1) == pattern[0]).all()


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_the_order_of_methods_is_that_of_what_they_know(pattern: tuple[int, int] | None):
    w_NK, x_MK = torch.randn(48, 128, generator=seeded(2)), correlated(500, 128)
    made = {
        "magnitude": magnitude(w_NK, 0.5, pattern),
        "wanda": wanda(w_NK, x_MK.norm(dim=0), 0.5, pattern),
        "sparsegpt": sparsegpt(w_NK, x_MK.t() @ x_MK, 0.5, pattern),
    }
    assert all(abs(float((w == 0).float().mean()) - 0.5) < 0.01 for w in made.values())
    lost = {name: float((x_MK @ (w - w_NK).t()).norm()) for name, w in made.items()}
    assert lost["sparsegpt"] < lost["wanda"] < lost["magnitude"]


def test_the_experts_that_stay_are_those_that_add_most():
    model = model_of(SPECS["experts"])
    with torch.no_grad():
        for layer in expert_layers(model):
            layer.down_EDF[2] *= 1e-3  # adds next to nothing
    found = saliencies(model, text())
    assert all(int(saliency_E.argmin()) == 2 for saliency_E in found)
    kept = [layer.down_EDF.detach()[[0, 1, 3]].clone() for layer in expert_layers(model)]
    keep_best(model, found, 3)
    assert model.spec.experts is not None
    assert model.spec.experts.count == 3
    for layer, down_EDF in zip(expert_layers(model), kept, strict=True):
        assert torch.equal(layer.down_EDF, down_EDF)
        assert layer.router.weight.shape[0] == 3
    assert final_hidden(model, text()).isfinite().all()
    with pytest.raises(CairnError, match="1 experts cannot be kept of 3"):
        keep_best(model, found, 1)


@pytest.mark.parametrize("kind", ["plain", "biases", "groups"])
def test_a_mixture_of_fewer_experts_is_one_whose_others_are_never_chosen(kind, monkeypatch):
    more = {
        "plain": {},
        "biases": dict(biases=True, logit_bias=True, choice_bias=True),
        "groups": dict(groups=2, top_groups=1),
    }[kind]
    experts = Experts(count=6, per_token=2, intermediate=32, **more)
    model = model_of(msgspec.structs.replace(SPEC, experts=experts))
    found = [torch.tensor([5.0, 4, 3, 2, 1, 6]) for _ in expert_layers(model)]
    gone = [2, 4] if kind == "groups" else [3, 4]
    fewer = copy.deepcopy(model)
    keep_best(fewer, [one + 0.0 for one in found], 4)
    scores = Router.scores

    def without(router, x_TD):
        bias_E = router.logit_bias_E
        logits_TE = torch.nn.functional.linear(x_TD, router.weight, bias_E)
        logits_TE[:, gone] = -torch.inf
        return logits_TE.softmax(-1)

    monkeypatch.setattr(Router, "scores", without)
    for layer in expert_layers(model):
        if layer.router.bias_E is not None:
            layer.router.bias_E.data[gone] = -torch.inf
    wanted = final_hidden(model, text())
    monkeypatch.setattr(Router, "scores", scores)
    torch.testing.assert_close(final_hidden(fewer, text()), wanted)
    if kind == "groups":
        with pytest.raises(CairnError, match="3 experts cannot be kept of 4: a token visits 2"):
            keep_best(fewer, [one[:4] for one in found], 3)
