"""A transcript in each of the forms that OpenAI's clients ask for. Pure."""

import msgspec

from cairn.models.speech.decoding_rules import repetition
from cairn.serve.speech_thread import SpeechSegment, Transcript

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")


class SegmentObject(msgspec.Struct, kw_only=True):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptObject(msgspec.Struct, kw_only=True):
    text: str


class VerboseTranscript(msgspec.Struct, kw_only=True):
    task: str
    language: str
    duration: float
    text: str
    segments: list[SegmentObject]


def written(transcript: Transcript, form: str, task: str) -> bytes | str:
    if form == "text":
        return transcript.text + "\n"
    if form == "srt":
        return "".join(
            f"{at}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{one.text.strip()}\n\n"
            for at, one in enumerate(transcript.segments, start=1)
        )
    if form == "vtt":
        return "WEBVTT\n\n" + "".join(
            f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{one.text.strip()}\n\n"
            for one in transcript.segments
        )
    if form == "json":
        return msgspec.json.encode(TranscriptObject(text=transcript.text))
    return msgspec.json.encode(
        VerboseTranscript(
            task=task,
            language=transcript.language or "en",
            duration=transcript.duration,
            text=transcript.text,
            segments=[_segment(at, one) for at, one in enumerate(transcript.segments)],
        )
    )


def _segment(at: int, one: SpeechSegment) -> SegmentObject:
    return SegmentObject(
        id=at,
        seek=0,
        start=one.start,
        end=one.end,
        text=one.text,
        tokens=one.tokens,
        temperature=one.temperature,
        avg_logprob=one.avg_logprob,
        compression_ratio=repetition(one.text),
        no_speech_prob=one.no_speech_prob,
    )


def _clock(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{milliseconds:03}"
