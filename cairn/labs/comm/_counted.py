"""Bytes that a rank gives to its links: counted where messages enter the backend, whatever schedule they belong to."""

from typing import Any


def counted_bytes() -> list[int]:
    """The only element grows with every message of this process from now on; set it to 0 to begin anew."""
    from cairn.labs.torch_backend import executor, link, point_to_point

    sent = [0]

    class Counted(link.Outgoing):
        def __init__(self, view: Any, call_header: bytes) -> None:
            super().__init__(view, call_header)
            sent[0] += view.nbytes

    executor.Outgoing = Counted  # type: ignore[misc]  in a process of the lab's own
    point_to_point.Outgoing = Counted  # type: ignore[misc]
    return sent
