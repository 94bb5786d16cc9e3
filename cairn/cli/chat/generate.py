"""`cairn generate`: complete a prompt with a model, token by token, in the terminal.

Text goes to stdout as it is made; what happened goes to stderr, with the limit of this machine beside the speed.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
import tyro

from cairn.cli.chat.decode_speed import Speed, in_words, speed_of
from cairn.cli.chat.text_to_text import complete
from cairn.core.config import load
from cairn.core.errors import ConfigError, RequestError, UsageError
from cairn.core.events import span
from cairn.core.garbage_collection import held_collector
from cairn.core.prose import in_terminal
from cairn.core.units import format_duration
from cairn.models.hub import AUTO, check_name, default_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cairn.models.generate import GenerateSampling
    from cairn.models.runnable import OpenModel
    from cairn.models.tokenizer import Tokenizer
    from cairn.models.vision.picture import Picture
    from cairn.serve.llm import LLM


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Complete a prompt with a model.

    MODEL is a folder in Hugging Face's format, a .gguf file, owner/name on the hub, the name of a packaged model
    (smollm2-135m-instruct, cairn-tiny, cairn-tiny-vl), or random:SHAPE for a shape such as qwen3-0.6b with random
    weights. Without it, smollm2-135m-instruct is used where its package is installed, else cairn-tiny, which comes with
    Cairn.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = AUTO
    """a path or a name, see above"""
    prompt: str | None = None
    """the text to continue; - reads it from stdin"""
    token_ids: list[int] = []
    """the prompt as token ids, instead of text"""
    image: list[Path] = []
    """files with pictures, for a model that sees; the prompt is then a message of a user, as with --chat"""
    chat: bool = False
    """the prompt is a message of a user: apply the chat template of the model"""
    system: str | None = None
    """with --chat: the system message"""
    max_tokens: int | None = None
    """how many tokens at most; by default 256 or what the context leaves"""
    temperature: float = 0.0
    """0 always takes the most likely token"""
    top_p: float = 1.0
    """keep the most likely tokens whose probabilities add up to this"""
    top_k: int = 0
    """keep this many of the most likely tokens; 0 keeps all"""
    seed: int | None = None
    """the same seed gives the same text"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type to compute in; auto is what `cairn serve` would take"""
    weights: Literal["auto", "float", "int8", "int4", "packed"] = "auto"
    """on a CPU, how weights are multiplied with; auto: no fewer bits than the file has, as `cairn serve` does"""
    context: int | None = None
    """tokens that the model sees; more than it was trained for stretches its positions by YaRN"""
    chat_template: Path | None = None
    """with --chat: a file with the template to use instead of the model's"""
    speculate: str = "off"
    """guess several tokens and verify them in one step, with the same answer: ngram, suffix, MODEL, HEAD, auto, off"""
    draft_tokens: int | Literal["auto"] = "auto"
    """most guesses in a step; auto: as many as are expected to save time"""
    plain: bool = False
    """compute with the plain generator, which everything else is held against, instead of the engine"""
    config: Path | None = None
    """a TOML file with any of these settings"""
    json: bool = False
    """print one JSON document instead of streaming text"""


ENGINE_OPTIONS = ("device", "dtype", "weights", "context", "speculate", "draft_tokens")


class Seconds(msgspec.Struct, frozen=True):
    load: float
    prefill: float  # until the first token
    decode: float  # all later ones


class Result(msgspec.Struct, frozen=True):
    model: str
    text: str | None  # None: the model has no tokenizer
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    device: str
    dtype: str
    seconds: Seconds
    speed: Speed


def run(args: list[str]) -> int:
    options = load(Generate, args=args, env_prefix="CAIRN_GENERATE_", file_field="config").value
    _check(options)
    if options.model == AUTO:
        default = default_model()
        options = msgspec.structs.replace(options, model=default.name)
        print(default.why, file=sys.stderr)
    check_name(options.model)
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    with held_collector():
        from cairn.models.generate import GenerateSampling, budget
        from cairn.models.runnable import open_model
        from cairn.models.text_to_text.load import text_to_text_folder

    if (folder := text_to_text_folder(options.model)) is not None:
        return complete(options, folder)
    sampling = GenerateSampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    opened = open_model(options.model, options.context)
    if options.chat_template is not None:
        use_template(opened, options.chat_template)
    prompt, pictures = _read_prompt(options, opened)
    most = budget(opened.spec, prompt, options.max_tokens)  # refuse before the weights are loaded
    show = Shown(opened.tokenizer, prompt, options.json, pictures)
    generate = _with_generator if options.plain else _with_engine
    ran = generate(options, opened, msgspec.structs.replace(sampling, max_tokens=most), show)
    report(options, show, ran)
    return 0


