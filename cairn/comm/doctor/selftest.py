"""Does the doctor name what was broken, and nothing else? Every fault on purpose, then health.

Faults of processes are real ranks (see `inject`); faults that need GPUs or a fabric are logs in the formats of
NCCL, its Inspector and nccl-tests (see `samples`). A case is passed when the cause and the place are named,
and no other cause is. Health is real ranks and all logs together, with another seed each time.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.comm.doctor import inject, samples
from cairn.comm.doctor.diagnose import diagnose
from cairn.comm.doctor.findings import Cause, CommFinding

MIB = 1 << 20


class SelftestCase(NamedTuple):
    name: str
    cause: Cause
    where: str  # has to be in the finding
    make: Callable[[Path], object]  # writes files
    by: str  # real ranks, or a log
    sizes: list[int] | None = None


class SelftestVerdict(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    by: str
    expected: str
    named: list[str]  # cause: where
    right: bool
    evidence: list[str]
    seconds: float


def cases() -> list[SelftestCase]:
    real, log = "real ranks", "log"
    delayed, made_up_address = "real ranks, senders held back", "real ranks, made-up address"
    return [
        SelftestCase("slow host", "slow host", "rank 2", inject.slow_host, real),
        SelftestCase("bad map", "rank mapping", "0 1 2 3", inject.bad_map, delayed),
        SelftestCase("slow link", "slow link", "ranks 1 and 3", inject.slow_link, delayed),
        SelftestCase("lossy link", "lossy link", "ranks 0 and 1", inject.lossy_link, delayed),
        SelftestCase("straggler", "straggler", "rank 2", inject.straggler, real),
        SelftestCase("missing rank", "hang", "rank 1", inject.missing, real),
        SelftestCase("dead rank", "hang", "rank 3", inject.dead, real),
        SelftestCase(
            "wrong interface", "wrong interface", "rank 1", inject.wrong_interface, made_up_address
        ),
        SelftestCase("mismatched sizes", "mismatch", "rank 2", inject.other_size, real),
        SelftestCase("mismatched operations", "mismatch", "rank 1", inject.other_operation, real),
        SelftestCase(
            "missing rank, our backend",
            "hang",
            "rank 1",
            partial(inject.missing, backend="cairn"),
            real,
        ),
        SelftestCase(
            "mismatched sizes, our backend",
            "mismatch",
            "rank 2",
            partial(inject.other_size, backend="cairn"),
            real,
        ),
        *_log_cases(log),
    ]


def _log_cases(by: str) -> list[SelftestCase]:
    nccl = samples.nccl_log
    return [
        SelftestCase(
            "NCCL on loopback",
            "wrong interface",
            "node0",
            _text(lambda: nccl(interface="lo", address="127.0.0")),
            by,
        ),
        SelftestCase(
            "NCCL over TCP",
            "transport downgrade",
            "between hosts",
            _text(lambda: nccl(between="NET/Socket/{rail}", network="Socket")),
            by,
        ),
        SelftestCase(
            "no GPUDirect",
            "transport downgrade",
            "GPU and NIC",
            _text(lambda: nccl(between="NET/IB/{rail}")),
            by,
        ),
        SelftestCase(
            "no peer access",
            "transport downgrade",
            "within a host",
            _text(lambda: nccl(within="SHM/direct/direct")),
            by,
        ),
        SelftestCase(
            "NCCL ring over hosts",
            "rank mapping",
            "2 hosts",
            _text(lambda: nccl(interleaved=True)),
            by,
        ),
        SelftestCase(
            "straggler in Inspector",
            "straggler",
            "rank 5",
            _text(lambda: samples.inspector(late=5)),
            by,
        ),
        SelftestCase(
            "slow rail in Inspector",
            "slow network",
            "node2",
            _text(lambda: samples.inspector(slow=2)),
            by,
        ),
        SelftestCase(
            "small messages in Inspector",
            "message too small",
            "below",
            _text(
                lambda: samples.inspector(
                    sizes=(*[64 << 10] * 40, MIB, 64 * MIB, 256 * MIB), each=43
                )
            ),
            by,
        ),
        SelftestCase(
            "small messages in a sweep",
            "message too small",
            "below",
            _text(samples.sweep),
            by,
            [64 << 10],
        ),
        SelftestCase(
            "gloo told to use loopback",
            "wrong interface",
            "127.0.0.1",
            _text(samples.gloo_failure),
            by,
        ),
        SelftestCase("NCCL timeout in a job's log", "hang", "rank 2", _text(samples.timeouts), by),
        SelftestCase(
            "damaged data", "wrong result", "sample", _text(lambda: samples.sweep(wrong=3)), by
        ),
    ]


def _text(make: Callable[[], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / "sample.log").write_text(make())


def run_case(case: SelftestCase) -> SelftestVerdict:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="cairn-doctor-") as name:
        case.make(Path(name))
        findings = diagnose([Path(name)], case.sizes).findings
    right = bool(findings) and all(one.cause == case.cause for one in findings)
    right = right and any(case.where in one.where for one in findings)
    return _verdict(case.name, case.by, f"{case.cause}: {case.where}", findings, right, began)


def run_healthy(seed: int) -> SelftestVerdict:
    """Real ranks and every kind of log, all well."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="cairn-doctor-") as name:
        folder = Path(name)
        inject.healthy(folder, seed)
        (folder / "nccl.log").write_text(samples.nccl_log(seed=seed))
        (folder / "inspector.jsonl").write_text(samples.inspector(seed=seed))
        (folder / "sweep.txt").write_text(samples.sweep(seed=seed))
        findings = diagnose([folder], [64 * MIB]).findings
    return _verdict(
        f"healthy {seed}", "real ranks and logs", "nothing", findings, not findings, began
    )


def _verdict(
    name: str, by: str, expected: str, findings: list[CommFinding], right: bool, began: float
) -> SelftestVerdict:
    return SelftestVerdict(
        name=name,
        by=by,
        expected=expected,
        named=[f"{one.cause}: {one.where}" for one in findings],
        right=right,
        evidence=[line for one in findings for line in one.evidence],
        seconds=round(time.perf_counter() - began, 3),
    )
