"""Files and batches as OpenAI's clients write and read them."""

from typing import Any, Literal

import msgspec

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
OVER: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")


class FileObject(msgspec.Struct, kw_only=True):
    """GET /v1/files/{id}"""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """GET /v1/files"""

    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = None


class BatchLine(msgspec.Struct, kw_only=True):
    """A line of an input file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """GET /v1/batches/{id}"""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    object: Literal["batch"] = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in OVER


class BatchList(msgspec.Struct, kw_only=True):
    """GET /v1/batches"""

    data: list[Batch]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class LineResponse(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineResult(msgspec.Struct, kw_only=True):
    """A line of an output file or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: BatchError | None = None
