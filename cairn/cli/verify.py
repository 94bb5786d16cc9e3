"""`cairn verify`: does a deployment compute the model that it says, and if not, what differs?

cairn verify MODEL                       the engine of this machine against the plain float32 path
cairn verify MODEL --url URL             a server against the plain path of the files here
cairn verify MODEL --against FILE        and against a record of another day or machine
"""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.columns import lines
from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.prose import in_terminal
from cairn.core.units import format_duration
from cairn.models.hub import AUTO, default_model
from cairn.report.progress import Activity

if TYPE_CHECKING:
    from cairn.verify.check import VerifyVerdict
    from cairn.verify.evidence import ModelEvidence
    from cairn.verify.run import EvidenceComparison


SIZES = {  # of a difference, by the least rounding that makes one like it
    "float32": "rounding in float32",
    "bfloat16": "rounding in bfloat16",
    "int8": "8-bit weights",
    "int4": "4-bit weights",
    None: "more than 4-bit weights",
}


class Verify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compare log-probabilities of fixed texts with the plain float32 path of MODEL, and name what differs.

    MODEL is what `cairn serve` takes, a run of `cairn train` included. Exit status 1: it differs.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = AUTO
    """a folder, a GGUF file, a run, or a name; without it the default model"""
    url: str | None = None
    """an OpenAI-compatible server to verify, such as http://127.0.0.1:8000; without it the engine of this machine"""
    served_model: str = ""
    """the name of the model on that server; by default its first one"""
    against: Path | None = None
    """a record of an earlier run, from here or elsewhere"""
    record: Path | None = None
    """write what was observed into this file"""
    expect: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    """rounding that is no difference; auto: bfloat16, or as the file or --weights say"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of the engine here"""
    weights: str = "auto"
    """form of the engine's weights: float, int8, int4, fp8"""
    config: Path | None = None
    """a TOML file with any of these settings"""
    json: bool = False
    """print the verdict as JSON"""


def run(args: list[str]) -> int:
    options = load(Verify, args=args, env_prefix="CAIRN_VERIFY_", file_field="config").value
    began = time.perf_counter()
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    from cairn.models.runnable import open_model
    from cairn.verify.evidence import read_evidence, write_evidence
    from cairn.verify.run import (
        EngineOptions,
        compare,
        expected_level,
        explainable,
        gather,
        judge,
        with_causes,
    )
    from cairn.verify.server_source import ServerClient

    record = None if options.against is None else read_evidence(options.against)
    name = _model(options)
    opened = open_model(name)
    key = os.environ.get("CAIRN_API_KEY") or os.environ.get("OPENAI_API_KEY")
    server = None if options.url is None else ServerClient(options.url, options.served_model, key)
    engine = EngineOptions(options.device, options.dtype, options.weights)
    working = Activity(shown=not options.json)
    evidence = gather(opened, engine, server, working)
    if options.record is not None:
        write_evidence(evidence, options.record)
    own = None if server is not None else engine
    expected = expected_level(opened, own) if options.expect == "auto" else options.expect
    verdict = judge(opened, evidence, expected, working, options.device)
    compared = None if record is None else compare(evidence, record)
    if record is not None and compared is not None and explainable(compared, verdict):
        # This deployment computes the model, so what differs is in the record.
        of_record = judge(opened, record, expected, working, options.device)
        compared = with_causes(compared, of_record)
    working.clear()
    if options.json:
        command = shlex.join(["cairn", "verify", *args])
        shown = {"verdict": verdict, "compared": compared, "command": command}
        print(msgspec.json.format(msgspec.json.encode(shown)).decode())
    else:
        _show(evidence, verdict, compared, time.perf_counter() - began)
    differs = verdict.status == "differs" or (compared is not None and compared.status == "differs")
    return int(differs)


def _model(options: Verify) -> str:
    if options.model != AUTO:
        return options.model
    if options.url is not None:
        raise UsageError(
            "--url is given without MODEL: the plain path needs the files of the model",
            hint="name them: cairn verify MODEL --url URL",
        )
    default = default_model()
    print(default.why, file=sys.stderr)
    return default.name


def _show(
    evidence: "ModelEvidence",
    verdict: "VerifyVerdict",
    compared: "EvidenceComparison | None",
    seconds: float,
) -> None:
    source = evidence.source.splitlines()[0].partition("; ")[0]
    asked = source if evidence.model in source else f"{source}: {evidence.model}"
    print(in_terminal(f"answers of {asked}", "  "))
    for line in lines(
        ["prompts", "tokens", "same top-1", "KL", "largest KL", "as large as"],
        _rows(verdict),
        left={0, 5},
    ):
        print(f"  {line}")
    for part in verdict.parts:
        if part.finding is not None and part.finding.explained > 0:
            share = f"{part.finding.explained:.0%} of the difference"
            print(f"  {part.part}: {part.finding.name} explains {share}")
    if compared is not None:
        found = compared.agreement
        notes = f" ({'; '.join(compared.notes)})" if compared.notes else ""
        print(
            f"against the record: {compared.status}, KL {found.kl:.2e}, top-1 {found.top1:.1%}{notes}"
        )
        for cause in compared.causes:
            print(in_terminal(f"the record has {cause.says}", "  "))
    took = format_duration(round(seconds, 1))
    said = f"{verdict.status}: {verdict.says} ({verdict.tried} causes tried, {took})"
    print(in_terminal(said, "  "))


def _rows(verdict: "VerifyVerdict") -> list[list[str]]:
    return [
        [
            part.part,
            str(part.places),
            f"{part.top1:.1%}",
            f"{part.kl:.2e}",
            f"{part.largest_kl:.2e}",
            SIZES[part.level],
        ]
        for part in verdict.parts
    ]
