"""/v1/files and /v1/batches: many requests in one file, answered when there is room (`--batch-folder`).

POST /v1/files   -> file-...      POST /v1/batches {input_file_id, endpoint} -> batch_...
GET  /v1/batches/{id}  until status is completed; GET /v1/files/{output_file_id}/content has the results
"""

from collections.abc import Sequence
from typing import TypeVar

from starlette.responses import FileResponse

from cairn.serve.http.batches.runner import BatchRunner
from cairn.serve.http.endpoints.pages import in_order, page_of, query_of
from cairn.serve.http.protocol.batches import Batch, BatchList, BatchRequest, FileList, FileObject
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.multipart import read_parts
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service

Item = TypeVar("Item", Batch, FileObject)
MOST_LISTED = 10_000
LISTED = 100
LONGEST_NAME = 255


async def create_file(service: Service, call: Call, body: bytes) -> JSON:
    files = _runner(service).store.files
    parts = read_parts(_header(call, b"content-type"), body)
    for name in ("file", "purpose"):
        if name not in parts:
            raise Refusal(400, f"{name} is missing", param=name, code="missing_field")
    purpose = parts["purpose"].content.decode("utf-8", "replace")
    if purpose != "batch":
        message = (
            f"purpose is {purpose[:40]!r}; this server uses files for batches: it has to be batch"
        )
        raise Refusal(400, message, param="purpose")
    if not parts["file"].content:
        message = "the file is empty; send one line of JSON for each request"
        raise Refusal(400, message, param="file", code="empty_file")
    filename = (parts["file"].filename or "upload")[:LONGEST_NAME]
    return JSON(await files.put(call.holder, filename, purpose, parts["file"].content))


async def list_files(service: Service, call: Call, body: bytes) -> JSON:
    files = _runner(service).store.files.of(call.holder)
    if (purpose := query_of(call).get("purpose")) is not None:
        files = [file for file in files if file.purpose == purpose]
    page, more = _page(call, in_order(call, files))
    first, last = _ends(page)
    return JSON(FileList(data=page, has_more=more, first_id=first, last_id=last))


async def get_file(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(_runner(service).store.files.get(call.holder, _id(call)))


async def file_content(service: Service, call: Call, body: bytes) -> FileResponse:
    files = _runner(service).store.files
    file = files.get(call.holder, _id(call))
    return FileResponse(files.data_path(file.id), media_type="application/octet-stream")


async def delete_file(service: Service, call: Call, body: bytes) -> JSON:
    store, id = _runner(service).store, _id(call)
    store.files.get(call.holder, id)
    if any(record.batch.input_file_id == id for record in store.unfinished()):
        raise Refusal(400, f"file {id} is the input of a batch that is not over", param="id")
    store.files.drop(call.holder, id)
    return JSON({"id": id, "object": "file", "deleted": True})


async def create_batch(service: Service, call: Call, body: bytes) -> JSON:
    runner = _runner(service)
    batch = runner.store.create(call.holder, decode(body, BatchRequest))
    runner.wake()
    return JSON(batch)


async def list_batches(service: Service, call: Call, body: bytes) -> JSON:
    page, more = _page(call, _runner(service).store.of(call.holder))
    first, last = _ends(page)
    return JSON(BatchList(data=page, has_more=more, first_id=first, last_id=last))


async def get_batch(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(_runner(service).store.get(call.holder, _id(call)).batch)


async def cancel_batch(service: Service, call: Call, body: bytes) -> JSON:
    runner = _runner(service)
    record = runner.store.get(call.holder, _id(call))
    runner.cancel(record)
    return JSON(record.batch)


# -- inside ---------------------------------------------------------------------------------------


def _runner(service: Service) -> BatchRunner:
    if service.batches is None:
        message = (
            "this server keeps no files and runs no batches: start it with --batch-folder FOLDER"
        )
        raise Refusal(404, message, code="unsupported")
    return service.batches


def _id(call: Call) -> str:
    return call.scope["path_params"]["id"]


def _header(call: Call, name: bytes) -> str:
    return next(
        (value.decode("latin-1") for key, value in call.scope["headers"] if key == name), ""
    )


def _page(call: Call, items: list[Item]) -> tuple[list[Item], bool]:
    return page_of(call, items, [item.id for item in items], LISTED, MOST_LISTED)


def _ends(items: Sequence[Batch | FileObject]) -> tuple[str | None, str | None]:
    return (items[0].id, items[-1].id) if items else (None, None)
