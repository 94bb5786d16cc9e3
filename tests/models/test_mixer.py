"""A mixer is a module, its counts and a registration: everything else follows."""

import msgspec
import pytest
import torch

from cairn.core.errors import ConfigError
from cairn.models import mixer
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.cache import Plane, cache_bytes_per_token
from cairn.models.fused import Fused
from cairn.models.layer_loop import Sublayer
from cairn.models.lean import Lean
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.mixer import MIXERS, MixerRegistration
from cairn.models.presets import preset
from cairn.models.weights import random_model


class Latent(Sublayer):
    """Attention over one narrow head, as an example of what is not grouped-query attention."""

    def __init__(self, build, spec, layer):
        super().__init__()
        self.inner = ColumnParallelLinear(build, spec.hidden, {"q": 8, "kv": 8}, bias=False)
        self.out = RowParallelLinear(build, 8, spec.hidden, bias=False)

    def plain(self, x_TD, step):
        q_TC, kv_TC = self.inner(x_TD)
        scores_TT = (q_TC @ kv_TC.T).tril()
        return self.out(scores_TT @ kv_TC)


class LatentShape:
    def parameters(self, spec):
        return self.matmul_parameters(spec)

    def matmul_parameters(self, spec):
        return 3 * 8 * spec.hidden

    def pair_flops(self, spec):
        return 4 * 8

    def planes(self, spec, shards):
        return (Plane("latent", 1, 8),)

    def token_flops(self, spec):
        return 0


@pytest.fixture
def latent(monkeypatch):
    monkeypatch.setitem(MIXERS, "narrow", MixerRegistration(LatentShape(), __name__, "Latent"))
    return msgspec.structs.replace(preset("tiny-llama"), mixer="narrow")


@torch.inference_mode()
def test_a_registered_mixer_is_built_counted_and_run_in_every_form(latent):
    model = random_model(latent, ModelBuild("cpu", fused=True))
    assert sum(p.numel() for p in model.parameters()) == latent.parameters()
    assert latent.attention_flops(3) == latent.layers * 4 * 8 * (1 + 2 + 3)
    assert cache_bytes_per_token(latent, 2) == latent.layers * 8 * 2
    attend, tokens = PackedDocuments([5]), torch.arange(5)
    expected = model(tokens, attend.positions_T(), attend)
    for form in (Lean(model), Fused(model, 64)):  # their other parts stay lean and fused
        found = form(tokens, attend.positions_T(), attend)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_mixer_that_nobody_registered_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="mixer is psychic") as refused:
        msgspec.structs.replace(preset("tiny-llama"), mixer="psychic")
    assert "attention" in (refused.value.hint or "")
    assert mixer.make_mixer("attention", ModelBuild(), preset("tiny-llama"), 0).heads > 0
