"""Messages of Tinker's clients (SDK 0.36) as types. Knows no model and no HTTP.

    POST forward_backward    protobuf    model, order, data: tokens + tensors by name, loss, its settings
    everything else          JSON
    answers                  JSON, but for log-probabilities and samples, which are protobuf

A request gets the number of a future, whose result is asked for by `retrieve_future`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from cairn.align.tinker.protobuf import (
    all_bytes,
    double_of,
    integers,
    last_bytes,
    number_of,
    read_fields,
    text,
    write_entry,
)
from cairn.core.errors import RequestError
from cairn.core.protobuf_wire import write_bytes, write_double, write_number

FLOAT32, INT64 = 1, 2  # of Tinker's tensors
DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
STOP, LENGTH = 0, 1  # why a sample ended
LOGPROBS = "logprobs"


class Datum(msgspec.Struct, frozen=True):
    """A sequence: its tokens, and tensors with a value for each of them."""

    tokens: np.ndarray  # int64 [T]
    inputs: dict[str, np.ndarray]  # [T]


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """A forward pass over data, with gradients or without."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    settings: dict[str, float]
    forward_only: bool


class Passed(msgspec.Struct, frozen=True):
    logprobs: list[np.ndarray]  # float32 [T] of each datum
    metrics: dict[str, float]


class SampledTokens(msgspec.Struct, frozen=True):
    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    top: list[list[tuple[int, float]]] = []  # of each token, the most likely ones


class Samples(msgspec.Struct, frozen=True):
    sequences: list[SampledTokens]
    prompt_logprobs: list[float | None] | None = None
    prompt_top: list[list[tuple[int, float]]] | None = None
    cached: int = 0  # tokens of the prompt that were not computed again


# -- what comes in ------------------------------------------------------------------------------


def read_turn(body: bytes) -> tuple[str, int]:
    """Model of a request, and its sequence number."""
    fields = read_fields(body)
    return text(fields, 1), number_of(fields, 2)


def read_pass(body: bytes) -> Pass:
    fields = read_fields(body)
    settings: dict[str, float] = {}
    for entry in map(read_fields, all_bytes(fields, 5)):
        settings[text(entry, 1)] = double_of(entry, 2)
    for entry in map(read_fields, all_bytes(fields, 7)):
        value = read_fields(last_bytes(entry, 2))
        if 2 in value:
            raise RequestError(
                f"the setting {text(entry, 1)!r} of a loss is text {text(value, 2)!r}",
                hint="settings of the losses here are numbers",
            )
        settings[text(entry, 1)] = double_of(value, 1)
    return Pass(
        model_id=text(fields, 1),
        seq_id=number_of(fields, 2),
        data=[_datum(one, at) for at, one in enumerate(all_bytes(fields, 3))],
        loss=text(fields, 4),
        settings=settings,
        forward_only=bool(number_of(fields, 6)),
    )


def _datum(body: bytes, at: int) -> Datum:
    fields = read_fields(body)
    chunks = [read_fields(chunk) for chunk in all_bytes(fields, 1)]
    if any(1 not in chunk for chunk in chunks):
        raise RequestError(f"datum {at} has a picture or sound", hint="only text is trained here")
    raw = [last_bytes(read_fields(last_bytes(chunk, 1)), 1) for chunk in chunks]
    tokens = np.concatenate([_array(one, "<i4", f"datum {at}") for one in raw] or [np.zeros(0)])
    inputs = {}
    for entry in map(read_fields, all_bytes(fields, 2)):
        name = text(entry, 1)
        inputs[name] = _tensor(last_bytes(entry, 2), len(tokens), f"{name!r} of datum {at}")
    return Datum(tokens.astype(np.int64), inputs)


def _tensor(body: bytes, tokens: int, what: str) -> np.ndarray:
    fields = read_fields(body)
    dtype, shape = DTYPES.get(number_of(fields, 3)), integers(fields, 4)
    if 2 in fields or len(shape) > 1:
        raise RequestError(
            f"{what} has shape {shape}{' and is sparse' if 2 in fields else ''}",
            hint="one dense value for each token is taken here",
        )
    if dtype is None:
        raise RequestError(f"{what} has number type {number_of(fields, 3)}, not float32 or int64")
    values = _array(last_bytes(fields, 1), dtype.str, what)
    if len(values) != tokens:
        raise RequestError(f"{what} has {len(values)} values for {tokens} tokens")
    return values


