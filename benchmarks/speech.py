"""How many seconds of speech are written down in a second?

    python benchmarks/speech.py clip.flac --model whisper-base --repeat 5 --out benchmarks/cpu/speech.json

The clip is heard `--repeat` times one after another, as one long sound; beside it once, as a short one.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from cairn import LLM
from cairn.bench.record import add_arguments, record
from cairn.models.speech.sound_file import RATE, read_sound


def timed(llm: LLM, samples: np.ndarray) -> tuple[str, float]:
    """What was heard, and seconds of sound per second."""
    began = time.perf_counter()
    heard = llm.transcribe(samples)
    return heard.text, len(samples) / RATE / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clip", type=Path)
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    add_arguments(parser)
    options = parser.parse_args()
    samples = read_sound(options.clip.read_bytes())
    with LLM(options.model, device=options.device) as llm:
        text, short = timed(llm, samples)
        _, short = timed(llm, samples)
        _, long = timed(llm, np.tile(samples, options.repeat))
    found = {
        "model": options.model,
        "clip_s": len(samples) / RATE,
        "text": text,
        "times_real_time": {"clip": short, "long": long},
    }
    record(found, options)


if __name__ == "__main__":
    main()
