"""`cairn generate`: complete a prompt with a model, token by token, in the terminal.

Text goes to stdout as it is made; what happened goes to stderr, with the limit of this machine beside the speed.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import ConfigError, HardwareError, RequestError, UsageError
from cairn.core.events import span
from cairn.core.units import format_bytes, format_duration, format_rate
from cairn.models.hub import AUTO, default_model

if TYPE_CHECKING:
    from cairn.models.generate import Generation
    from cairn.models.runnable import OpenModel, Runnable
    from cairn.models.tokenizer import Tokenizer


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Complete a prompt with a model.

    MODEL is a folder in Hugging Face's format, a .gguf file, owner/name on the hub, the name of a packaged model
    (smollm2-135m-instruct, cairn-tiny), or random:SHAPE for a shape such as qwen3-0.6b with random weights. Without it,
    smollm2-135m-instruct is used where its package is installed, else cairn-tiny, which comes with Cairn.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = AUTO
    """a path or a name, see above"""
    prompt: str | None = None
    """the text to continue; - reads it from stdin"""
    token_ids: list[int] = []
    """the prompt as token ids, instead of text"""
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
    """type to compute in; auto keeps the type of the checkpoint"""
    config: Path | None = None
    """a TOML file with any of these settings"""
    json: bool = False
    """print one JSON document instead of streaming text"""


class Seconds(msgspec.Struct, frozen=True):
    load: float
    prefill: float  # until the first token
    decode: float  # all later ones


class Speed(msgspec.Struct, frozen=True):
    decode_tokens_per_s: float | None  # None: there was no second token
    limit_tokens_per_s: float | None  # every weight read once per token; None: not calibrated
    share: float | None


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
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    from cairn.models.generate import Generation, Sampling, budget
    from cairn.models.runnable import open_model

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    began = time.perf_counter()
    with span("load", model=options.model):
        opened = open_model(options.model)
        prompt = _prompt_ids(options, opened)
        budget(opened.spec, prompt, options.max_tokens)  # refuse before the weights are loaded
        runnable = opened.load(options.device, options.dtype)
    load_s = time.perf_counter() - began
    print(f"{runnable.summary()}, loaded in {format_duration(load_s)}", file=sys.stderr)
    generation = Generation(runnable.model, prompt, sampling, opened.eos_ids)
    tokens, text, seconds = _generate(generation, opened.tokenizer, options.json)
    result = Result(
        model=options.model,
        text=text,
        token_ids=tokens,
        prompt_tokens=len(prompt),
        completion_tokens=len(tokens),
        finish_reason=generation.finish or "length",
        device=runnable.device,
        dtype=runnable.dtype,
        seconds=Seconds(load_s, *seconds),
        speed=_speed(runnable, len(tokens), seconds[1]),
    )
    if options.json:
        print(msgspec.json.encode(result).decode())
    else:
        print(_summary(result, runnable), file=sys.stderr)
    return 0


def _check(options: Generate) -> None:
    if (options.prompt is None) == (not options.token_ids):
        raise UsageError(
            "no prompt" if options.prompt is None else "both --prompt and --token-ids are given",
            hint='give --prompt "Once upon a time", --prompt - to read stdin, or --token-ids',
        )
    if options.chat and options.prompt is None:
        raise UsageError("--chat needs a text", hint="give the message with --prompt")
    if options.system is not None and not options.chat:
        raise UsageError("--system is given without --chat", hint="add --chat")


def _prompt_ids(options: Generate, opened: "OpenModel") -> list[int]:
    if options.token_ids:
        return options.token_ids
    if opened.tokenizer is None:
        raise ConfigError(
            f"{options.model} has no tokenizer, so it cannot read --prompt",
            hint="give the prompt as numbers: --token-ids 1 2 3",
        )
    text = _stdin() if options.prompt == "-" else options.prompt or ""
    if not options.chat:
        return opened.tokenizer.encode(text)
    system = [{"role": "system", "content": options.system}] if options.system is not None else []
    return opened.tokenizer.encode_chat([*system, {"role": "user", "content": text}])


def _stdin() -> str:
    if sys.stdin is None:  # closed by whoever started us
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


def _generate(
    generation: "Generation", tokenizer: "Tokenizer | None", quiet: bool
) -> tuple[list[int], str | None, tuple[float, float]]:
    """The new tokens, their text, and the seconds until the first token and after it."""
    decoder = tokenizer.stream(after=generation.prompt) if tokenizer else None
    tokens: list[int] = []
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not quiet:
            print(piece, end="", flush=True)

    began = time.perf_counter()
    first = None
    for token in generation:
        first = first or time.perf_counter()
        tokens.append(token)
        show(decoder.push(token) if decoder else f"{token} ")
    ended = time.perf_counter()
    show((decoder.flush() if decoder else "") + "\n")
    first = first or ended
    text = "".join(pieces)[:-1] if decoder else None
    return tokens, text, (first - began, ended - first)


def _speed(runnable: "Runnable", tokens: int, decode_s: float) -> Speed:
    measured = (tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else None
    limit = _limit(runnable)
    share = measured / limit if measured and limit else None
    return Speed(decode_tokens_per_s=measured, limit_tokens_per_s=limit, share=share)


def _limit(runnable: "Runnable") -> float | None:
    """Tokens/s if each token did nothing but read the weights it visits once."""
    from cairn.hw.ceilings import load as load_ceilings

    try:
        ceilings = load_ceilings()
    except HardwareError:
        return None
    if ceilings.copy is None or ceilings.device.split(":")[0] != runnable.device.split(":")[0]:
        return None
    return ceilings.copy.value / runnable.bytes_per_token()


def _summary(result: Result, runnable: "Runnable") -> str:
    speed = result.speed
    rate = f"{speed.decode_tokens_per_s:.1f} tokens/s" if speed.decode_tokens_per_s else "no decode"
    if speed.limit_tokens_per_s and speed.share:
        weights = format_bytes(runnable.bytes_per_token(), "decimal")
        bandwidth = format_rate(speed.limit_tokens_per_s * runnable.bytes_per_token(), "B")
        rate += (
            f", {speed.share:.0%} of the limit of {speed.limit_tokens_per_s:.0f}"
            f" ({weights} of weights at {bandwidth})"
        )
    elif speed.decode_tokens_per_s:
        rate += " (the limit is not known: run `cairn calibrate`)"
    return (
        f"{result.prompt_tokens} tokens in, {result.completion_tokens} out "
        f"({result.finish_reason}); first after {format_duration(result.seconds.prefill)}, "
        f"then {rate}"
    )