def _array(raw: bytes, dtype: str, what: str) -> np.ndarray:
    if len(raw) % np.dtype(dtype).itemsize:
        raise RequestError(f"{what} has {len(raw)} bytes, which are no whole numbers")
    return np.frombuffer(raw, dtype)


# -- what goes out ------------------------------------------------------------------------------


def write_passed(passed: Passed) -> bytes:
    sizes = [4 * len(one) for one in passed.logprobs]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype("<i8")
    values = b"".join(one.astype("<f4").tobytes() for one in passed.logprobs)
    batched = write_bytes(1, values) + write_bytes(2, offsets.tobytes()) + write_number(3, FLOAT32)
    record = write_bytes(1, b"ArrayRecord") + write_entry(2, LOGPROBS, write_bytes(2, batched))
    record += write_number(3, len(passed.logprobs))
    message = write_bytes(1, b"ArrayRecord") + write_bytes(2, record)
    for name, value in passed.metrics.items():
        message += write_entry(3, name, write_double(2, value))
    return message


def write_samples(samples: Samples) -> bytes:
    message = b"".join(write_bytes(1, _sequence(one)) for one in samples.sequences)
    if samples.prompt_logprobs is not None:
        values = [np.nan if one is None else one for one in samples.prompt_logprobs]
        message += write_bytes(2, np.array(values, "<f4").tobytes())
    if samples.prompt_top is not None:
        message += write_bytes(3, _top(samples.prompt_top))
    return message + write_number(4, samples.cached)


def _sequence(one: SampledTokens) -> bytes:
    message = write_number(1, STOP if one.stopped else LENGTH)
    message += write_bytes(2, np.array(one.tokens, "<i4").tobytes())
    message += write_bytes(3, np.array(one.logprobs, "<f4").tobytes())
    return message + (write_bytes(4, _top(one.top)) if one.top else b"")


def _top(rows: Sequence[Sequence[tuple[int, float]]]) -> bytes:
    """A dense matrix; rows with fewer entries are filled as the SDK expects it."""
    most = max((len(row) for row in rows), default=0)
    filled = [[*row, *[(0, -99999.0)] * (most - len(row))] for row in rows]
    ids = np.array([[token for token, _ in row] for row in filled], "<i4")
    values = np.array([[value for _, value in row] for row in filled], "<f4")
    return (
        write_bytes(1, ids.tobytes())
        + write_bytes(2, values.tobytes())
        + write_number(3, most)
        + write_number(4, len(rows))
    )


# -- JSON ---------------------------------------------------------------------------------------


class LoraConfig(msgspec.Struct, frozen=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(msgspec.Struct, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] = {}


class AdamParams(msgspec.Struct, frozen=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Turn(msgspec.Struct, frozen=True):
    """Model and sequence number of a request, read before the rest, which may be invalid."""

    model_id: str
    seq_id: int


class OptimStep(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(msgspec.Struct, frozen=True):
    """Save weights for resuming or for sampling."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    overwrite: bool = False


class LoadWeights(msgspec.Struct, frozen=True):
    path: str
    optimizer: bool


class CreateSamplingSession(msgspec.Struct, frozen=True):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(msgspec.Struct, frozen=True):
    tokens: list[int] | None = None
    type: str = "encoded_text"


class ModelInput(msgspec.Struct, frozen=True):
    chunks: list[TextChunk]

    def tokens(self) -> list[int]:
        tokens: list[int] = []
        for chunk in self.chunks:
            if chunk.tokens is None:
                raise RequestError(f"a prompt has a part of type {chunk.type!r}", hint="send text")
            tokens.extend(chunk.tokens)
        return tokens


class TinkerSampling(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(msgspec.Struct, frozen=True):
    prompt: ModelInput
    sampling_params: TinkerSampling
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class SessionOnly(msgspec.Struct, frozen=True):
    session_id: str


class ModelOnly(msgspec.Struct, frozen=True):
    model_id: str


class RetrieveFuture(msgspec.Struct, frozen=True):
    request_id: str


class WeightsInfo(msgspec.Struct, frozen=True):
    tinker_path: str
