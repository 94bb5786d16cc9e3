"""How many seconds of speech are written down in a second?

    python benchmarks/speech.py clip.flac --model whisper-base --repeat 5 --out benchmarks/cpu/speech.json
    python benchmarks/speech.py clip.flac --rival FOLDER --rival-type int8
    python benchmarks/speech.py --shape turbo --device cuda --out benchmarks/h200/speech.json
    python benchmarks/speech.py --shape base --rows 1 --seconds 11 --tokens 28 --beside-torch

The clip is heard `--repeat` times one after another, as one long sound; beside it once, as a short one. Both at
temperature 0 alone: a text that repeats itself looks wrong to the rule that decodes again, and speech does not repeat
itself. CPU seconds are those of all threads; a busy machine lengthens them less than the clock's. `--rival` is a folder
with the same model in one file for faster-whisper, which hears the same in turns with ours, greedily and on as many
threads. `--shape` has random weights, hears `--seconds` of noise in each window, `--rows` at once, and writes as many
tokens for each as one may have: more than speech has, so its figure is a lower bound, unless `--tokens` says how many.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from embeddings import in_turns

from cairn import LLM
from cairn.bench.record import add_arguments, record
from cairn.models.speech.load import OpenWhisper
from cairn.models.speech.mel import SAMPLES
from cairn.models.speech.model import Whisper
from cairn.models.speech.sound_file import RATE, read_sound
from cairn.models.speech.spec import SpeechTokens, WhisperSpec
from cairn.models.speech.transcribe import Transcriber, WindowOptions
from cairn.models.speech.windows import AudioWindow

SHAPES = {
    "base": WhisperSpec(
        bins=80,
        hidden=512,
        heads=8,
        encoder_layers=6,
        decoder_layers=6,
        intermediate=2048,
        vocab=51865,
    ),
    "turbo": WhisperSpec(
        bins=128,
        hidden=1280,
        heads=20,
        encoder_layers=32,
        decoder_layers=4,
        intermediate=5120,
        vocab=51866,
    ),
}
TOKENS = SpeechTokens(
    start=50258,
    end=50257,
    transcribe=50360,
    translate=50359,
    no_timestamps=50364,
    no_speech=50363,
    previous=50362,
    languages={"en": 50259, "de": 50261},
    suppressed=(50257,),  # the end, so that a window of noise is as long as one can be
)


Hear = Callable[[np.ndarray], str]


def timed(hear: Hear, samples: np.ndarray) -> tuple[str, dict[str, float]]:
    """What was heard; seconds of sound per second, and per CPU second."""
    began, computed = time.perf_counter(), time.process_time()
    text = hear(samples)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - computed
    sound_s = len(samples) / RATE
    return text, {"times_real_time": sound_s / seconds, "per_cpu_second": sound_s / cpu_s}


def rival(options: argparse.Namespace) -> Hear:
    """faster-whisper, with as much work as ours has: one candidate, no text of earlier windows, temperature 0."""
    from faster_whisper import WhisperModel

    model = WhisperModel(
        options.rival,
        device="cpu",
        compute_type=options.rival_type,
        cpu_threads=torch.get_num_threads(),
    )

    def hear(samples: np.ndarray) -> str:
        segments, _ = model.transcribe(
            samples, beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        return "".join(one.text for one in segments).strip()

    return hear


def random_shape(options: argparse.Namespace) -> dict[str, object]:
    """Noise in windows, heard and written together as a server does it."""
    spec, on_gpu = SHAPES[options.shape], options.device != "cpu"
    if options.tokens is not None:
        spec = msgspec.structs.replace(spec, context=2 * options.tokens)
    with torch.device("meta"):
        blank = Whisper(spec).state_dict()

    def get(name: str) -> torch.Tensor:
        return 0.02 * torch.randn(blank[name].shape, device=options.device)

    opened = OpenWhisper("random", spec, TOKENS, None, get)  # type: ignore[arg-type]
    dtype = torch.float16 if on_gpu else torch.float32
    stored = torch.float16 if options.dtype == "float16" else dtype
    forms = {"cairn": Transcriber(opened, opened.load(options.device, dtype, stored=stored))}
    if options.beside_torch:
        forms["torch"] = Transcriber(opened, opened.load(options.device, dtype, plain=True))
    noise = np.zeros(SAMPLES, dtype=np.float32)
    sound = slice(0, round(options.seconds * RATE))
    noise[sound] = np.random.default_rng(0).normal(0, 0.1, SAMPLES)[sound]
    given = [(AudioWindow(0, noise), WindowOptions(language="en", temperature=0.0))] * options.rows
    written = [form.transcribe(given)[0].decoded.tokens for form in forms.values()]
    took = in_turns(
        {name: partial(form.transcribe, given) for name, form in forms.items()}, options.rounds
    )
    sound_s = options.rows * options.seconds
    return {
        "shape": options.shape,
        "windows": options.rows,
        "seconds_of_sound": sound_s,
        "tokens_per_window": len(written[0]),
        "threads": torch.get_num_threads(),
        "stored": str(stored).removeprefix("torch."),
        "seconds": {name: of.seconds for name, of in took.items()},
        "times_real_time": {name: sound_s / of.seconds for name, of in took.items()},
        "per_cpu_second": {name: sound_s / of.cpu_s for name, of in took.items()},
    }


def real_clip(options: argparse.Namespace) -> dict[str, object]:
    samples = read_sound(options.clip.read_bytes())
    sounds = {"clip": samples, "long": np.tile(samples, options.repeat)}
    found: dict[str, object] = {"model": options.model, "clip_s": len(samples) / RATE}
    with LLM(options.model, device=options.device, dtype=options.dtype) as llm:
        hearers: dict[str, Hear] = {
            "cairn": lambda given: llm.transcribe(given, temperature=0.0).text
        }
        if options.rival:
            hearers["faster-whisper"] = rival(options)
            found["rival_type"] = options.rival_type
        for name, hear in hearers.items():
            found[f"text of {name}"] = hear(samples)
        for what, sound in sounds.items():
            found[what] = {name: timed(hear, sound)[1] for name, hear in hearers.items()}
    return found | {"threads": torch.get_num_threads(), "dtype": options.dtype}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clip", type=Path, nargs="?", help="what is heard, without --shape")
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", default="auto", help="of ours")
    parser.add_argument("--rival", help="a folder for faster-whisper")
    parser.add_argument("--rival-type", default="float32", help="its compute_type")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of sound, of --shape")
    parser.add_argument("--tokens", type=int, help="of a window's text, of --shape")
    parser.add_argument("--beside-torch", action="store_true", help="in turns, of --shape")
    parser.add_argument("--rows", type=int, default=64, help="windows at once, of --shape")
    parser.add_argument("--rounds", type=int, default=3, help="of --shape")
    add_arguments(parser)
    options = parser.parse_args()
    if options.clip is None and options.shape is None:
        parser.error("give a clip, or --shape")
    record(random_shape(options) if options.shape else real_clip(options), options)


if __name__ == "__main__":
    main()
