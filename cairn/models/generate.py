"""The plain generator: one prompt in, one token after another out.

    prompt -prefill-> logits -sample-> token -decode-> logits -sample-> token ...

A contiguous cache, one sequence, no batching: the form to read first, and the reference that the paged engine is
held against. It works on token ids; text is the tokenizer's business.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import RequestError
from cairn.core.events import span
from cairn.models.attend import Cached, KVCache
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer

DEFAULT_MAX_TOKENS = 256
SMALLEST_TEMPERATURE = 1e-30  # float32 divides by it
Finish = Literal["stop", "length"]


class GenerateSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters, applied in the order temperature, top-k, top-p."""

    temperature: float = 0.0  # 0: always the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int | None = None  # None: different every time
    max_tokens: int | None = None  # None: what the context leaves, at most DEFAULT_MAX_TOKENS

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (all) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**63, "between 0 and 2**63 - 1")


def _check(name: str, value: float, fine: bool, expected: str) -> None:
    if not fine:
        raise RequestError(f"{name} is {value}", hint=f"it has to be {expected}")


class Generation:
    """Iterate for the new token ids; then `finish` says why it ended."""

    def __init__(
        self,
        model: Transformer,
        prompt: Sequence[int],
        sampling: GenerateSampling,
        eos_ids: Sequence[int],
    ) -> None:
        self.max_tokens = budget(model.spec, prompt, sampling.max_tokens)
        self.model, self.prompt, self.sampling = model, list(prompt), sampling
        self.eos_ids = frozenset(eos_ids)
        self.finish: Finish | None = None

    def __iter__(self) -> Iterator[int]:
        weight = self.model.embedding.weight
        device = weight.device
        capacity = len(self.prompt) + self.max_tokens
        cache = KVCache(self.model.spec, capacity, weight.dtype, device)
        generator = torch.Generator(device)
        if self.sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.sampling.seed)
        step_T = torch.tensor(self.prompt, device=device)
        for done in range(self.max_tokens):
            with span("decode" if done else "prefill", tokens=len(step_T), cached=cache.length):
                logits_V = next_logits(self.model, step_T, cache)
                token = sample(logits_V, self.sampling, generator)
            if token in self.eos_ids:
                self.finish = "stop"
                return
            yield token
            step_T = torch.tensor([token], device=device)
        self.finish = "length"


@torch.inference_mode()
def next_logits(model: Transformer, tokens_T: Tensor, cache: KVCache) -> Tensor:
    """Scores of the token that follows `tokens_T`, which continue what the cache knows."""
    attend = Cached([cache], [len(tokens_T)])
    hidden_TD = model(tokens_T, attend.positions_T(), attend)
    attend.commit()
    return model.logits(hidden_TD[-1:])[0]


def sample(logits_V: Tensor, sampling: GenerateSampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    weights_V = probabilities(logits_V, sampling)
    return int(torch.multinomial(weights_V, 1, generator=generator))


def probabilities(logits_V: Tensor, sampling: GenerateSampling) -> Tensor:
    """The distribution to draw from, float32: whatever is cut off has probability zero."""
    scores_V = logits_V.float()
    # The largest becomes zero, so that no temperature, however small, makes it infinite.
    scores_V = (scores_V - scores_V.max()) / max(sampling.temperature, SMALLEST_TEMPERATURE)
    if 0 < sampling.top_k < len(scores_V):
        smallest_kept = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < smallest_kept, -math.inf)
    weights_V = scores_V.softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_V, order_V = weights_V.sort(descending=True)
        before_V = sorted_V.cumsum(dim=-1) - sorted_V  # the first token always stays
        cut_V = order_V[before_V >= sampling.top_p]
        weights_V = weights_V.index_fill(0, cut_V, 0.0)
    return weights_V / weights_V.sum()


def budget(spec: ModelSpec, prompt: Sequence[int], max_tokens: int | None) -> int:
    """Number of tokens that may follow the prompt; raises if the context is exceeded."""
    if not prompt:
        raise RequestError("the prompt is empty", hint="give at least one token")
    outside = [token for token in prompt if not 0 <= token < spec.vocab]
    if outside:
        raise RequestError(
            f"token {outside[0]} is outside the vocabulary of {spec.vocab}",
            hint="the tokenizer does not belong to this model",
        )
    room = spec.context - len(prompt)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the context of the model is {spec.context}",
            hint="shorten the prompt, or use a model with a longer context",
        )
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            f"{len(prompt)} prompt tokens and max_tokens {max_tokens} exceed the context of "
            f"{spec.context}",
            hint=f"at most {room} tokens can follow this prompt",
        )
    return min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else max_tokens
