"""Published failure data of large jobs, for validation of the model."""

import msgspec

from cairn.cluster.reliability import DAY, RATES, SCHEMES, mttf, outlook

FITTED = "no prediction: the rate llama-3 is this count"


class PublishedMttf(msgspec.Struct, frozen=True):
    gpus: int
    hours: float
    kind: str  # measured, or projected by the authors


# Kokolis and others, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025 (RSC-1).
META_MTTF = (
    PublishedMttf(8, 47.7 * 24, "measured"),
    PublishedMttf(1_024, 7.9, "measured"),
    PublishedMttf(16_384, 1.8, "projected"),
    PublishedMttf(131_072, 0.23, "projected"),
)

# "The Llama 3 Herd of Models", 2024: 54 days of pre-training on 16,384 H100, by cause of interruption. The counts;
# the percentages printed beside them do not add up.
LLAMA3_GPUS, LLAMA3_DAYS, LLAMA3_PLANNED = 16_384, 54, 47
LLAMA3_UNEXPECTED = {
    "faulty GPU": 148,
    "GPU HBM3 memory": 72,
    "software bug": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM memory": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "NCCL watchdog timeout": 7,
    "silent data corruption": 6,
    "GPU thermal or sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}


class Checked(msgspec.Struct, frozen=True):
    what: str
    published: float
    predicted: float
    unit: str
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def checks() -> list[Checked]:
    """Published beside predicted. Small jobs fail for more than hardware, and the law says so by its error."""
    rows = [
        Checked(
            f"MTTF, {row.gpus:,} GPUs ({row.kind})",
            row.hours,
            mttf(row.gpus, RATES["rsc-1"]) / 3600,
            "h",
            "" if row.kind == "projected" else "node failures alone explain only a part",
        )
        for row in META_MTTF
    ]
    seconds = LLAMA3_DAYS * DAY
    expected = seconds / mttf(LLAMA3_GPUS, RATES["llama-3"])
    rows.append(
        Checked(
            "Llama 3, unexpected interruptions in 54 days",
            sum(LLAMA3_UNEXPECTED.values()),
            expected,
            "",
            FITTED,
        )
    )
    rows.append(
        Checked(
            "Llama 3, hours between them",
            LLAMA3_DAYS * 24 / sum(LLAMA3_UNEXPECTED.values()),
            mttf(LLAMA3_GPUS, RATES["llama-3"]) / 3600,
            "h",
            FITTED,
        )
    )
    lived = outlook(LLAMA3_GPUS, SCHEMES["async"], RATES["llama-3"]).ettr
    rows.append(
        Checked("Llama 3, effective training time", 90, 100 * lived, "%", "published as above 90 %")
    )
    return rows


def expected_interruptions(gpus: int, days: float) -> dict[str, float]:
    """Llama 3's causes, for another size and time: each grows with GPUs and with days."""
    factor = gpus / LLAMA3_GPUS * days / LLAMA3_DAYS
    return {cause: count * factor for cause, count in LLAMA3_UNEXPECTED.items()}
