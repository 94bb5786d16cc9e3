"""A Whisper that takes requests: the `Serving` of a speech-to-text model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.models.checkpoint import check_device, default_device
from cairn.models.linear.maps import held_bytes
from cairn.models.runnable import DTYPES, OpenModel
from cairn.models.spec import ModelSpec
from cairn.models.speech.cpu_form import HALF_NOTE
from cairn.models.speech.load import OpenWhisper, open_whisper, stored_dtype
from cairn.models.speech.spec import WhisperSpec
from cairn.models.speech.transcribe import Transcriber
from cairn.serve.config import EngineConfig
from cairn.serve.engine.facts import device_name, gpu_uuids
from cairn.serve.engine.messages import Facts
from cairn.serve.engine.request import Limits
from cairn.serve.serving import Serving
from cairn.serve.speech_thread import SpeechThread

ROWS = {"cpu": 4, "cuda": 64}  # windows that are transcribed together
ADMITTED = 256  # requests, unless told


class OpenSpeech(OpenModel):
    """A Whisper, as the server sees it: a decoder's sizes and a tokenizer."""

    def __init__(self, whisper: OpenWhisper) -> None:
        self.whisper = whisper
        shape = decoder_shape(whisper.spec)
        super().__init__(whisper.name, shape, whisper.tokenizer, (), None)


def decoder_shape(spec: WhisperSpec) -> ModelSpec:
    """Its decoder without the sound, for counts."""
    return ModelSpec(
        family="whisper",
        vocab=spec.vocab,
        hidden=spec.hidden,
        layers=spec.decoder_layers,
        heads=spec.heads,
        kv_heads=spec.heads,
        head_dim=spec.hidden // spec.heads,
        intermediate=spec.intermediate,
        context=spec.context,
        tied=True,
        norm="layer",
        gated=False,
        activation="gelu",
        positions="learned",
    )


def open_speech_serving(
    name: str, folder: Path, config: EngineConfig, names: Sequence[str] = ()
) -> Serving:
    if config.tensor_parallel_size > 1:
        raise ConfigError("Whisper runs on one device", hint="leave tensor_parallel_size out")
    device = default_device() if config.device == "auto" else config.device
    check_device(device)
    opened = OpenSpeech(open_whisper(name, folder))
    dtype, why = _dtype(device, config.dtype)
    stored = dtype
    if torch.device(device).type == "cpu" and config.dtype == "auto":
        stored = stored_dtype(opened.whisper)
    model = opened.whisper.load(device, dtype, config.plain, stored)
    place = model.embedding.device
    admitted = config.max_num_seqs or ADMITTED
    rows = min(admitted, ROWS[place.type])
    limits = Limits(
        rows=admitted,
        step_tokens=rows * opened.spec.context,
        context=opened.spec.context,
        pages=2,
        page_size=opened.spec.context,
        vocabulary=opened.spec.vocab,
        answers="transcripts",
    )
    weights_bytes = held_bytes(model)
    facts = Facts(
        device=str(place),
        device_name=device_name(place),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=weights_bytes,
        uuids=gpu_uuids(place, 1),
    )
    size = format_bytes(weights_bytes, "decimal")
    notes = [
        f"{name}: Whisper, {size} in {facts.dtype} on {facts.device} ({why}); "
        f"{rows} windows of 30 s are heard together",
        "POST /v1/audio/transcriptions and /v1/audio/translations",
    ]
    if stored != dtype and model.compiled is not None:
        notes.append(HALF_NOTE)
    engine = SpeechThread(Transcriber(opened.whisper, model), rows)
    return Serving(opened, limits, engine, notes, facts, names)


def _dtype(device: str, dtype: str) -> tuple[torch.dtype, str]:
    if dtype != "auto":
        return DTYPES[dtype], "as asked"
    if torch.device(device).type == "cuda":
        return torch.float16, "as it was trained"
    return torch.float32, "CPUs multiply fastest in float32"
