"""The messages of Envoy's external processing (ext_proc v3), as far as an endpoint picker needs them.

ProcessingRequest    {2 request_headers, 3 response_headers, 4 request_body, 5 response_body, 6, 7 trailers}
ProcessingResponse   {1 request_headers, 2 response_headers, 3 request_body, 4 response_body, 5, 6 trailers,
                      7 immediate_response}
"""

from typing import Literal

import msgspec

from cairn.core.protobuf_wire import as_bytes, fields, varint, write_bytes

Kind = Literal[
    "request_headers",
    "response_headers",
    "request_body",
    "response_body",
    "request_trailers",
    "response_trailers",
]
KINDS: dict[int, Kind] = {
    2: "request_headers",
    3: "response_headers",
    4: "request_body",
    5: "response_body",
    6: "request_trailers",
    7: "response_trailers",
}
ANSWERS: dict[Kind, int] = {kind: number - 1 for number, kind in KINDS.items()}
ENDPOINT = b"x-gateway-destination-endpoint"


class Processing(msgspec.Struct, frozen=True):
    """Part of a request that Envoy has received."""

    kind: Kind
    body: bytes = b""
    ends: bool = False  # nothing follows in this direction


def read_processing(data: bytes) -> Processing | None:
    """Decode a message; None for unknown types."""
    for number, value in fields(data):
        if number in KINDS:
            kind, inner = KINDS[number], dict(fields(as_bytes(value)))
            if kind in ("request_body", "response_body"):
                return Processing(kind, as_bytes(inner.get(1, b"")), bool(inner.get(2, 0)))
            return Processing(kind, ends=bool(inner.get(3, 0)))
    return None


def write_continue(kind: Kind, endpoint: str = "") -> bytes:
    """Go on; with an endpoint, to that one: as a header, and as metadata of the load balancer."""
    if not endpoint:
        return write_bytes(ANSWERS[kind], b"")
    header = write_bytes(1, ENDPOINT) + write_bytes(3, endpoint.encode())
    mutation = write_bytes(1, write_bytes(1, header))
    common = write_bytes(2, mutation) + b"\x28\x01"  # header_mutation, clear_route_cache
    return write_bytes(ANSWERS[kind], write_bytes(1, common)) + write_bytes(8, _metadata(endpoint))


def _metadata(endpoint: str) -> bytes:
    """{"envoy.lb": {"x-gateway-destination-endpoint": endpoint}} as a google.protobuf.Struct."""
    leaf = _entry(ENDPOINT, write_bytes(3, endpoint.encode()))
    return _entry(b"envoy.lb", write_bytes(5, leaf))


def _entry(key: bytes, value: bytes) -> bytes:
    return write_bytes(1, write_bytes(1, key) + write_bytes(2, value))


def write_refusal(status: int, body: bytes) -> bytes:
    header = write_bytes(1, b"content-type") + write_bytes(3, b"application/json")
    mutation = write_bytes(1, write_bytes(1, header))
    code = write_bytes(1, b"\x08" + varint(status))
    return write_bytes(7, code + write_bytes(2, mutation) + write_bytes(3, body))
