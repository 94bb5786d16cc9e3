"""Decoding rules of Whisper: allowed tokens, temperature fallback, timestamps. Pure functions without a model.

    <|0.00|> text <|2.40|><|2.40|> text <|5.10|> <end>

Timestamps come in pairs and never decrease; a text begins with one. The rules are those Whisper was trained with
(arXiv:2212.04356, and `decoding.py` of its release). A window whose text looks wrong is decoded again at a higher
temperature; one without speech has no text at all.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from cairn.models.speech.spec import SpeechTokens

STEP_S = 0.02  # of timestamps
LATEST_START = 50  # the first timestamp is at most so many steps late
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_REPETITIVE = 2.4  # characters over their compressed size
LEAST_LOGPROB = -1.0  # mean of the tokens
SILENT = 0.6  # probability of no speech


class Allowed(NamedTuple):
    """Tokens below `end` are text; of the timestamps those from `earliest` to `latest` may come."""

    text: bool
    timestamps: bool
    earliest: int
    latest: int | None = None  # None: all later ones


class DecodedWindow(NamedTuple):
    """Decoded tokens of a window."""

    tokens: list[int]  # without the end
    mean_logprob: float
    no_speech: float
    temperature: float


class TranscriptSegment(NamedTuple):
    start: float  # seconds from the beginning of the window
    end: float
    tokens: list[int]


def allowed(written: Sequence[int], tokens: SpeechTokens) -> Allowed:
    """Tokens that may follow in a window with timestamps."""
    first = tokens.first_timestamp
    if not written:
        return Allowed(False, True, first, first + LATEST_START)
    last_is = written[-1] >= first
    before_is = len(written) < 2 or written[-2] >= first
    times = [token for token in written if token >= first]
    earliest = first
    if times:  # the second of a pair may repeat the first; a text has to last
        earliest = times[-1] if last_is and not before_is else times[-1] + 1
    return Allowed(not last_is or before_is, not (last_is and before_is), earliest)


def looks_wrong(decoded: DecodedWindow, text: str) -> bool:
    """Return whether the window should be decoded again at a higher temperature."""
    if is_silent(decoded):
        return False
    return decoded.mean_logprob < LEAST_LOGPROB or repetition(text) > MOST_REPETITIVE


def is_silent(decoded: DecodedWindow) -> bool:
    return decoded.no_speech > SILENT and decoded.mean_logprob < LEAST_LOGPROB


def repetition(text: str) -> float:
    """Compression ratio of the text; repetitions compress well."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def segments(
    written: Sequence[int], tokens: SpeechTokens, length_s: float
) -> list[TranscriptSegment]:
    """Text between timestamps; what has no end ends with the window."""
    first = tokens.first_timestamp
    parts: list[TranscriptSegment] = []
    start, words = 0.0, list[int]()
    for token in written:
        if token < first:
            words.append(token)
            continue
        at = min((token - first) * STEP_S, length_s)
        if words:
            parts.append(TranscriptSegment(start, max(at, start), words))
            words = []
        start = at
    if words:
        parts.append(TranscriptSegment(start, max(length_s, start), words))
    return parts
