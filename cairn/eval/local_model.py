"""A model on this machine that answers evaluation requests: likelihoods by `Scorer`, texts by the engine.

Weights are loaded when the first request of a kind comes; a task that only generates never loads them twice. On a CPU
everything is computed in float32, whatever the file holds: in the forms of quantised weights that `cairn serve`
multiplies with by default, answers can depend on what else is in the batch. `weights` scores those forms, too.
"""

import functools
from collections.abc import Sequence

from cairn.core.errors import ConfigError, TokenizerError
from cairn.eval.requests import (
    GenerateUntil,
    Likelihood,
    LogLikelihood,
    ProgressCallback,
    Rolling,
    silent,
)
from cairn.eval.scorer import Scorer
from cairn.eval.token_windows import ScoredSpan, continuation_span, rolling_windows, strided_windows
from cairn.models.checkpoint import default_device
from cairn.models.runnable import open_model
from cairn.models.tokenizer import Tokenizer
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.llm import LLM

GPU_BATCH_TOKENS = 16_384


class LocalModel:
    def __init__(
        self,
        name: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "auto",
        batch_tokens: int = 0,
        batch_invariant: bool = False,
        max_length: int = 0,
    ) -> None:
        """`max_length`: tokens that the model may see at once; 0: its context. `weights`: of the engine on a CPU."""
        self.name = name
        self.device = default_device() if device == "auto" else device
        self._dtype = "float32" if dtype == "auto" and self.device == "cpu" else dtype
        self._weights = "float" if weights == "auto" and self.device == "cpu" else weights
        self._batch_tokens = batch_tokens or (0 if self.device == "cpu" else GPU_BATCH_TOKENS)
        self._batch_invariant = batch_invariant
        self._opened = open_model(name)
        self.context = min(max_length or self._opened.spec.context, self._opened.spec.context)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._opened.tokenizer is None:
            raise TokenizerError(
                f"{self.name} has no tokenizer, so texts cannot be scored",
                hint="use a checkpoint folder with tokenizer.json, or a GGUF file",
            )
        return self._opened.tokenizer

    @functools.cached_property
    def prefix_token(self) -> int:
        """Token in front of a text without context: begin of text, or end of text."""
        special = self.tokenizer.special
        ids = [
            id for id in (special.bos_id, *special.eos_ids, *self._opened.eos_ids) if id is not None
        ]
        if not ids:
            raise TokenizerError(
                f"{self.name} has neither a begin nor an end token to put before a text",
                hint="score texts with --stride, which needs no such token",
            )
        return ids[0]

    @functools.cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self._opened.load(self.device, self._dtype).model, self._batch_tokens)

    @functools.cached_property
    def _engine(self) -> LLM:
        return LLM(
            self.name,
            opened=self._opened,
            device=self.device,
            dtype=self._dtype,
            weights=self._weights,
            batch_invariant=self._batch_invariant,
            max_model_len=self.context,
        )

    def loglikelihood(
        self, requests: Sequence[LogLikelihood], advance: ProgressCallback = silent
    ) -> list[Likelihood]:
        encode = self.tokenizer.encode
        plain = functools.partial(encode, special=False)
        spans = [
            continuation_span(context, continuation, encode, plain, self.prefix_token, self.context)
            for context, continuation in requests
        ]
        return self._scorer.score(spans, advance)

    def rolling(
        self, requests: Sequence[Rolling], advance: ProgressCallback = silent
    ) -> list[list[Likelihood]]:
        spans = [self._windows(request) for request in requests]
        flat = [span for each in spans for span in each]
        # A text is done bit by bit: each window counts as its share of all texts.
        part = len(requests) / max(len(flat), 1)

        def of_windows(count: float = 1) -> None:
            advance(count * part)

        found = iter(self._scorer.score(flat, of_windows))
        return [[next(found) for _ in each] for each in spans]

    def _windows(self, request: Rolling) -> list[ScoredSpan]:
        window = request.window or self.context
        if window > self.context or request.stride > window:
            raise ConfigError(
                f"window {window} with stride {request.stride} for a context of {self.context} tokens",
                hint="the window fits into the context, and the stride into the window",
            )
        tokens = self.tokenizer.encode(request.text)
        if request.stride:
            return strided_windows(tokens, window, request.stride)
        return rolling_windows(tokens, self.prefix_token, window)

    def generate_until(
        self, requests: Sequence[GenerateUntil], advance: ProgressCallback = silent
    ) -> list[str]:
        prompts = [self._prompt(request) for request in requests]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                stop=[stop for stop in request.until if stop],
            )
            for request in requests
        ]
        outputs = self._engine.generate(prompts, params, use_tqdm=True)
        advance(len(requests))
        return [output.outputs[0].text for output in outputs]

    def _prompt(self, request: GenerateUntil) -> list[int]:
        """The ids of the context, cut at the left so that the answer has room."""
        if request.chat:
            ids = self.tokenizer.encode_chat([{"role": "user", "content": request.context}])
        else:
            ids = self.tokenizer.encode(request.context)
        room = self.context - request.max_tokens
        if room < 1:
            raise ConfigError(
                f"an answer of {request.max_tokens} tokens leaves no room in a context of {self.context}",
                hint=f"use --max-tokens {self.context // 2} or fewer",
            )
        return ids[-room:]

    def close(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.close()

    def __enter__(self) -> "LocalModel":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
