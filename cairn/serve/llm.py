"""The engine as a Python object: prompts in, answers out.

    from cairn import LLM, SamplingParams

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(max_tokens=32)):
            print(output.prompt, output.outputs[0].text)

        async for output in llm.stream("Tell me more"):
            print(output.outputs[0].new_text, end="")

Names and meanings are those that vLLM's users know. Everything is checked before anything runs, and a mistake in one
prompt runs none of them. May be called from several threads at once: one thread of its own drives the engine, or, for a
model that several GPUs share, a process for each.
"""

import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from cairn.core.errors import ConfigError, RequestError, TokenizerError, did_you_mean
from cairn.models.runnable import open_model
from cairn.models.tokenizer import Message, Tokenizer, ToolSchema
from cairn.serve.answer import Answer, CompletionOutput, RequestOutput, readable_prompt
from cairn.serve.config import INSTEAD, EngineConfig
from cairn.serve.engine.request import Request, check_request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start
from cairn.serve.engine_thread import EngineThread, Job
from cairn.serve.progress import answer_bar
from cairn.serve.prompts import (
    Prompt,
    PromptLike,
    of_each_answer,
    read_params,
    read_priorities,
    read_prompts,
)
from cairn.serve.stream import Stream, vector_of

if TYPE_CHECKING:
    from cairn.serve.engine_processes import EngineProcesses

REDRAW_S = 0.1
log = logging.getLogger("cairn")


