"""The messages of KEDA's external scaler (externalscaler.proto), as far as they are used: read and written by hand.

    ScaledObjectRef {1 name, 2 namespace, 3 scalerMetadata map}      GetMetricsRequest {1 scaledObjectRef, 2 metricName}
    IsActiveResponse {1 result}      GetMetricSpecResponse {1 MetricSpec {1 metricName, 2 targetSize}}
    GetMetricsResponse {1 MetricValue {1 metricName, 2 metricValue}}

Four messages do not need a compiler. Fields that are not known are passed over, as protobuf wants it.
"""

from collections.abc import Iterator

import msgspec

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_BITS = 64


class WireError(ValueError):
    """Bytes that are no message."""


class ScaledObject(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""
    metadata: dict[str, str] = {}


def read_scaled_object(data: bytes) -> ScaledObject:
    texts, metadata = {1: "", 2: ""}, dict[str, str]()
    for number, value in _fields(data):
        if number in texts:
            texts[number] = _text(value)
        elif number == 3:
            entry = {key: _text(part) for key, part in _fields(_bytes(value))}
            metadata[entry.get(1, "")] = entry.get(2, "")
    return ScaledObject(texts[1], texts[2], metadata)


def read_metrics_request(data: bytes) -> ScaledObject:
    """The object that a metric is asked of; there is one metric."""
    parts = [_bytes(value) for number, value in _fields(data) if number == 1]
    return read_scaled_object(b"".join(parts))


def write_active(active: bool) -> bytes:
    return b"\x08\x01" if active else b""


def write_metric(name: str, value: int) -> bytes:
    """A MetricSpec or a MetricValue, in the response that holds one."""
    inner = _write_bytes(1, name.encode()) + (b"\x10" + _varint(value) if value else b"")
    return _write_bytes(1, inner)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _read_varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"a field of kind {kind}")
        if at + size > len(data):
            raise WireError("the message ends inside a field")
        yield number, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, MOST_BITS, 7):
        if at >= len(data):
            raise WireError("the message ends inside a number")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise WireError("a number of more than 64 bits")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise WireError("a number where a text belongs")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode(errors="replace")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _write_bytes(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | BYTES]) + _varint(len(data)) + data
