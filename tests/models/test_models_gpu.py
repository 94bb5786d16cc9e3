"""On a GPU the model computes what it computes on the CPU, in every layout. Needs no file and no reference package."""

import msgspec
import pytest
import torch

from cairn.models.attend import Cached, KVCache, PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.fused_experts import experts_product
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.linear.form import Epilogue, Kernels
from cairn.models.linear.fp8_rows import Fp8Rows
from cairn.models.linear.gpu_product import gpu_product
from cairn.models.presets import PRESETS, preset
from cairn.models.stacked_experts import split_experts
from cairn.models.weights import load_model, random_model

pytestmark = pytest.mark.gpu

TINY = [name for name in PRESETS if name.startswith("tiny")]
LENGTHS = [40, 1, 23]


class Memory:
    """A model's own tensors as a checkpoint, so that CPU and GPU hold the same weights."""

    def __init__(self, model):
        from cairn.models.export import tensors

        self.tensors = {name: tensor.cpu() for name, tensor in tensors(model)}

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def dtype(self, name):
        return self.tensors[name].dtype

    def tensor(self, name):
        return self.tensors[name]


def memory(model):
    return split_experts(Memory(model), model.spec.family)


def logits(model, lengths=LENGTHS):
    device = model.embedding.weight.device
    tokens_T = torch.arange(sum(lengths), device=device) * 37 % model.spec.vocab
    attend = PackedDocuments(lengths, device)
    with torch.inference_mode():
        return model.logits(model(tokens_T, attend.positions_T(), attend)).float().cpu()


def relative(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


@pytest.fixture(params=TINY)
def exact(request):
    """Random weights, and their logits in float32 on the CPU."""
    model = random_model(preset(request.param), ModelBuild("cpu", torch.float32), seed=1)
    with torch.no_grad():  # larger than the initial ones, so that attention is not flat
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 8e-2), (torch.float16, 1e-2)]
)
def test_packed_logits_equal_the_cpu(exact, fused, dtype, tolerance):
    """By the median row: rounding sends a few rows to other experts, on a CPU in the same type as well."""
    model = load_model(exact.spec, memory(exact), ModelBuild("cuda", dtype, fused=fused))
    ours_TV, exact_TV = logits(model), logits(exact)
    error_T = (ours_TV - exact_TV).norm(dim=1) / exact_TV.norm(dim=1)
    assert error_T.median() < tolerance
    assert dtype != torch.float32 or error_T.max() < tolerance


def test_the_cache_gives_what_packing_gives(exact):
    model = load_model(exact.spec, memory(exact), ModelBuild("cuda", torch.float32, fused=True))
    tokens_T = torch.arange(30, device="cuda") * 37 % model.spec.vocab
    cache = KVCache(model.spec, 30, torch.float32, "cuda")
    pieces = []
    with torch.inference_mode():
        for chunk in (slice(0, 11), slice(11, 12), slice(12, 30)):
            attend = Cached([cache], [len(tokens_T[chunk])])
            pieces.append(model.logits(model(tokens_T[chunk], attend.positions_T(), attend)))
            attend.commit()
    assert relative(torch.cat(pieces).cpu(), logits(model, [30])) < 1e-3


def test_layout_does_not_change_random_weights():
    spec = preset("tiny-moe")
    first, second = (random_model(spec, ModelBuild("cuda", torch.float32, fused=f)) for f in (0, 1))
    assert (
        torch.equal(logits(first), logits(second)) or relative(logits(first), logits(second)) < 1e-5
    )  # one product or three round differently


def test_sampling_on_the_gpu_follows_its_seed():
    model = random_model(preset("tiny-llama"), ModelBuild("cuda", torch.float32))

    def draw(seed):
        sampling = GenerateSampling(temperature=1.0, top_p=0.9, top_k=50, seed=seed, max_tokens=20)
        return list(Generation(model, [1, 2, 3], sampling, ()))

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


@pytest.mark.parametrize(("outputs", "inputs"), [(211, 256), (1001, 100), (64, 64)])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_invariant_products_of_any_width(outputs, inputs, eight_bits):
    """A vocabulary of 50,257 words is no multiple of anything: rows of such a product begin where they can."""
    if eight_bits and inputs % 16:
        pytest.skip("float8 rows are multiples of 16 bytes")
    x, w = (torch.randn(n, inputs, device="cuda", dtype=torch.bfloat16) for n in (40, outputs))
    epilogue = Epilogue(kernels=Kernels(invariant=True))

    def product(rows):
        if eight_bits:
            return Fp8Rows(w).product(rows, None, epilogue)
        return gpu_product(rows, w, None, epilogue, Kernels(invariant=True))

    y = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], y[i]) for i in range(len(x)))
    exact = x.double() @ w.double().T
    assert relative(y.double(), exact) < (5e-2 if eight_bits else 5e-3)


def test_invariant_experts_in_any_company():
    """Where there are few tokens, too, whose parts the next norm would sum otherwise."""
    spec = msgspec.structs.replace(preset("qwen3-30b-a3b"), layers=1, vocab=1024)
    layer = (
        random_model(spec, ModelBuild("cuda", torch.bfloat16, fused=True)).layers[0].feed_forward
    )
    x_TD = torch.randn(2100, spec.hidden, device="cuda").bfloat16()
    with torch.inference_mode():
        of = [
            experts_product(layer, x_TD[:n], x_TD[:n], Kernels(invariant=True))[0]
            for n in (1, 5, 600, 2100)
        ]
    assert all(torch.equal(row_D, of[0]) for row_D in of)