class Ran(NamedTuple):
    """Details of the generation."""

    finish: str
    device: str
    dtype: str
    load_s: float
    read_bytes: float  # of weights, for one decoded token


class Shown:
    """The answer while it comes: tokens, their text as it is printed, and when the first one came."""

    def __init__(
        self,
        tokenizer: "Tokenizer | None",
        prompt: list[int],
        quiet: bool,
        pictures: "Sequence[Picture]" = (),
    ) -> None:
        self._decoder = tokenizer.stream(after=prompt) if tokenizer else None
        self.prompt, self._quiet, self.pictures = prompt, quiet, pictures
        self.tokens: list[int] = []
        self._pieces: list[str] = []
        self._began = self._first = 0.0
        self.seconds = (0.0, 0.0)  # until the first token, and after it

    @property
    def text(self) -> str | None:
        return "".join(self._pieces)[:-1] if self._decoder else None

    def begin(self) -> None:
        self._began = time.perf_counter()

    def push(self, token: int) -> None:
        self._first = self._first or time.perf_counter()
        self.tokens.append(token)
        self._print(self._decoder.push(token) if self._decoder else f"{token} ")

    def end(self) -> None:
        ended = time.perf_counter()
        self._print((self._decoder.flush() if self._decoder else "") + "\n")
        first = self._first or ended
        self.seconds = (first - self._began, ended - first)

    def _print(self, piece: str) -> None:
        self._pieces.append(piece)
        if not self._quiet:
            print(piece, end="", flush=True)


def report(options: Generate, show: Shown, ran: Ran) -> None:
    """Print the result: a JSON document on stdout, or a line on stderr."""
    result = Result(
        model=options.model,
        text=show.text,
        token_ids=show.tokens,
        prompt_tokens=len(show.prompt),
        completion_tokens=len(show.tokens),
        finish_reason=ran.finish,
        device=ran.device,
        dtype=ran.dtype,
        seconds=Seconds(ran.load_s, *show.seconds),
        speed=speed_of(len(show.tokens), show.seconds[1], ran.device, ran.read_bytes),
    )
    if options.json:
        print(msgspec.json.encode(result).decode())
    else:
        _say(_summary(result, ran.read_bytes))


def _say(text: str) -> None:
    print(in_terminal(text, stream=sys.stderr), file=sys.stderr)


def _with_generator(
    options: Generate, opened: "OpenModel", sampling: "GenerateSampling", show: Shown
) -> Ran:
    from cairn.models.generate import Generation

    began = time.perf_counter()
    with span("load", model=options.model):
        runnable = opened.load(options.device, options.dtype)
    load_s = time.perf_counter() - began
    _say(f"{runnable.summary()}, loaded in {format_duration(load_s)}")
    generation = Generation(runnable.model, show.prompt, sampling, opened.eos_ids)
    show.begin()
    for token in generation:
        show.push(token)
    show.end()
    read_bytes = runnable.bytes_per_token()
    finish = generation.finish or "length"
    return Ran(finish, runnable.device, runnable.dtype, load_s, read_bytes)


