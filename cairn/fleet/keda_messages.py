"""The messages of KEDA's external scaler (externalscaler.proto), as far as they are used: read and written by hand.

    ScaledObjectRef {1 name, 2 namespace, 3 scalerMetadata map}      GetMetricsRequest {1 scaledObjectRef, 2 metricName}
    IsActiveResponse {1 result}      GetMetricSpecResponse {1 MetricSpec {1 metricName, 2 targetSize}}
    GetMetricsResponse {1 MetricValue {1 metricName, 2 metricValue}}

Four messages do not need a compiler. Fields that are not known are passed over, as protobuf wants it.
"""

import msgspec

from cairn.core.protobuf_wire import as_bytes, fields, text, varint, write_bytes


class ScaledObject(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""
    metadata: dict[str, str] = {}


def read_scaled_object(data: bytes) -> ScaledObject:
    texts, metadata = {1: "", 2: ""}, dict[str, str]()
    for number, value in fields(data):
        if number in texts:
            texts[number] = text(value)
        elif number == 3:
            entry = {key: text(part) for key, part in fields(as_bytes(value))}
            metadata[entry.get(1, "")] = entry.get(2, "")
    return ScaledObject(texts[1], texts[2], metadata)


def read_metrics_request(data: bytes) -> ScaledObject:
    """The object that a metric is asked of; there is one metric."""
    parts = [as_bytes(value) for number, value in fields(data) if number == 1]
    return read_scaled_object(b"".join(parts))


def write_active(active: bool) -> bytes:
    return b"\x08\x01" if active else b""


def write_metric(name: str, value: int) -> bytes:
    """A MetricSpec or a MetricValue, in the response that holds one."""
    inner = write_bytes(1, name.encode()) + (b"\x10" + varint(value) if value else b"")
    return write_bytes(1, inner)
