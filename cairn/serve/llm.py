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

import logging
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Self, cast

import msgspec
import numpy as np

from cairn.core.errors import ConfigError, RequestError, did_you_mean
from cairn.models.encoder.pooling_rules import Pooling
from cairn.models.encoder.texts import TextIds, encode_texts
from cairn.models.runnable import OpenModel
from cairn.models.speech.sound_file import read_sound
from cairn.models.speech.transcribe import WindowOptions
from cairn.models.tokenizer import Message, Tokenizer, ToolSchema
from cairn.models.vision.conversation import refuse_images, with_parts
from cairn.serve.answer import RequestOutput, readable_prompt
from cairn.serve.config import INSTEAD, EngineConfig
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.job import Job
from cairn.serve.progress import answer_bar
from cairn.serve.prompts import Prompt, PromptLike, read_params, read_priorities, read_prompts
from cairn.serve.serving import GenerateRequest, open_serving
from cairn.serve.speech_thread import Speech, Transcript
from cairn.serve.stream import Stream, vector_of
from cairn.serve.text_vectors import Pair, matrix_of

REDRAW_S = 0.1
log = logging.getLogger("cairn")


class LLM:
    """A model that answers. Takes the fields of `EngineConfig` by name; `LLM.config` says what they are."""

    def __init__(self, model: str, *, opened: OpenModel | None = None, **options: Any) -> None:
        """`opened`: this model as `open_model` gives it, where it is open already."""
        self.config = read_config(model, options)
        self.serving = open_serving(self.config, opened=opened)
        self.notes = self.serving.notes  # what was chosen automatically, and why
        for note in self.notes:
            log.info(note)
        # The engine does not know this object, so that dropping the last reference closes the engine.
        self._finalizer = weakref.finalize(self, self.serving.close)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.serving.tokenizer

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the device back until `wake_up` or the next prompt; what was cached is lost.

        On a GPU (with enable_sleep_mode) weights wait in pinned host memory; on a CPU level 2 drops them, too.
        """
        self.serving.sleep(level)

    def wake_up(self) -> None:
        self.serving.wake()

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
        opened = self.serving.opened
        read = read_prompts(prompts, opened.tokenizer, opened.name)
        params = self._params(sampling_params, len(read))
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
        params = self._params(sampling_params, len(read))
        return self._answer(read, params, use_tqdm, [0] * len(read))

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Stream:
        """Iterate with `async for`: the answers as far as they have come, again and again until they are whole."""
        opened = self.serving.opened
        read = read_prompts(prompt, opened.tokenizer, opened.name)
        if len(read) != 1:
            raise RequestError(f"{len(read)} prompts for one stream", hint="make a stream for each")
        params = self._params(sampling_params, 1)[0]
        request = GenerateRequest(read[0].token_ids, params, priority, read[0].salt)
        return Stream(self.serving, read[0], request)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        return read_params(params, count, self.serving.sampling)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        use_tqdm: bool = False,
    ) -> list[list[float]]:
        """A vector for each text, pooled and normalised as the files beside the model say.

        `prompt_name`: of the model's own prompts, such as "query". `truncate`: cut texts that are too long.
        """
        vectors = self.serving.vectors
        prompt, most = vectors.rules.prompt(prompt_name), self._most_tokens(truncate)
        each = [texts] if isinstance(texts, str) else list(texts)
        read = encode_texts(vectors.tokenizer, [prompt + text for text in each], most)
        pooled_BD = self._pool(read, vectors.rules.pooling, use_tqdm)
        return vectors.embeddings(pooled_BD, dimensions, normalize).tolist()

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        use_tqdm: bool = False,
    ) -> list[float]:
        """Similarity scores of text pairs; a single `text_1` is paired with every `text_2`."""
        second = [text_2] if isinstance(text_2, str) else list(text_2)
        first = [text_1] * len(second) if isinstance(text_1, str) else list(text_1)
        if len(first) != len(second):
            raise RequestError(
                f"{len(first)} and {len(second)} texts",
                hint="give one text_1 for all, or equally many",
            )
        pairs = [Pair(one, two) for one, two in zip(first, second, strict=True)]
        most = self._most_tokens(truncate)
        inputs = self.serving.vectors.score_inputs(pairs, most, instruction)
        return inputs.scores(self._pool(inputs.texts, inputs.pooling, use_tqdm))

    def rank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[tuple[int, float]]:
        """Indices of documents with their scores, best first; takes the options of `score`."""
        scores = self.score(query, documents, **options)
        order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
        return [(at, scores[at]) for at in order[:top_n]]

    def classify(
        self, texts: str | Sequence[str], *, truncate: bool = False, use_tqdm: bool = False
    ) -> list[dict[str, float]]:
        """The probability of each label of each text."""
        vectors = self.serving.vectors
        each = [texts] if isinstance(texts, str) else list(texts)
        if (classifier := vectors.classifier) is None:
            raise RequestError(f"{self.serving.name} has no head that classifies texts")
        read = encode_texts(vectors.tokenizer, each, self._most_tokens(truncate))
        probs_BL = vectors.probabilities(self._pool(read, classifier.pooling, use_tqdm))
        return [dict(zip(classifier.labels, row, strict=True)) for row in probs_BL.tolist()]

    def transcribe(
        self,
        sound: bytes | np.ndarray,
        *,
        language: str | None = None,
        task: Literal["transcribe", "translate"] = "transcribe",
        temperature: float | None = None,
    ) -> Transcript:
        """Transcribe an audio file or samples at 16 kHz, with speech models.

        `temperature`: None is 0, and higher ones for a window whose text looks wrong.
        """
        samples = read_sound(sound) if isinstance(sound, bytes) else sound.astype(np.float32)
        params = SamplingParams(max_tokens=1, temperature=0, pooling="last")
        speech = Speech(samples, WindowOptions(task, language, temperature=temperature))
        countdown = _Countdown()
        request = GenerateRequest([0], params, media=speech)
        jobs = self.serving.jobs([request], countdown.on_update, streamed=False)
        self._wait_for(jobs, countdown, show=False)
        result = jobs[0].result
        if not isinstance(result, Transcript):
            raise RequestError(f"nothing was transcribed: {jobs[0].answer.whole.error}")
        return result

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

        def render(several: Sequence[Message]) -> str:
            return self.tokenizer.chat(several, tools, add_generation_prompt, **variables)

        picture_input, pictures = self.serving.picture_input, []
        if picture_input is not None:
            text, pictures = picture_input.read(checked, lambda split: render(with_parts(split)))
        else:
            refuse_images(messages, self.serving.name)
            text = render(checked)
        return Prompt(text, self.tokenizer.encode(text, special=False), pictures=pictures)

    def _most_tokens(self, truncate: bool) -> int | None:
        return self.serving.limits.longest_text if truncate else None

    def _pool(self, texts: Sequence[TextIds], pooling: Pooling, show: bool) -> np.ndarray:
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, pooling=pooling)
        requests = [GenerateRequest(text.ids, params, segment=text.segment) for text in texts]
        if not requests:
            return np.zeros((0, self.serving.opened.spec.hidden), np.float32)
        countdown = _Countdown()
        jobs = self.serving.jobs(requests, countdown.on_update, streamed=False)
        self._wait_for(jobs, countdown, show)
        vectors = [job.pooled for job in jobs if job.pooled is not None]
        if len(vectors) < len(jobs):
            failed = next(job.answer.whole for job in jobs if job.pooled is None)
            raise RequestError(f"a text was not computed: {failed.error or failed.finish_reason}")
        return matrix_of(vectors)

    def _answer(
        self, prompts: list[Prompt], params: list[SamplingParams], show: bool, priorities: list[int]
    ) -> list[RequestOutput]:
        requests = [
            GenerateRequest(prompt.token_ids, own, priority, prompt.salt, pictures=prompt.pictures)
            for prompt, own, priority in zip(prompts, params, priorities, strict=True)
        ]
        countdown = _Countdown()
        jobs = self.serving.jobs(requests, countdown.on_update, streamed=False)
        self._wait_for(jobs, countdown, show)
        failed = [job.answer.whole for job in jobs if job.answer.whole.finish_reason == "error"]
        if failed:
            message = f"{len(failed)} of {len(jobs)} answers ended with an error; the first: {failed[0].error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        rest = iter(jobs)
        return [
            self._output(prompt, [next(rest) for _ in range(own.n)])
            for prompt, own in zip(prompts, params, strict=True)
        ]

    def _wait_for(self, jobs: list[Job], countdown: "_Countdown", show: bool) -> None:
        if not jobs:
            return
        countdown.left = len(jobs)
        self.serving.submit(jobs)
        try:
            with answer_bar(len(jobs), sum(job.max_tokens for job in jobs), show) as draw:
                while not countdown.over.wait(REDRAW_S):
                    tokens, skipped = _progress_of(jobs)
                    draw(len(jobs) - countdown.left, tokens, tokens + skipped)
        except BaseException:  # Ctrl-C: these answers will not be read, and the engine stays usable
            self.serving.abort(jobs)
            raise

    def _output(self, prompt: Prompt, group: list[Job]) -> RequestOutput:
        first, scores, logprobs = group[0], group[0].prompt_logprobs, None
        if scores is not None:
            tokenizer = self.serving.opened.tokenizer
            logprobs = readable_prompt(prompt.token_ids, scores, tokenizer)
        outputs = [job.answer.result() for job in group]
        for index, output in enumerate(outputs):
            output.index = index  # among the answers to this prompt
        return RequestOutput(
            request_id=str(first.request.id),
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            prompt_logprobs=logprobs,
            outputs=outputs,
            num_cached_tokens=first.request.cached,
            embedding=vector_of(first.pooled),
        )


class _Countdown:
    """Number of answers that `generate` still waits for. If the engine dies, two threads count."""

    def __init__(self) -> None:
        self.left = 0
        self.over = threading.Event()
        self._lock = threading.Lock()

    def on_update(self, job: Job) -> None:
        if not job.answer.finished:
            return
        with self._lock:
            self.left -= 1
        if self.left == 0:
            self.over.set()


def _progress_of(jobs: Sequence[Job]) -> tuple[int, int]:
    """Tokens that have come, and tokens that never will, because an answer ended before its limit."""
    tokens = skipped = 0
    for job in jobs:
        count = len(job.answer.whole.token_ids)
        tokens += count
        skipped += job.max_tokens - count if job.answer.finished else 0
    return tokens, skipped


def read_config(model: object, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine from keyword arguments; a name that does not exist is refused."""
    fields = [field for field in EngineConfig.__struct_fields__ if field != "model"]
    for name in options:
        if name not in fields:
            there = f"there are: {', '.join(fields)}"
            hint = INSTEAD.get(name) or did_you_mean(name, fields, otherwise=there)
            raise ConfigError(f"LLM has no argument '{name}'", hint=hint)
    if not isinstance(model, str | PathLike):
        raise ConfigError(f"model is {model!r}", hint="give a folder, a file or a name")
    try:
        settings = {"model": str(model), "load_in_advance": True, **options}
        return msgspec.convert(settings, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an argument of LLM is wrong: {error}") from None


def _are_several(messages: object) -> bool:
    """A list of conversations, rather than one conversation."""
    return (
        isinstance(messages, list | tuple)
        and bool(messages)
        and isinstance(messages[0], list | tuple)
    )