class LLM:
    """A model that answers. Takes the fields of `EngineConfig` by name; `LLM.config` says what they are."""

    def __init__(self, model: str, **options: Any) -> None:
        self.config = read_config(model, options)
        self._engine: EngineThread | EngineProcesses
        if self.config.tensor_parallel_size == 1:
            started = start(self.config)
            self._engine = EngineThread(started.engine)
            self._opened, self._limits = started.opened, started.engine.scheduler.limits
            self.notes = started.notes  # what was chosen automatically, and why
        else:
            self._opened = open_model(self.config.model)
            self._engine = _processes(self.config)
            self._limits = self._engine.client.limits
            self.notes = self._engine.client.notes
        for note in self.notes:
            log.info(note)
        self._ids = itertools.count()
        # The engine does not know this object, so that dropping the last reference closes the engine.
        self._finalizer = weakref.finalize(self, self._engine.close)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._opened.tokenizer is None:
            raise TokenizerError(f"{self._opened.name} has no tokenizer", hint="use token ids")
        return self._opened.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answer all prompts; the outputs are in their order. One that fails says so, and the others go on.

        `priority`: one for all, or one for each; lower numbers run first.
        """
        read = read_prompts(prompts, self._opened.tokenizer, self._opened.name)
        params = read_params(sampling_params, len(read))
        return self._answer(read, params, use_tqdm, read_priorities(priority, len(read)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        several = list(messages) if _are_several(messages) else [messages]
        read = [
            self._read_chat(one, tools, add_generation_prompt, chat_template_kwargs)
            for one in several
        ]
        return self._answer(
            read, read_params(sampling_params, len(read)), use_tqdm, [0] * len(read)
        )

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Stream:
        """Iterate with `async for`: the answers as far as they have come, again and again until they are whole."""
        read = read_prompts(prompt, self._opened.tokenizer, self._opened.name)
        if len(read) != 1:
            raise RequestError(f"{len(read)} prompts for one stream", hint="make a stream for each")
        params = read_params(sampling_params, 1)[0]
        stream = Stream(self._blank(read[0], params), self._engine.abort)
        # The jobs know the stream by a weak reference: one that nobody holds any more ends its requests.
        known = weakref.WeakMethod(stream.on_news)

        def on_news(job: Job) -> None:
            if (tell := known()) is not None:
                tell(job)

        stream.jobs = self._jobs(read[0], params, priority, on_news)
        self._engine.submit(stream.jobs)
        return stream

    def close(self) -> None:
        """End everything that runs, and give the memory back once this object is gone."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- from prompts to jobs and back ---------------------------------------------------------

    def _read_chat(
        self,
        messages: object,
        tools: Sequence[ToolSchema] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> Prompt:
        checked = cast(
            Sequence[Message], messages
        )  # the template's checks say what is wrong with them
        variables = dict(template_kwargs or {})
        text = self.tokenizer.chat(checked, tools, add_generation_prompt, **variables)
        return Prompt(text, self.tokenizer.encode(text, special=False))

    def _blank(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        wanted = params.logprobs is not None
        outputs = [
            CompletionOutput(index=at, logprobs=[] if wanted else None) for at in range(params.n)
        ]
        return RequestOutput(
            request_id=str(next(self._ids)), prompt=prompt.text, prompt_token_ids=prompt.token_ids, outputs=outputs
        )  # fmt: skip

    def _jobs(
        self, prompt: Prompt, params: SamplingParams, priority: int, on_news: Any
    ) -> list[Job]:
        """One for each answer. Refuses what the engine can never serve."""
        if params.stop and self._opened.tokenizer is None:
            raise RequestError(
                f"stop is {params.stop}, and {self._opened.name} has no tokenizer to find it with",
                hint="use stop_token_ids",
            )
        jobs = []
        for index, own in enumerate(of_each_answer(params)):
            request = Request(
                next(self._ids),
                prompt.token_ids,
                own,
                priority=priority,
                salt=prompt.salt,
                eos_ids=self._opened.eos_ids,
            )
            if index == 0:
                check_request(request, self._limits)
            answer = Answer(index, own, self._opened.tokenizer, prompt.token_ids)
            room = self._limits.context - len(prompt.token_ids)
            most = room if own.max_tokens is None else own.max_tokens
            jobs.append(Job(request, answer, most, on_news))
        return jobs

    def _answer(
        self, prompts: list[Prompt], params: list[SamplingParams], show: bool, priorities: list[int]
    ) -> list[RequestOutput]:
        waiting = _Waiting()
        groups = []
        for at, (prompt, own, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                groups.append(self._jobs(prompt, own, priority, waiting.on_news))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompts[{at}]: {error.message}", hint=error.hint) from None
        jobs = [job for group in groups for job in group]
        self._wait_for(jobs, waiting, show)
        failed = [job.answer.whole for job in jobs if job.answer.whole.finish_reason == "error"]
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(jobs)} answers ended with an error; the first: {failed[0].error}",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
        return [self._output(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]

    def _wait_for(self, jobs: list[Job], waiting: "_Waiting", show: bool) -> None:
        if not jobs:
            return
        waiting.left = len(jobs)
        most = sum(job.most for job in jobs)
        self._engine.submit(jobs)
        try:
            with answer_bar(len(jobs), most, show) as draw:
                while not waiting.over.wait(REDRAW_S):
                    draw(len(jobs) - waiting.left, waiting.tokens, waiting.tokens + waiting.spared)
        except BaseException:  # Ctrl-C: nobody will read these answers, and the engine stays usable
            self._engine.abort([job.request.id for job in jobs])
            raise

    def _output(self, prompt: Prompt, group: list[Job]) -> RequestOutput:
        first = group[0]
        found = first.prompt_logprobs
        tokenizer = self._opened.tokenizer
        return RequestOutput(
            request_id=str(first.request.id),
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            prompt_logprobs=None if found is None else readable_prompt(prompt.token_ids, found, tokenizer),
            outputs=[job.answer.result() for job in group],
            num_cached_tokens=first.request.cached,
            embedding=vector_of(first.pooled),
        )  # fmt: skip


class _Waiting:
    """What a call of `generate` waits for. Written by the engine's thread alone."""

    def __init__(self) -> None:
        self.left = 0
        self.tokens = 0
        self.spared = 0  # tokens that will never come, because an answer ended before its most
        self.over = threading.Event()

    def on_news(self, job: Job) -> None:
        count = len(job.answer.whole.token_ids)
        self.tokens += count - job.told
        job.told = count
        if job.answer.finished:
            self.left -= 1
            self.spared += job.most - count
            if self.left == 0:
                self.over.set()


def _processes(config: EngineConfig) -> "EngineProcesses":
    from cairn.serve.engine_processes import EngineProcesses  # needs ZeroMQ, which one GPU does not

    return EngineProcesses(config)


def read_config(model: object, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine from keyword arguments; a name that does not exist is refused."""
    known = [field for field in EngineConfig.__struct_fields__ if field != "model"]
    for name in options:
        if name not in known:
            there = f"there are: {', '.join(known)}"
            hint = INSTEAD.get(name) or did_you_mean(name, known, otherwise=there)
            raise ConfigError(f"LLM has no argument '{name}'", hint=hint)
    if not isinstance(model, str | PathLike):
        raise ConfigError(f"model is {model!r}", hint="give a folder, a file or a name")
    try:
        return msgspec.convert({"model": str(model), **options}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an argument of LLM is wrong: {error}") from None


def _are_several(messages: object) -> bool:
    """A list of conversations, rather than one conversation."""
    return (
        isinstance(messages, list | tuple)
        and bool(messages)
        and isinstance(messages[0], list | tuple)
    )
