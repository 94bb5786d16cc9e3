"""multipart/form-data, as clients upload files with it (RFC 7578).

    --BOUNDARY\\r\\n
    Content-Disposition: form-data; name="file"; filename="lines.jsonl"\\r\\n
    \\r\\n
    ... content ...\\r\\n
    --BOUNDARY--

Pure: bytes in, parts out; 400 for what is no such body.
"""

from email.message import Message

import msgspec

from cairn.serve.http.protocol.refusal import Refusal

MOST_PARTS = 64
MOST_HEAD_BYTES = 16 * 1024  # of a part


class Part(msgspec.Struct, frozen=True):
    name: str
    filename: str | None
    content: bytes


def read_parts(content_type: str, body: bytes) -> dict[str, Part]:
    """The parts by their names; the first of a name counts."""
    kind, boundary = _parameter(content_type, "content-type", "boundary")
    if kind != "multipart/form-data" or not boundary:
        raise Refusal(
            400,
            f"the content type is {content_type[:80]!r}; a file is sent as multipart/form-data with a boundary",
            code="invalid_multipart",
        )
    mark = b"--" + boundary.encode("latin-1", "replace")
    sections = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(sections) < 3 or not sections[-1].startswith(b"--"):
        raise Refusal(400, "the multipart body has no end", code="invalid_multipart")
    if len(sections) > MOST_PARTS + 2:
        raise Refusal(400, f"the body has more than {MOST_PARTS} parts", code="invalid_multipart")
    parts: dict[str, Part] = {}
    for section in sections[1:-1]:
        part = _part(section)
        parts.setdefault(part.name, part)
    return parts


def _part(section: bytes) -> Part:
    head, gap, content = section.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    if not gap:
        raise Refusal(400, "a part of the body has no headers", code="invalid_multipart")
    if len(head) > MOST_HEAD_BYTES:
        message = f"the headers of a part have {len(head)} bytes; {MOST_HEAD_BYTES} is the most"
        raise Refusal(400, message, code="invalid_multipart")
    for line in head.split(b"\r\n"):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name.strip().lower() == "content-disposition":
            _, named = _parameter(value, "content-disposition", "name")
            _, filename = _parameter(value, "content-disposition", "filename")
            if named:
                return Part(named, filename, content)
    raise Refusal(400, "a part of the body has no name", code="invalid_multipart")


def _parameter(value: str, header: str, name: str) -> tuple[str, str | None]:
    """The value of a header, and one of its parameters."""
    message = Message()
    message[header] = " ".join(value.split())
    kind = message.get_content_type() if header == "content-type" else ""
    parameter = message.get_param(name, header=header)
    return kind, parameter if isinstance(parameter, str) else None
