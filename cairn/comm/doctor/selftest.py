"""Self-test of the doctor: injects every fault, and checks that it is named and nothing else is.

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
    nccl, inspector = samples.nccl_log, samples.inspector
    small = (*[64 << 10] * 40, MIB, 64 * MIB, 256 * MIB)

    def case(
        name: str,
        cause: Cause,
        where: str,
        make: Callable[[], str],
        sizes: list[int] | None = None,
    ) -> SelftestCase:
        return SelftestCase(name, cause, where, _text(make), by, sizes)

    loopback = partial(nccl, interface="lo", address="127.0.0")
    over_tcp = partial(nccl, between="NET/Socket/{rail}", network="Socket")
    no_gpudirect = partial(nccl, between="NET/IB/{rail}")
    no_peer_access = partial(nccl, within="SHM/direct/direct")
    small_messages = partial(inspector, sizes=small, each=43)
    return [
        case("NCCL on loopback", "wrong interface", "node0", loopback),
        case("NCCL over TCP", "transport downgrade", "between hosts", over_tcp),
        case("no GPUDirect", "transport downgrade", "GPU and NIC", no_gpudirect),
        case("no peer access", "transport downgrade", "within a host", no_peer_access),
        case("NCCL ring over hosts", "rank mapping", "2 hosts", partial(nccl, interleaved=True)),
        case("straggler in Inspector", "straggler", "rank 5", partial(inspector, late=5)),
        case("slow rail in Inspector", "slow network", "node2", partial(inspector, slow=2)),
        case("small messages in Inspector", "message too small", "below", small_messages),
        case("small messages in a sweep", "message too small", "below", samples.sweep, [64 << 10]),
        case("gloo told to use loopback", "wrong interface", "127.0.0.1", samples.gloo_failure),
        case("NCCL timeout in a job's log", "hang", "rank 2", samples.timeouts),
        case("damaged data", "wrong result", "sample", partial(samples.sweep, wrong=3)),
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
