"""The batches of /v1/batches in a folder: what a restarted server needs to go on where the last one ended.

    FOLDER/batches/batch_77aa....json            the batch, as GET shows it, and whose it is
    FOLDER/batches/batch_77aa....output.jsonl    results so far, one on a line; .errors.jsonl has those that failed

A line that is in one of the two is done; everything else of the input is still to do. At the end both become files.
"""

import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from cairn.serve.http.batches.files import FileStore, kept_on_disk, read_records, write_record
from cairn.serve.http.protocol.batches import (
    Batch,
    BatchError,
    BatchErrors,
    BatchLine,
    BatchRequest,
    LineResult,
)
from cairn.serve.http.protocol.body import decode, no_json
from cairn.serve.http.protocol.refusal import Refusal

MOST_LINES = 50_000  # as OpenAI has it
MOST_MISTAKES = 50  # that are listed
WINDOW_S = 24 * 3600
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
_encode = msgspec.json.Encoder().encode


class BatchRecord(msgspec.Struct, kw_only=True):
    holder: str  # of the API key
    batch: Batch


class BatchStore:
    """Belongs to the thread of the event loop."""

    def __init__(self, folder: Path, files: FileStore, clock: Callable[[], float]) -> None:
        self._folder, self.files, self._clock = folder / "batches", files, clock
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records = read_records(self._folder, BatchRecord, lambda record: record.batch.id)

    def create(self, holder: str, request: BatchRequest) -> Batch:
        file = self.files.get(holder, request.input_file_id)
        if file.purpose != "batch":
            message = (
                f"input_file_id names a file of the purpose {file.purpose!r}; it has to be batch"
            )
            raise Refusal(400, message, param="input_file_id")
        now = int(self._clock())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=request.metadata,
        )
        record = BatchRecord(holder=holder, batch=batch)
        with kept_on_disk():
            self.save(record)
        self._records[batch.id] = record
        return batch

    def get(self, holder: str, id: str) -> BatchRecord:
        record = self._records.get(id)
        if record is None or record.holder != holder:
            raise Refusal(404, f"there is no batch {id[:80]!r}", param="id", code="batch_not_found")
        return record

    def of(self, holder: str) -> list[Batch]:
        """Newest first."""
        batches = [record.batch for record in self._records.values() if record.holder == holder]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def unfinished(self) -> list[BatchRecord]:
        """Oldest first."""
        records = [record for record in self._records.values() if not record.batch.is_over]
        return sorted(records, key=lambda record: (record.batch.created_at, record.batch.id))

    def save(self, record: BatchRecord) -> None:
        write_record(self._folder / f"{record.batch.id}.json", record)

    # -- lines -----------------------------------------------------------------------------------

    def lines_to_do(self, batch: Batch) -> list[BatchLine]:
        """Lines without a result; updates the counts. Raises `Mistakes` if the input is not a list of requests."""
        lines = read_lines(self.files.data_path(batch.input_file_id).read_bytes(), batch.endpoint)
        done, failed = (self._ids_done(batch, kind) for kind in (OUTPUT, ERRORS))
        counts = batch.request_counts
        counts.total, counts.completed, counts.failed = len(lines), len(done), len(failed)
        return [line for line in lines if line.custom_id not in done | failed]

    def add_result(self, batch: Batch, result: LineResult, failed: bool) -> None:
        with self._results(batch, ERRORS if failed else OUTPUT).open("ab") as file:
            file.write(_encode(result) + b"\n")
        if failed:
            batch.request_counts.failed += 1
        else:
            batch.request_counts.completed += 1

    def publish(self, record: BatchRecord) -> None:
        """The results become files of the batch's holder; it may be done again where it was broken off."""
        batch = record.batch
        for kind, field in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
            path = self._results(batch, kind)
            if path.exists() and getattr(batch, field) is None:
                file = self.files.adopt(record.holder, f"{batch.id}_{kind}", path)
                setattr(batch, field, file.id)
                self.save(record)
            path.unlink(missing_ok=True)

    def _results(self, batch: Batch, kind: str) -> Path:
        return self._folder / f"{batch.id}.{kind}"

    def _ids_done(self, batch: Batch, kind: str) -> set[str]:
        """Cuts off a last line that was being written when the process ended."""
        path = self._results(batch, kind)
        if not path.exists():
            return set()
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            path.write_bytes(whole)
        return {msgspec.json.decode(line, type=LineResult).custom_id for line in whole.splitlines()}


class Mistakes(Exception):
    """An input file with lines that are no requests."""

    def __init__(self, errors: list[BatchError]) -> None:
        super().__init__(errors[0].message)
        self.errors = BatchErrors(data=errors)


def read_lines(content: bytes, endpoint: str) -> list[BatchLine]:
    """Every line as a request, or `Mistakes` with the numbers of those that are none."""
    lines: list[BatchLine] = []
    mistakes: list[BatchError] = []
    ids: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except msgspec.ValidationError:
            mistakes.append(_wrong_field(text, number))
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem_text = no_json(text, error, "the line")
            mistakes.append(BatchError(code="invalid_json_line", message=problem_text, line=number))
            continue
        if (problem := _problem(line, endpoint, ids)) is not None:
            param, message = problem
            mistakes.append(
                BatchError(code="invalid_request", message=message, line=number, param=param)
            )
        ids.add(line.custom_id)
        lines.append(line)
    if not lines and not mistakes:
        mistakes = [BatchError(code="empty_file", message="the input file has no requests")]
    if len(lines) > MOST_LINES:
        problem_text = f"the input file has {len(lines)} requests; {MOST_LINES} is the most"
        mistakes = [BatchError(code="too_many_requests", message=problem_text)]
    if mistakes:
        raise Mistakes(mistakes[:MOST_MISTAKES])
    return lines


def _wrong_field(text: bytes, number: int) -> BatchError:
    """Describe the invalid field of a line and its valid values."""
    try:
        decode(text, BatchLine)
    except Refusal as refusal:
        said = refusal.message.replace("the body", "the line", 1)
        return BatchError(code="invalid_json_line", message=said, line=number, param=refusal.param)
    raise AssertionError("a line that could not be read was read")


def _problem(line: BatchLine, endpoint: str, ids: set[str]) -> tuple[str, str] | None:
    if line.url != endpoint:
        return "url", f"url is {line.url[:80]!r}; the batch is for {endpoint}"
    if line.custom_id in ids:
        return "custom_id", f"custom_id is {line.custom_id[:80]!r} again"
    if line.body.get("stream"):
        return "body.stream", "body.stream is true; a batch is not streamed"
    return None
