"""Sound files as samples: mono, float32, 16 kHz, decoded in a process of its own with limits.

    wav (PCM)                        by the standard library, here
    flac, ogg, mp3, other wav, ...   by libsndfile through the package soundfile, in a child process

A decoder in C that reads what a stranger sent may crash or ask for any amount of memory: the child has a limit on
memory, time and output, and its death is an error of the request. Run as a program, this file is that child.
"""

import importlib
import io
import subprocess
import sys
import wave
from fractions import Fraction
from typing import Any

import numpy as np

from cairn.core.errors import ConfigError, RequestError

RATE = 16_000
RATES = range(1_000, 384_001)  # that are read
MOST_SECONDS = 4 * 3600
CHILD_SECONDS = 60
CHILD_BYTES = 4 << 30
MISSING = 3  # the child's exit code where soundfile is not installed
BLOCK_S, MARGIN_S = 20, 1  # of resampling
Samples = np.ndarray[Any, np.dtype[np.float32]]


def read_sound(data: bytes) -> Samples:
    """Whatever format it has, by its content; the name of a file says nothing."""
    sound = _read_wave(data)
    return _read_in_child(data) if sound is None else sound


def _read_wave(data: bytes) -> Samples | None:
    """PCM of 16 bits; None: something else."""
    if data[:4] != b"RIFF":
        return None
    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2 or file.getcomptype() != "NONE":
                return None
            rate, channels = file.getframerate(), file.getnchannels()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, RuntimeError, OverflowError):
        return None  # the last two: sizes in its header that are none
    whole = len(raw) // (2 * channels) * 2 * channels
    frames = np.frombuffer(raw[:whole], "<i2").reshape(-1, channels)
    _check_size(len(frames), rate)
    return resampled(frames.mean(1, dtype=np.float32) / np.float32(32768), rate)


def _read_in_child(data: bytes) -> Samples:
    command = [sys.executable, "-m", "cairn.models.speech.sound_file"]
    try:
        child = subprocess.run(
            command, input=data, capture_output=True, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RequestError(f"the sound took more than {CHILD_SECONDS} s to decode") from None
    if child.returncode == MISSING:
        raise ConfigError(
            "only WAV files of 16 bits can be read here",
            hint="pip install cairn-stack[audio] for flac, ogg, mp3 and others",
        )
    if child.returncode:
        lines = child.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines and child.returncode > 0 else "the decoder failed"
        # soundfile names the object that it read from, in a sentence.
        reason = reason.rpartition(">: ")[2].rstrip(".")
        raise RequestError(
            f"the file is no sound that can be read: {reason[:200]}",
            hint="wav, flac, ogg and mp3 are read",
        )
    return np.frombuffer(child.stdout, np.float32)


def resampled(samples: Samples, rate: int) -> Samples:
    """Resample to 16 kHz by truncating or padding the spectrum of each block, whose margins are dropped."""
    if rate == RATE or not len(samples):
        return samples.astype(np.float32)
    ratio = Fraction(RATE, rate)
    block, margin = BLOCK_S * rate, MARGIN_S * rate
    padded = np.pad(samples, margin)
    pieces = []
    for start in range(0, len(samples), block):
        length = min(block, len(samples) - start)
        part = padded[start : start + length + 2 * margin]
        spectral = _by_spectrum(part, int(len(part) * ratio))
        first = MARGIN_S * RATE
        pieces.append(spectral[first : first + int(length * ratio)])
    return np.concatenate(pieces).astype(np.float32)


def _by_spectrum(part: Samples, count: int) -> Any:
    spectrum = np.fft.rfft(part)
    kept = np.zeros(count // 2 + 1, spectrum.dtype)
    shared = min(len(kept), len(spectrum))
    kept[:shared] = spectrum[:shared]
    return np.fft.irfft(kept, count) * (count / len(part))


def _check_size(frames: int, rate: int) -> None:
    """Check the size before decoding, because a header can claim anything."""
    if rate not in RATES:
        raise RequestError(
            f"the sound has {rate} samples a second", hint=f"between {RATES[0]} and {RATES[-1]}"
        )
    seconds = frames / rate
    if seconds > MOST_SECONDS:
        raise RequestError(
            f"the sound is {seconds:.0f} s long; {MOST_SECONDS} s are the most", hint="cut it"
        )


def main() -> int:
    """The child: a file on stdin, samples on stdout."""
    import resource  # Unix has it; imported here, so that the rest of this file runs anywhere

    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_SECONDS, CHILD_SECONDS))
    try:
        soundfile = importlib.import_module("soundfile")
    except ImportError:
        return MISSING
    try:
        with soundfile.SoundFile(io.BytesIO(sys.stdin.buffer.read())) as file:
            _check_size(file.frames, file.samplerate)
            frames = file.read(dtype="float32", always_2d=True)
            rate = file.samplerate
    except (RuntimeError, ValueError, TypeError, MemoryError, RequestError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(resampled(frames.mean(1), rate).tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
