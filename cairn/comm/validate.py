"""Validation of the cost model against published sweeps.

Each sweep calibrates the three constants of its fabric; `held_out` is the error of points that the
calibration had not seen. The first says how well three constants describe a machine, the second how
far a prediction can be trusted. Reads `published`, knows no terminal.
"""

import msgspec
import numpy as np

from cairn.comm.nccl_model import (
    NcclCalibration,
    calibrate,
    choose,
    cluster_of,
    held_out_errors,
    median_error,
)
from cairn.comm.published import ALL_REDUCE, PublishedSweep

LAUNCH = NcclCalibration(launch_us=20.0)  # the model as NCCL has it, and a guess for the launch


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    published_us: float
    predicted_us: float
    algorithm: str  # and protocol, as the model would choose

    @property
    def error(self) -> float:
        return self.predicted_us / self.published_us - 1


class ModelValidation(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    calibration: NcclCalibration
    uncalibrated: float  # median relative errors
    calibrated: float
    held_out: float
    worst: float
    rows: list[SweepRow]


def validate(sweep: PublishedSweep) -> ModelValidation:
    cluster = cluster_of(sweep.fabric, sweep.gpus, sweep.nodes, sweep.nic_gb_per_s)
    calibration, error = calibrate(cluster, sweep.points)
    rows = []
    for point in sweep.points:
        best = choose(cluster, "all_reduce", point.bytes, calibration)
        rows.append(
            SweepRow(
                bytes=point.bytes,
                published_us=point.us,
                predicted_us=best.us,
                algorithm=f"{best.algorithm}/{best.protocol}",
            )
        )
    return ModelValidation(
        name=sweep.name,
        source=sweep.source,
        calibration=calibration,
        uncalibrated=median_error(cluster, sweep.points, LAUNCH),
        calibrated=error,
        held_out=float(np.median(held_out_errors(cluster, sweep.points))),
        worst=max(abs(row.error) for row in rows),
        rows=rows,
    )


def validate_all() -> list[ModelValidation]:
    return [validate(sweep) for sweep in ALL_REDUCE]
