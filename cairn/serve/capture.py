"""Requests as they were asked and answered, one file each, so that one of them can be run again: `cairn replay`.

    Captured   the engine's settings, versions, and for each answer its prompt ids, parameters, seed, grammar and tokens

Capture is off unless a folder is given (`cairn serve --capture DIR`): the files hold the tokens of prompts and answers.
"""

import hashlib
import itertools
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

import cairn
from cairn.core.errors import DataError
from cairn.serve.config import EngineConfig
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.job import Job
from cairn.serve.serving import GenerateRequest
from cairn.serve.structured_output import Guide

FORMAT = 1
SEED_BITS = 63
log = logging.getLogger("cairn")


class CapturedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: list[int]
    params: SamplingParams  # with the seed that was drawn
    tokens: list[int]
    finish: str | None
    digest: str  # of the tokens
    cached: int = 0  # prompt tokens that came from the prefix cache
    preemptions: int = 0
    constrained: bool = False  # by a grammar
    guide: Guide | None = None  # that grammar; files of older versions have none
    adapted: bool = False  # by an adapter, which is not kept


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    engine: EngineConfig
    device: str
    versions: dict[str, str]
    answers: list[CapturedAnswer]
    weights_version: int = 0  # 0: the weights that the engine was started with
    format: int = FORMAT


def digest_of(tokens: Sequence[int]) -> str:
    """The same for the same tokens, on every machine."""
    return hashlib.blake2b(" ".join(map(str, tokens)).encode(), digest_size=8).hexdigest()


def seeded(request: GenerateRequest) -> GenerateRequest:
    """Add a random seed to a request without one, so that its sampling can be replayed."""
    if request.params.seed is not None:
        return request
    params = msgspec.structs.replace(request.params, seed=secrets.randbits(SEED_BITS))
    return request._replace(params=params)


class Capture:
    """Writes requests into a folder, in a thread of its own. A disk that is full loses the file, not the answer."""

    def __init__(self, folder: Path, engine: EngineConfig, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.engine, self.device = folder, engine, device
        self._thread = ThreadPoolExecutor(1, "cairn capture")
        self._repeated: dict[Path, int] = {}  # files of ids that came more than once, and how often

    def keep(self, id: str, jobs: Sequence[Job], weights_version: int = 0) -> None:
        if any(job.request.pictures for job in jobs):
            return  # without its pictures a prompt could not be repeated
        answers = [_answer(job) for job in jobs if job.request.prompt]
        captured = Captured(
            id=id,
            engine=self.engine,
            device=self.device,
            versions={"cairn": cairn.__version__},
            answers=answers,
            weights_version=weights_version,
        )
        self._thread.submit(self._write, captured)

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, captured: Captured) -> None:
        """A client may send the same id again: each request has a file, `ID.json`, `ID.2.json`, ..."""
        written, first = msgspec.json.encode(captured), file_of(self.folder, captured.id)
        for number in itertools.count(self._repeated.get(first, 1)):
            file = first if number == 1 else first.with_suffix(f".{number}.json")
            try:
                with file.open("xb") as opened:
                    opened.write(written)
                return
            except FileExistsError:
                self._repeated[first] = number + 1
            except OSError as error:
                log.warning("request %s could not be captured: %s", captured.id, error)
                return


def _answer(job: Job) -> CapturedAnswer:
    request, tokens = job.request, list(job.answer.whole.token_ids)
    return CapturedAnswer(
        prompt=list(request.prompt),
        params=request.params,
        tokens=tokens,
        finish=job.answer.whole.finish_reason,
        digest=digest_of(tokens),
        cached=request.cached,
        preemptions=request.ledger.preemptions,
        constrained=request.constraint is not None or job.guide is not None,
        adapted=request.adapter != 0,
        guide=job.guide,
    )


def not_replayed(captured: Captured) -> list[str]:
    """Reasons, one sentence each, why a replay may differ: inputs that were not captured."""
    reasons = []
    if any(answer.constrained and answer.guide is None for answer in captured.answers):
        reasons.append("the answer followed a grammar that was not captured")
    if any(answer.adapted for answer in captured.answers):
        reasons.append("the answer is an adapter's, and the model alone is replayed")
    if version := captured.weights_version:
        reasons.append(
            f"the weights had been replaced (version {version}), and the first ones answer"
        )
    return reasons


def file_of(folder: Path, id: str) -> Path:
    """An id may be a client's own: what no file name takes is replaced."""
    safe = "".join(char if char.isalnum() or char in "-_" else "_" for char in id)[:120]
    return folder / f"{safe}.json"


def read_captured(file: Path) -> Captured:
    try:
        captured = msgspec.json.decode(file.read_bytes(), type=Captured)
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}",
            hint="`cairn serve --capture DIR` writes a file for each request",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} is no captured request: {error}",
            hint="`cairn serve --capture DIR` writes a file for each request",
        ) from None
    if captured.format != FORMAT:
        raise DataError(f"{file} has format {captured.format}; this version reads {FORMAT}")
    return captured
