"""A model that takes requests: the one object under `LLM` and the HTTP server.

    GenerateRequest --check size, make jobs--> Job, one for each answer --submit--> engine --on_update--> reader

It knows the names that the model is served under, its tokenizer, its limits and its grammars; the engine runs in a
thread of this process or in processes of its own. A thread costs nothing to reach and suits a CPU, where torch releases
the interpreter for most of a step. GPUs get processes, so that sockets and text never delay the device.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cairn.core.errors import ConfigError, RequestError, TokenizerError
from cairn.models.checkpoint import default_device
from cairn.models.encoder.open import open_encoder
from cairn.models.hub import resolve
from cairn.models.runnable import RANDOM, OpenModel, open_model
from cairn.models.speech.load import is_whisper
from cairn.models.tokenizer import Tokenizer
from cairn.models.vision.picture import Picture
from cairn.serve.answer import Answer
from cairn.serve.config import EngineConfig, RoleConfig
from cairn.serve.engine.constraint import follow
from cairn.serve.engine.facts import facts_of
from cairn.serve.engine.messages import Facts
from cairn.serve.engine.pieces import Piece
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.request_checks import check_outputs, check_request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start
from cairn.serve.engine_host import EngineHost
from cairn.serve.engine_thread import EngineThread
from cairn.serve.grammar import Grammar, Grammars, grammars_for
from cairn.serve.job import Job
from cairn.serve.media.picture_input import picture_input_of
from cairn.serve.prompts import params_of_answers
from cairn.serve.request_defaults import checked_defaults, is_gguf, said
from cairn.serve.structured_output import read_guide
from cairn.serve.text_vectors import TextVectors

if TYPE_CHECKING:
    from cairn.serve.engine.process import WorkerGroup

log = logging.getLogger("cairn")
CLOSED = "the engine is closed"
DECODER_POOLINGS = (None, "mean", "last")


class ServedModel(NamedTuple):
    """A name that requests may use."""

    name: str
    identity: bytes = b""  # of an adapter and its version; empty: the model itself
    adapter: int = 0  # its number in the engine
    parent: str | None = None  # of an adapter: the model that it adapts
    root: str = ""  # and where it was loaded from


class ModelNotServed(RequestError):
    """No model of this name is served."""


class GenerateRequest(NamedTuple):
    """A prompt, and how its `params.n` answers are made."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    grammar: Grammar | None = None
    served: ServedModel = ServedModel("")  # its pages are found by no other
    outputs: Sequence[int] = ()  # the beginning of its one answer, made elsewhere
    segment: int = 0  # where the second text of a pair begins; 0: there is one text
    media: object = None  # audio, for a speech model
    pictures: Sequence[Picture] = ()  # for a model that sees
    reader: str = ""  # as `Ask.reader`: a decode server that goes on with it