def _with_engine(
    options: Generate, opened: "OpenModel", sampling: "GenerateSampling", show: Shown
) -> Ran:
    """The engine that serves, with room for this one request."""
    with held_collector():
        from cairn.models.cache import cache_groups
        from cairn.serve.config import EngineConfig
        from cairn.serve.engine.sizing import CPU_PAGE, GPU_PAGE
        from cairn.serve.llm import LLM
        from cairn.serve.serving import runs_on_gpu

    began = time.perf_counter()
    engine = {name: getattr(options, name) for name in ENGINE_OPTIONS}
    page = GPU_PAGE if runs_on_gpu(EngineConfig(model=options.model, **engine)) else CPU_PAGE
    tokens = len(show.prompt) + (sampling.max_tokens or 0)
    # A page holds one cache group's layers, and layers with a window are groups of their own.
    groups = cache_groups(opened.spec)
    pages = len(groups) * (-(-tokens // page) + 1)
    with span("load", model=options.model):
        llm = LLM(
            options.model,
            opened=opened,
            max_num_seqs=1,
            num_gpu_blocks_override=pages,
            load_in_advance=False,  # one answer needs few graphs
            **engine,
        )
    load_s = time.perf_counter() - began
    with llm:
        _say(f"{llm.notes[0]}, loaded in {format_duration(load_s)}")
        finish = asyncio.run(_stream(llm, opened, sampling, show))
        facts = llm.serving.facts
    return Ran(finish, facts.device, facts.dtype, load_s, facts.read_bytes)


async def _stream(
    llm: "LLM", opened: "OpenModel", sampling: "GenerateSampling", show: Shown
) -> str:
    from cairn.serve.engine.sampling_params import SamplingParams
    from cairn.serve.prompts import Prompt
    from cairn.serve.serving import GenerateRequest
    from cairn.serve.stream import Stream

    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
    )
    show.begin()
    finish = "length"
    request = GenerateRequest(show.prompt, params, pictures=show.pictures)
    async with Stream(llm.serving, Prompt(None, show.prompt), request) as stream:
        async for output in stream:
            answer = output.outputs[0]
            finish = answer.finish_reason or "length"
            fresh = answer.token_ids[len(show.tokens) :]
            if finish == "stop" and fresh and fresh[-1] in opened.eos_ids:
                fresh = fresh[:-1]  # it ends the text, and is no part of it
            for token in fresh:
                show.push(token)
    show.end()
    return finish


def use_template(opened: "OpenModel", file: Path) -> None:
    """The template of a file in place of the model's own."""
    if opened.tokenizer is None:
        raise ConfigError(f"{opened.name} has no tokenizer, so it takes no chat template")
    from cairn.models.chat_template import read_template

    opened.tokenizer.use_template(read_template(file))


def _check(options: Generate) -> None:
    if (options.prompt is None) == (not options.token_ids):
        raise UsageError(
            "no prompt" if options.prompt is None else "both --prompt and --token-ids are given",
            hint='give --prompt "Once upon a time", --prompt - to read stdin, or --token-ids',
        )
    if options.chat and options.prompt is None:
        raise UsageError("--chat needs a text", hint="give the message with --prompt")
    if options.image and (options.plain or options.prompt is None):
        raise UsageError(
            "--image needs a text, and the engine",
            hint="give the question with --prompt, and leave out --plain",
        )
    is_chat = options.chat or bool(options.image)
    for name, value in (("--system", options.system), ("--chat-template", options.chat_template)):
        if value is not None and not is_chat:
            raise UsageError(f"{name} is given without --chat", hint="add --chat")
    if options.plain and options.speculate != "off":
        raise UsageError(
            f"--speculate {options.speculate} is given, and --plain computes token by token",
            hint="leave out one of them",
        )
    if options.plain and options.weights not in ("auto", "float"):
        raise UsageError(
            f"--weights {options.weights} is given, and --plain computes with the weights as they are",
            hint="leave out one of them",
        )


def _read_prompt(options: Generate, opened: "OpenModel") -> "tuple[list[int], list[Picture]]":
    """The prompt's tokens, and the pictures that some of them stand for."""
    if not options.image:
        return _prompt_ids(options, opened), []
    from cairn.models.vision.conversation import with_parts
    from cairn.serve.media.picture_input import picture_input_of

    picture_input, tokenizer = picture_input_of(opened), opened.tokenizer
    if picture_input is None or tokenizer is None:
        raise ConfigError(
            f"--image is given, and {options.model} reads text only",
            hint="use a model that sees, such as cairn-tiny-vl",
        )
    text = prompt_text(options)
    system = [{"role": "system", "content": options.system}] if options.system is not None else []
    parts = [{"type": "image", "image": _file(path)} for path in options.image]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    try:
        whole, pictures = picture_input.read(
            [*system, user], lambda split: tokenizer.chat(with_parts(split))
        )
    finally:
        picture_input.close()
    return tokenizer.encode(whole, special=False), pictures


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--image {path} cannot be read: {error.strerror}", hint="give the path of a picture"
        ) from None


def _prompt_ids(options: Generate, opened: "OpenModel") -> list[int]:
    if options.token_ids:
        return options.token_ids
    if opened.tokenizer is None:
        raise ConfigError(
            f"{options.model} has no tokenizer, so it cannot read --prompt",
            hint="give the prompt as numbers: --token-ids 1 2 3",
        )
    text = prompt_text(options)
    if not options.chat:
        return opened.tokenizer.encode(text)
    system = [{"role": "system", "content": options.system}] if options.system is not None else []
    return opened.tokenizer.encode_chat([*system, {"role": "user", "content": text}])


def prompt_text(options: Generate) -> str:
    return _stdin() if options.prompt == "-" else options.prompt or ""


def _stdin() -> str:
    if sys.stdin is None:  # closed by the parent process
        raise UsageError(
            "--prompt - is given, but stdin is closed", hint="send the prompt to stdin"
        )
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is no text: byte {error.object[error.start]:#04x} at position {error.start}",
            hint="send the prompt as UTF-8",
        ) from None


def _summary(result: Result, read_bytes: float) -> str:
    decoded = in_words(result.speed, read_bytes)
    return (
        f"{result.prompt_tokens} tokens in, {result.completion_tokens} out "
        f"({result.finish_reason}); first token after {format_duration(result.seconds.prefill)}"
        + (f", then {decoded}" if decoded else "")
    )
