"""A smaller model of the same tokens drafts: an engine of its own beside the one that serves.

    text so far --prefix cache--> its last page again, then token by token --> drafts

The drafts of all requests are made in one batch. They are drawn with each request's own parameters and seed: the noise
of a draw depends on seed, position and token alone, so where both models nearly agree, the draws are mostly the same
(arXiv:2408.07978). A request that the draft model cannot hold goes without drafts.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cairn.core.errors import ConfigError, RequestError
from cairn.models.cache import cache_groups
from cairn.serve.config import NOT_SERVING
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.speculate.drafter import Ask

if TYPE_CHECKING:
    from cairn.models.runnable import OpenModel
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.loop import Engine

PAGE = 16  # tokens: what the last page holds is computed again for every draft
PAGED_TOKENS = 65536  # of all requests that the draft model remembers at once on a GPU
CPU_PAGED_TOKENS = 4096  # and on a CPU, besides one of the longest


class ModelDrafter:
    def __init__(self, engine: "Engine", vocabulary: int) -> None:
        """`vocabulary`: tokens of the model that verifies; a draft model may be padded to more."""
        self.engine, self.vocabulary = engine, vocabulary
        self._asked = 0

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        requests = [self._submit(ask) for ask in asks]
        while self.engine.has_work:
            self.engine.step()
        return [[] if request is None else self._known(request.outputs) for request in requests]

    def finish(self, request: Request) -> None:
        """Its pages are forgotten when others need them."""

    def _known(self, tokens: list[int]) -> list[int]:
        """The leading tokens that exist in the target's vocabulary."""
        return list(itertools.takewhile(lambda token: token < self.vocabulary, tokens))

    def _submit(self, ask: Ask) -> Request | None:
        asked = ask.request
        if asked.pieces:
            return None
        text = [*asked.prompt, *asked.outputs, *ask.hoped]
        self._asked += 1
        draft = Request(self._asked, text, _drawn_like(asked.params, ask.most), salt=asked.salt)
        try:
            self.engine.add(draft)
        except RequestError:  # longer than the draft model was made for
            return None
        return draft


def _drawn_like(params: SamplingParams, count: int) -> SamplingParams:
    """The same draws; what needs the tokens before, or only some requests ask for, is left out."""
    return SamplingParams(
        temperature=params.temperature if params.seed is not None else 0.0,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=count,
        ignore_eos=True,
    )


def open_draft_model(config: "EngineConfig", target: "OpenModel") -> ModelDrafter:
    """Load `config.speculate` beside the model that serves, on the same device."""
    from cairn.models.runnable import open_model
    from cairn.serve.engine.start import start_with

    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculate is {config.speculate}, and tensor_parallel_size {config.tensor_parallel_size}",
            hint="a draft model serves one GPU; use --speculate suffix",
        )
    opened = open_model(config.speculate)
    check_same_tokens(target, opened)
    context = min(opened.spec.context, target.spec.context)
    if isinstance(config.max_model_len, int):
        context = min(context, config.max_model_len)
    runnable = opened.load(config.device, config.dtype)
    paged = context + CPU_PAGED_TOKENS if runnable.device == "cpu" else PAGED_TOKENS
    own = msgspec.structs.replace(
        config,
        model=config.speculate,
        speculate="off",
        draft_tokens="auto",
        quantization=None,
        weights="auto",
        max_model_len=context,
        block_size=PAGE,
        num_gpu_blocks_override=len(cache_groups(opened.spec)) * max(paged, context + PAGE) // PAGE,
        enable_prefix_caching=True,
        load_in_advance=False,
        step_ms=0.0,
        kv_cache_dtype="auto",
        head="auto",
        **NOT_SERVING,
    )
    engine = start_with(opened, runnable, own, sole=True).engine
    engine.overlap = False
    return ModelDrafter(engine, target.spec.vocab)


def check_same_tokens(target: "OpenModel", draft: "OpenModel") -> None:
    """Refuse a draft model that means other texts by the same numbers; the first difference is named."""
    large, small = target.tokenizer, draft.tokenizer
    if large is None or small is None:
        if target.spec.vocab != draft.spec.vocab:
            raise _other_tokens(
                target, draft, f"{draft.spec.vocab} tokens against {target.spec.vocab}"
            )
        return
    texts = [
        {number: text for text, number in tokenizer.backend.get_vocab().items()}
        for tokenizer in (large, small)
    ]
    for number in range(min(target.spec.vocab, draft.spec.vocab)):
        ours, theirs = (own.get(number) for own in texts)
        if ours != theirs:
            raise _other_tokens(target, draft, f"token {number} is {theirs!r}, not {ours!r}")


def _other_tokens(target: "OpenModel", draft: "OpenModel", difference: str) -> ConfigError:
    return ConfigError(
        f"{draft.name} cannot draft for {target.name}: {difference}",
        hint="a draft model needs the same tokenizer, as the small models of a family have",
    )