class Serving:
    """A model that runs, under one name or several. May be used from any thread."""

    def __init__(
        self,
        opened: OpenModel,
        limits: Limits,
        engine: EngineHost,
        notes: Sequence[str] = (),
        facts: Facts = Facts(),  # noqa: B008 (immutable)
        names: Sequence[str] = (),
        generation_config: str = "auto",
    ) -> None:
        self.opened, self.engine, self.notes, self.facts = opened, engine, list(notes), facts
        # Replaced as a whole when it changes: other threads go through it meanwhile.
        self.models = {name: ServedModel(name) for name in names or [opened.name]}
        # A request that outgrew the whole cache would fail half way, so it is refused before it starts.
        context = min(limits.context, limits.capacity)
        self.limits = msgspec.structs.replace(limits, context=context)
        self.sampling = checked_defaults(opened, generation_config)  # of requests that do not say
        if self.sampling:
            self.notes.append(said(opened, self.sampling))
        self._grammars = grammars_for(opened, limits.vocabulary)
        self._ids = itertools.count()
        self._adapters = itertools.count(1)
        self.had_adapters = False
        self.assumed_template = False  # the model has none of its own
        self._loading = threading.Lock()
        self.asleep = False  # the engine has given its memory back
        self._sleeping = threading.RLock()  # nothing is submitted while it falls asleep
        self._reported: str | None = None
        self.picture_input = picture_input_of(
            opened
        )  # how it takes pictures; None: it reads text alone

    # -- what is served --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.opened.name

    @cached_property
    def vectors(self) -> TextVectors:
        """Conversion of pooled states to embeddings and scores."""
        return TextVectors(self.opened)

    def model(self, name: str | None) -> ServedModel:
        """The model of this name; None is the first one."""
        if name is None:
            return next(iter(self.models.values()))
        served = self.models.get(name)
        if served is None:
            names = ", ".join(self.models)
            raise ModelNotServed(f"there is no model {name[:200]!r}; this server has: {names}")
        return served

    def load_adapter(self, name: str, folder: str, replace: bool = False) -> ServedModel:
        """Serve an adapter under a name of its own, beside the model. Returns when requests may use it.

        `replace`: of the same name; requests that run keep the one that they began with.
        """
        with self._loading:
            before = self.models.get(name)
            if not name or (before is not None and not (replace and before.adapter)):
                raise ConfigError(
                    f"{name!r} is served already" if name else "the name of an adapter is empty",
                    hint="choose another name",
                )
            number = next(self._adapters)
            self.engine.load_adapter(number, folder)
            self.had_adapters = True
            identity, parent = b"adapter %d;" % number, next(iter(self.models))
            model = ServedModel(name, identity, number, parent, folder)
            self.models = {**self.models, name: model}
            if before is not None:
                self.engine.unload_adapter(before.adapter)
            return model

    def unload_adapter(self, name: str) -> None:
        """Requests that have it finish; the name is gone at once."""
        with self._loading:
            model = self.models.get(name)
            if model is None or not model.adapter:
                raise ModelNotServed(f"there is no adapter {name[:200]!r}")
            self.models = {other: one for other, one in self.models.items() if other != name}
            self.engine.unload_adapter(model.adapter)

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.opened)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.opened.tokenizer is None:
            raise self._no_tokenizer()
        return self.opened.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self.opened.tokenizer is not None

    @property
    def grammars(self) -> Grammars:
        if self._grammars is None:
            raise self._no_tokenizer()
        return self._grammars

    def _no_tokenizer(self) -> TokenizerError:
        return TokenizerError(f"{self.name} has no tokenizer", hint="it reads and writes token ids")

    # -- requests --------------------------------------------------------------------------------

    def jobs(
        self,
        requests: Sequence[GenerateRequest],
        on_update: Callable[[Job], None],
        *,
        streamed: bool,
    ) -> list[Job]:
        """Create a job for each answer, after rejecting requests that the engine can never serve."""
        for at, request in enumerate(requests):
            try:
                self._check(request)
            except RequestError as error:
                if len(requests) == 1:
                    raise
                raise RequestError(f"prompts[{at}]: {error.message}", hint=error.hint) from None
        jobs: list[Job] = []
        for request in requests:
            jobs += self._jobs_of(request, len(jobs), on_update, streamed)
        return jobs

    def encode(self, jobs: Sequence[Job]) -> None:
        """Do the part of `submit` that takes long with pictures, which a server does outside of its event loop."""
        self.engine.encode(jobs)

    def submit(self, jobs: Sequence[Job]) -> None:
        """An engine that sleeps is woken first."""
        self.encode(jobs)
        with self._sleeping:
            if self.asleep:
                self.wake()
            self.engine.submit(jobs)

    def abort(self, jobs: Sequence[Job]) -> None:
        """Abort the jobs that have not finished."""
        open_ids = [job.request.id for job in jobs if not job.answer.finished]
        if open_ids:
            self.engine.abort(open_ids)

    def _check(self, request: GenerateRequest) -> None:
        prompt, params = request.prompt, request.params
        if self.limits.answers == "text" and params.pooling not in DECODER_POOLINGS:
            raise RequestError(
                f"pooling is {params.pooling}, and a model that generates has mean and last"
            )
        if params.stop and not self.has_tokenizer:
            raise RequestError(
                f"stop is {params.stop}, and {self.name} has no tokenizer to find it with",
                hint="use stop_token_ids",
            )
        pieces = self._pieces(request)
        placed = Request(
            0, prompt, params, priority=request.priority, salt=request.salt, pieces=pieces
        )
        check_request(placed, self.limits)
        most = params.max_tokens or self.limits.context - len(prompt)
        check_outputs(request.outputs, most, self.limits.vocabulary)

    def _pieces(self, request: GenerateRequest) -> list[Piece]:
        if not request.pictures or self.picture_input is None:
            return []
        return self.picture_input.pieces(request.prompt, request.pictures)

    def _jobs_of(
        self,
        request: GenerateRequest,
        first_index: int,
        on_update: Callable[[Job], None],
        streamed: bool,
    ) -> list[Job]:
        prompt, grammar = request.prompt, request.grammar or self._grammar_of(request.params)
        max_tokens = request.params.max_tokens or self.limits.context - len(prompt)
        params = msgspec.structs.replace(
            request.params, max_tokens=max_tokens, structured_outputs=None
        )
        jobs, pieces = [], self._pieces(request)
        for index, own in enumerate(params_of_answers(params), start=first_index):
            of_sample = Request(
                next(self._ids),
                prompt,
                own,
                priority=request.priority,
                salt=request.salt,
                identity=request.served.identity,
                adapter=request.served.adapter,
                segment=request.segment,
                media=request.media,
                pieces=pieces,
                pictures=request.pictures,
                eos_ids=self.opened.eos_ids,
                constraint=None if grammar is None else grammar.start(),
                outputs=request.outputs,
                reader=request.reader,
            )
            answer = Answer(index, own, self.opened.tokenizer, prompt)
            follow(of_sample.constraint, of_sample.outputs)
            answer.begin(of_sample.outputs)
            guide = None if grammar is None else grammar.guide
            jobs.append(
                Job(of_sample, answer, max_tokens, on_update, streamed=streamed, guide=guide)
            )
        return jobs

    def _grammar_of(self, params: SamplingParams) -> Grammar | None:
        guide = read_guide(structured_outputs=params.structured_outputs)
        return None if guide is None else self.grammars.compile(guide)

    # -- life ------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake` or the next request; refused while requests are under way.

        At level 2, on a CPU, the weights are dropped as well, and read again when it wakes.
        """
        with self._sleeping:
            self.engine.sleep(level)
            self.asleep = True

    def wake(self) -> None:
        with self._sleeping:
            self.engine.wake()
            self.asleep = False

    def dead(self) -> str | None:
        """Why the engine takes no requests any more. The reason goes to the log, once."""
        reason = self.engine.dead()
        if reason is not None and reason != self._reported and reason != CLOSED:
            log.error("the engine takes no requests any more: %s", reason)
        self._reported = reason
        return reason

    def close(self) -> None:
        """End everything that runs. May be called again."""
        if self._grammars is not None:
            self._grammars.close()
        if self.picture_input is not None:
            self.picture_input.close()
        self.engine.close()


def open_serving(
    config: EngineConfig,
    names: Sequence[str] = (),
    in_processes: bool | None = None,
    role: RoleConfig | None = None,
    early: "WorkerGroup | None" = None,
    opened: OpenModel | None = None,
    hang_timeout: float | None = None,
) -> Serving:
    """Load the model and start the engine; raises what keeps it from starting.

    `in_processes`: None gives the engine processes of its own where several GPUs share the model. `role`: one half of a
    prefill and decode pair. `early`: processes of this configuration, where they have been started already. `opened`:
    the model as `open_model` gives it, where it is open already: a tokenizer takes seconds to build. `hang_timeout`:
    seconds without a step after which processes are taken to hang; an engine in a thread is watched by its server.
    """
    if (other := _open_other(config, names)) is not None:
        return other
    if in_processes is None:
        in_processes = config.tensor_parallel_size > 1
    opened = opened or open_model(config.model, config.context)
    if role is not None and opened.vision is not None:
        raise ConfigError(
            f"role is {role.role}, and {config.model} sees pictures",
            hint="serve it with a server that does both",
        )
    if not in_processes:
        started = start(config, opened=opened)
        limits, facts = started.engine.scheduler.limits, facts_of(started.engine)
        engine = started.engine
        if role is not None:
            from cairn.serve.separation.roles import with_role

            engine = with_role(engine, role)
        host = EngineThread(engine)
        notes, defaults = started.notes, config.generation_config
        return Serving(opened, limits, host, notes, facts, names, defaults)
    from cairn.serve.engine.client import ProcessOptions  # needs ZeroMQ
    from cairn.serve.engine_processes import EngineProcesses

    options = ProcessOptions() if hang_timeout is None else ProcessOptions(watchdog_s=hang_timeout)
    processes = EngineProcesses(config, role=role, early=early, options=options)
    client = processes.client
    limits, notes, defaults = client.limits, client.notes, config.generation_config
    return Serving(opened, limits, processes, notes, client.facts, names, defaults)


def _open_other(config: EngineConfig, names: Sequence[str]) -> Serving | None:
    """A model that does not generate: a text encoder, or a speech model. They build on this file."""
    if config.model.startswith(RANDOM):
        return None
    try:
        encoder = open_encoder(config.model)
    except PermissionError:
        return None  # opening it next says what is forbidden
    if encoder is not None:
        from cairn.serve.encoder_serving import open_encoder_serving

        return open_encoder_serving(encoder, config, names)
    if is_whisper(folder := resolve(config.model)):
        from cairn.serve.speech_serving import open_speech_serving

        return open_speech_serving(config.model, folder, config, names)
    return None


def runs_on_gpu(config: EngineConfig) -> bool:
    device = default_device() if config.device == "auto" else config.device
    return device.startswith("cuda")
