"""Policy weights shared by the trainer, which updates them, and an engine, which samples from them.

    Stage (trainer)  --the same modules-->  Transformer (engine)         no second copy, nothing is sent

After an update the engine goes on with the new weights, because it reads them where they lie. `updated` tells it, so
that no page of the weights before is found again. On a CPU the engine runs in its plain form: every other one keeps
copies of weights in another layout, which would be stale.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

from torch import nn

from cairn.core.errors import RequestError
from cairn.models.build import ModelBuild
from cairn.models.linear.maps import ColumnParallelLinear
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.tokenizer import Tokenizer
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.sizing import CPU_PAGE, GPU_PAGE
from cairn.serve.engine.start import start_with
from cairn.serve.engine.token_logprobs import TokenLogprobs
from cairn.train.parallel.model import ParallelModel
from cairn.train.parallel.stage import Stage
from cairn.train.state import TrainState

SPARE_PAGES = 8
LONGEST_STOP = 64  # tokens that a text to stop at may have


class Sampled(NamedTuple):
    tokens: list[int]
    logp: list[float]  # of each token, as the engine computed it
    version: int  # of the weights that sampled it
    stopped: bool  # it ended by itself
    top: list[list[tuple[int, float]]] = []  # noqa: RUF012 (replaced): of each token, the likeliest, if asked for
    # Of the prompt's tokens but the first, if asked for.
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached: int = 0  # tokens of the prompt that were not computed again
    own: list[bool] = []  # noqa: RUF012 (replaced): which tokens the model wrote; empty: all of them

    @property
    def written(self) -> int:
        """Number of tokens that the model generated."""
        return sum(self.own) if self.own else len(self.tokens)


class Policy:
    """The model that learns."""

    def __init__(
        self,
        state: TrainState,
        tokenizer: Tokenizer,
        rows: int,
        tokens: int,
        consistent: bool = False,
    ) -> None:
        """Room for `rows` answers at a time, each with its prompt of at most `tokens` tokens.

        `consistent`: what the engine computes for a token depends on nothing else in its batch.
        """
        assert isinstance(state.parallel, ParallelModel)
        self.model = engine_view(state.parallel.stages[0])
        self.tokenizer, self.eos_ids = tokenizer, tuple(sorted(tokenizer.eos_ids))
        on_gpu = state.device.type == "cuda"
        page = GPU_PAGE if on_gpu else CPU_PAGE
        config = EngineConfig(
            model="policy",
            device=str(state.device),
            max_num_seqs=rows,
            max_model_len=tokens + consistent,  # what is scored gets one token more
            num_gpu_blocks_override=rows * (-(-tokens // page) + 1) + SPARE_PAGES,
            plain=not on_gpu,
            batch_invariant=consistent,
        )
        opened = OpenModel("policy", state.spec, tokenizer, self.eos_ids, None)
        runnable = Runnable("policy", self.model, "the weights that are trained")
        self.engine = start_with(opened, runnable, config).engine
        self.version = 0  # the step whose weights the engine has
        self._asked = self._updates = 0

    def sample(
        self, prompts: Sequence[list[int]], most: int, seeds: Sequence[int] | None
    ) -> list[Sampled]:
        """An answer to each prompt, all in one continuous batch. `seeds`: None takes the most likely tokens."""
        requests = [
            (
                prompt,
                SamplingParams(
                    temperature=0.0 if seeds is None else 1.0,
                    seed=None if seeds is None else seeds[at],
                    max_tokens=most,
                    logprobs=0,
                ),
            )
            for at, prompt in enumerate(prompts)
        ]
        return self.generate(requests)

    def generate(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        stop: Sequence[Sequence[str]] = (),
    ) -> list[Sampled]:
        """An answer to each, in one continuous batch. `stop`: texts after which each one ends."""
        return self._run([self._request(prompt, params) for prompt, params in prompts], stop)

    def scores(self, texts: Sequence[list[int]], first: Sequence[int]) -> list[list[float]]:
        """Log-probabilities of each text's tokens from number `first` on, which is 1 or more."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        requests = [self._request(text, params, at) for text, at in zip(texts, first, strict=True)]
        return [
            [token.logprob for token in one.prompt_logprobs or ()]
            for one in self._run(requests, ())
        ]

    def _request(self, prompt: list[int], params: SamplingParams, scored_from: int = 0) -> Request:
        self._asked += 1
        return Request(self._asked, prompt, params, eos_ids=self.eos_ids, scored_from=scored_from)

    def _run(self, requests: Sequence[Request], stop: Sequence[Sequence[str]]) -> list[Sampled]:
        samples = {request: Sampled([], [], self.version, False, []) for request in requests}
        ends = {request: stop[at] if stop else () for at, request in enumerate(requests)}
        prompts: dict[Request, list[TokenLogprobs]] = {}
        try:
            for request in requests:
                self.engine.add(request)
            self._finish(samples, ends, prompts)
        except BaseException:
            for request in requests:
                self.engine.abort(request.id)
            raise
        for request in requests:
            if request.error is not None:
                raise RequestError(
                    f"a rollout has failed: {request.error}",
                    hint="make rollout.max_tokens or data.sequence smaller if memory is short",
                )
        return [
            one._replace(
                stopped=request.finish == "stop",
                cached=request.cached,
                prompt_logprobs=prompts.get(request),
            )
            for request, one in samples.items()
        ]

    def _finish(
        self,
        samples: dict[Request, Sampled],
        ends: dict[Request, Sequence[str]],
        prompts: dict[Request, list[TokenLogprobs]],
    ) -> None:
        """Steps until every request has its answer."""
        while self.engine.has_work:
            for output in self.engine.step():
                sampled = samples[output.request]
                if (prompt := self.engine.prompt_logprobs.pop(output.request, None)) is not None:
                    prompts[output.request] = prompt
                sampled.tokens.extend(output.tokens)
                sampled.logp.extend(one.logprob for one in output.logprobs or ())
                sampled.top.extend(one.top for one in output.logprobs or ())
                if ends[output.request] and not output.finished:
                    self._stop_at(output.request, sampled, ends[output.request])

    def _stop_at(self, request: Request, sampled: Sampled, texts: Sequence[str]) -> None:
        tail = self.tokenizer.decode(sampled.tokens[-LONGEST_STOP:])
        if any(text in tail for text in texts):
            self.engine.abort(request.id, "stop")

    def updated(self, version: int) -> None:
        """The trainer has changed the weights, where they lie.

        The engine names its pages by a count of calls: after a rewind a step's number comes again with other weights.
        """
        self.version = version
        self._updates += 1
        self.engine.weights_changed(self._updates)

    def close(self) -> None:
        """Nothing outside this process is held."""


def engine_view(stage: Stage) -> Transformer:
    """A model for an engine that is made of the trainer's own modules, adapters included."""
    columns = next(part for part in stage.modules() if isinstance(part, ColumnParallelLinear))
    weight = stage.vocabulary().weight
    build = ModelBuild(str(weight.device), weight.dtype, fused=columns.fused is not None)
    model = Transformer(stage.spec, build._replace(device="meta"))
    assert stage.embedding is not None
    assert stage.norm is not None
    model.build = build
    model.embedding, model.norm, model.head = stage.embedding, stage.norm, stage.head
    model.position_embedding = stage.position_embedding
    model.layers = nn.ModuleList(cast(nn.Module, layer) for layer in stage.layers.values())
    return model
