"""Thread that owns a transcriber and batches the windows of several requests.

    jobs --windows--> a batch of at most `rows` windows --Transcriber--> segments with true times --> jobs end

The windows of one job come in order and share batches with those of others, so that a short clip does not wait for the
end of a long one. A job that is aborted ends behind the windows that are being transcribed.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cairn.models.speech.decoding_rules import is_silent, segments
from cairn.models.speech.transcribe import Transcriber, WindowOptions, WindowText
from cairn.models.speech.windows import AudioWindow, Samples, windows
from cairn.serve.engine.messages import Stats
from cairn.serve.engine.request import RequestId
from cairn.serve.engine.step_times import Spent
from cairn.serve.job import Job
from cairn.serve.job_thread import JobThread


class Speech(NamedTuple):
    """Input of a transcription."""

    samples: Samples
    wanted: WindowOptions


class SpeechSegment(msgspec.Struct, frozen=True):
    """Something that was said, with its place in the whole sound."""

    start: float  # seconds
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    no_speech_prob: float


class Transcript(msgspec.Struct):
    language: str | None
    duration: float
    segments: list[SpeechSegment]

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.segments).strip()


class Listening:
    """A job on its way: windows that wait, and what was said in those before."""

    def __init__(self, job: Job, speech: Speech) -> None:
        self.job, self.wanted = job, speech.wanted
        self.left: deque[AudioWindow] = deque(windows(speech.samples))
        seconds = self.left[-1].start_s + self.left[-1].length_s
        self.transcript = Transcript(speech.wanted.language, seconds, [])


class SpeechThread(JobThread):
    what = "transcriber of speech"

    def __init__(self, transcriber: Transcriber, rows: int) -> None:
        super().__init__(transcriber.device)
        self.transcriber, self.rows = transcriber, rows
        self._listening: deque[Listening] = deque()
        self.start()

    def stats(self) -> Stats:
        """Its steps are passes through the model: windows that are transcribed together take minutes on a slow CPU."""
        return msgspec.structs.replace(super().stats(), steps=self.transcriber.passes)

    def _abort(self, ids: Sequence[RequestId]) -> None:
        """Also those that are being transcribed: the windows of a long recording would keep others waiting."""
        super()._abort(ids)
        for one in [one for one in self._listening if one.job.request.id in ids]:
            self._listening.remove(one)
            self._finish_job(one.job, "abort")

    def _step(self) -> None:
        for waiting in self._take(self.rows * self.transcriber.model.spec.context, self.rows):
            speech = waiting.job.request.media
            if isinstance(speech, Speech):
                self._listening.append(Listening(waiting.job, speech))
            else:
                self._finish_job(waiting.job, "error", "this model hears, and was given no sound")
        batch = self._batch()
        if not batch:
            return
        began = time.monotonic()
        windows = [(window, one.wanted) for one, window in batch]
        try:
            heard = self.transcriber.transcribe(windows)
        except Exception as problem:  # noqa: BLE001  reported to the caller, and logged
            failed = {id(one): one for one, _ in batch}.values()
            self._fail([self._running[one.job.request.id] for one in failed], problem)
            for one in failed:
                self._listening.remove(one)
            return
        now = time.monotonic()
        tokens = sum(len(one.decoded.tokens) for one in heard)
        self._count(len(batch), Spent(1, tokens, 0, tokens, 0, 0, 0.0, now - began), now)
        for (one, window), result in zip(batch, heard, strict=True):
            self._note(one, window, result)
        self._end_whole(now)

    def _batch(self) -> list[tuple[Listening, AudioWindow]]:
        """Batch of windows, one of each job in turn, until the rows are full."""
        batch: list[tuple[Listening, AudioWindow]] = []
        while len(batch) < self.rows and any(one.left for one in self._listening):
            for one in self._listening:
                if one.left and len(batch) < self.rows:
                    batch.append((one, one.left.popleft()))
        return batch

    def _note(self, one: Listening, window: AudioWindow, heard: WindowText) -> None:
        transcript, decoded = one.transcript, heard.decoded
        transcript.language = transcript.language or heard.language
        if is_silent(decoded):
            return
        for part in segments(decoded.tokens, self.transcriber.tokens, window.length_s):
            segment = SpeechSegment(
                start=round(window.start_s + part.start, 3),
                end=round(window.start_s + part.end, 3),
                text=self.transcriber.text(part.tokens),
                tokens=part.tokens,
                temperature=decoded.temperature,
                avg_logprob=decoded.mean_logprob,
                no_speech_prob=decoded.no_speech,
            )
            transcript.segments.append(segment)
            one.job.answer.push_all(part.tokens)  # so that a stream has text after each window

    def _end_whole(self, now: float) -> None:
        for one in list(self._listening):
            if one.left:
                one.job.updated()
                continue
            self._listening.remove(one)
            job = one.job
            job.result = one.transcript
            ledger = job.request.ledger
            ledger.first_token = ledger.finished = now
            self._finish_job(job, "stop")
