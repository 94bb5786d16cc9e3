"""Our one transformer computes what `transformers` computes, for every family."""

import functools

import pytest
import tiny_checkpoints
import torch

from cairn.models.attend import Cached, KVCache, PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.families import from_hf
from cairn.models.safetensors_file import SafetensorsFolder, read_json
from cairn.models.transformer import Transformer
from cairn.models.weights import load_model

TOLERANCE = 2e-4
families = pytest.mark.parametrize("name", tiny_checkpoints.FAMILY_NAMES)


def load(name: str, **build) -> Transformer:
    folder = tiny_checkpoints.folder(name)
    spec = from_hf(read_json(folder / "config.json"))
    return load_model(
        spec, SafetensorsFolder(folder), ModelBuild("cpu", torch.float32, **build)
    ).eval()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny_checkpoints.SIZES["vocab_size"], (count,), generator=generator)


PROMPT_T = tokens(17, seed=3)


def fresh_reference(name: str):
    """The reference as if newly made: dynamic scaling remembers the longest sequence so far."""
    reference = tiny_checkpoints.reference(name)
    reference(torch.tensor([[0]]))
    return reference


def oracle(name: str, tokens_T: torch.Tensor) -> torch.Tensor:
    return fresh_reference(name)(tokens_T[None]).logits[0]


@functools.cache
def greedy_oracle(name: str) -> list[int]:
    """What the reference goes on with behind the prompt; both forms of a model are compared with it."""
    continued_T = fresh_reference(name).generate(
        PROMPT_T[None], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0]
    return continued_T[len(PROMPT_T) :].tolist()


def packed_logits(model: Transformer, documents: list[torch.Tensor]) -> torch.Tensor:
    attend = PackedDocuments([len(d) for d in documents])
    return model.logits(model(torch.cat(documents), attend.positions_T(), attend))


@families
@torch.no_grad()
def test_packed_logits_equal_the_reference(name):
    prompt_T = tokens(70)
    difference = (packed_logits(load(name), [prompt_T]) - oracle(name, prompt_T)).abs().max()
    assert difference <= TOLERANCE


@families
@torch.no_grad()
def test_the_reference_is_not_flat(name):
    """Parity means something only if the logits vary more than the tolerance."""
    assert oracle(name, tokens(70)).std() > 100 * TOLERANCE


@families
@torch.no_grad()
def test_documents_packed_together_do_not_see_each_other(name):
    documents = [tokens(n, seed=n) for n in (33, 1, 20)]
    together = packed_logits(load(name), documents)
    alone = torch.cat([oracle(name, d) for d in documents])
    assert (together - alone).abs().max() <= TOLERANCE


@families
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_greedy_continuation_with_a_cache_is_identical(name, fused):
    model = load(name, fused=fused)
    cache = KVCache(model.spec, len(PROMPT_T) + 64, torch.float32, "cpu")
    step_T, continuation = PROMPT_T, []
    for _ in range(64):
        attend = Cached([cache], [len(step_T)])
        hidden_TD = model(step_T, attend.positions_T(), attend)
        attend.commit()
        step_T = model.logits(hidden_TD[-1:]).argmax(dim=-1)
        continuation.append(step_T.item())
    assert continuation == greedy_oracle(name)


@families
@torch.no_grad()
def test_logits_with_a_cache_equal_the_reference_step_by_step(name):
    """Uneven chunks of two sequences at once, against the reference alone with its own cache."""
    model, reference = load(name), fresh_reference(name)
    sequences = [tokens(40, seed=5), tokens(31, seed=6)]
    caches = [KVCache(model.spec, 40, torch.float32, "cpu") for _ in sequences]
    pasts = [None, None]
    for chunk in (slice(0, 13), slice(13, 14), slice(14, 30), slice(30, 31)):
        pieces = [s[chunk] for s in sequences]
        attend = Cached(caches, [len(p) for p in pieces])
        ours = model.logits(model(torch.cat(pieces), attend.positions_T(), attend))
        attend.commit()
        for i, (piece, mine) in enumerate(
            zip(pieces, ours.split([len(p) for p in pieces]), strict=True)
        ):
            out = reference(piece[None], past_key_values=pasts[i], use_cache=True)
            pasts[i] = out.past_key_values
            assert (mine - out.logits[0]).abs().max() <= TOLERANCE


@families
def test_counted_parameters_are_those_of_the_reference(name):
    model = load(name)
    unique = {p.data_ptr(): p.numel() for p in tiny_checkpoints.reference(name).parameters()}
    assert model.spec.parameters() == sum(unique.values())
    assert model.spec.parameters() == sum(p.numel() for p in model.parameters())
