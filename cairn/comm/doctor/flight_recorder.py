"""Reads the flight recorder of torch.distributed: which collective each rank entered, and which it left.

A dump is one file for each rank, a pickle (TORCH_FR_DUMP_TEMP_FILE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE, or
`torch._C._distributed_c10d._dump_fr_trace()` / `_dump_nccl_trace()`), or the same as JSON. The file does
not say whose it is: the rank is the last number in its name.

A pickle can run code when it is read. These hold nothing but dicts, lists, strings and numbers, so
any other is refused before it is made.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import msgspec

from cairn.comm.doctor.findings import RankTrace, RecordedCall
from cairn.core.errors import DataError

PICKLE = b"\x80"
LARGEST = 512 << 20  # bytes of a dump


class _OnlyData(pickle.Unpickler):
    """Builds containers and numbers; whatever needs a class or a function is refused."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside")


def looks_like(head: bytes) -> bool:
    return head[:1] == PICKLE or (head.lstrip()[:1] == b"{" and b'"pg_config"' in head)


def read_trace(path: Path) -> RankTrace:
    data, rank = _bytes(path), rank_of(path)
    try:
        if data[:1] == PICKLE:
            dump = _OnlyData(io.BytesIO(data)).load()
        else:
            dump = msgspec.json.decode(data)
        return trace_of(dump, rank, str(path))
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
        raise DataError(
            f"{path} is no flight-recorder dump: {type(error).__name__}: {error}",
            hint="give the files that torch wrote, one for each rank",
        ) from None


def trace_of(dump: dict[str, Any], rank: int, source: str) -> RankTrace:
    """Read a dump in torch's format. Sends and receives are skipped because torch numbers them separately."""
    calls = [_call(entry) for entry in dump["entries"] if not entry.get("is_p2p")]
    return RankTrace(
        rank=rank, calls=calls, groups=_groups(dump.get("pg_config") or {}), source=source
    )


def rank_of(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name)
    if not numbers:
        raise DataError(
            f"{path.name}: whose dump is it? There is no rank in its name",
            hint="name it after its rank, such as trace_rank_3",
        )
    return int(numbers[-1])


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} has more than {LARGEST >> 20} MiB", hint="is it a dump?")
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint="give a file that exists"
        ) from None


def _call(entry: dict[str, Any]) -> RecordedCall:
    sizes = entry.get("input_sizes") or []
    state = entry.get("state") or ""
    frames = entry.get("frames") or []
    return RecordedCall(
        group=str((entry.get("process_group") or ["0"])[0]),
        sequence=int(entry["collective_seq_id"]),
        op=_op(str(entry["profiling_name"])),
        shapes=str(sizes),
        dtypes=", ".join(map(str, entry.get("input_dtypes") or [])),
        elements=sum(_product(size) for size in sizes),
        entered_ns=int(entry.get("time_created_ns") or 0),
        # gloo never says "completed": it retires what is done.
        done=state == "completed" or bool(entry.get("retired")),
        started=state in ("started", "completed") or "gloo" in str(entry["profiling_name"]),
        ended_ns=entry.get("time_discovered_completed_ns"),
        frame=_where(frames),
        refused=bool(entry.get("refused")),
    )


def _op(name: str) -> str:
    """all_reduce, from nccl:all_reduce or gloo:all_reduce."""
    return name.rpartition(":")[2]


def _where(frames: list[dict[str, Any]]) -> str:
    """The innermost line that is not torch's own."""
    for frame in frames:
        name = str(frame.get("filename", ""))
        if name and "/torch/" not in name and name != "??":
            return f"{Path(name).name}:{frame.get('line')} {frame.get('name')}"
    return ""


def _groups(config: dict[str, Any]) -> dict[str, list[int]]:
    found = {}
    for key, about in config.items():
        ranks = re.findall(r"\d+", str(about.get("ranks", "")))
        # The default group of gloo has no name there, and is called 0 in its calls.
        found[str(about.get("name") or key or "0")] = [int(rank) for rank in ranks]
    return found


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total
