"""Gathers evidence from where it is asked for and judges it: what `cairn verify` does, without its text."""

import msgspec
import torch

from cairn.core.errors import TokenizerError
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import default_device
from cairn.models.runnable import DTYPES, OpenModel
from cairn.models.tokenizer import Tokenizer
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model
from cairn.serve.llm import LLM
from cairn.verify.agreement import LogprobAgreement, agreement
from cairn.verify.ask import fingerprint, from_engine, probes_of
from cairn.verify.check import ModelCheck, VerifyFinding, VerifyVerdict, Watch
from cairn.verify.evidence import ModelEvidence
from cairn.verify.explain import Level
from cairn.verify.plain_path import PlainPath
from cairn.verify.server_source import ServerClient, from_server

SAME_KL = 1e-7  # between two records: the same computation
ROUNDING_KL = 5e-3  # between two records: other kernels, another type


class EngineOptions(msgspec.Struct, frozen=True):
    """Options of the engine of this machine."""

    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"


def tokenizer_of(opened: OpenModel) -> Tokenizer:
    if opened.tokenizer is None:
        raise TokenizerError(
            f"{opened.name} has no tokenizer, so the fixed texts cannot be read",
            hint="use a checkpoint folder with tokenizer.json, or a GGUF file",
        )
    return opened.tokenizer


def gather(
    opened: OpenModel,
    engine: EngineOptions,
    server: ServerClient | None,
    watch: Watch = lambda said: None,
) -> ModelEvidence:
    probes = probes_of(opened.spec, tokenizer_of(opened))
    if server is not None:
        found = from_server(server, probes, tokenizer_of(opened), watch)
    else:
        watch(f"the engine loads {opened.name}")
        options = {"device": engine.device, "dtype": engine.dtype, "weights": engine.weights}
        room = max(len(probe.ids) + probe.answer for probe in probes)
        made = LLM(
            opened.name,
            opened=opened,
            max_num_seqs=8,
            max_model_len=room + 1,
            load_in_advance=False,  # a few short texts need few graphs
            **options,
        )
        with made as llm:
            watch(f"the engine answers {len(probes)} fixed prompts")
            found = from_engine(llm, probes)
    return msgspec.structs.replace(found, fingerprint=fingerprint(opened))


def expected_level(opened: OpenModel, engine: EngineOptions | None) -> Level:
    """Expected rounding: that of the file's quantisation or of the engine's options."""
    if engine is not None and engine.weights in ("int4", "int8"):
        return "int4" if engine.weights == "int4" else "int8"
    if engine is not None and engine.weights == "fp8":
        return "int4"
    quantised = opened.checkpoint is not None and opened.checkpoint.stored_bits() < 16
    return "int8" if quantised else "bfloat16"


def judge(
    opened: OpenModel, evidence: ModelEvidence, expected: Level, watch: Watch, device: str = "auto"
) -> VerifyVerdict:
    """Against the plain float32 path of this model."""
    device = default_device() if device == "auto" else device
    watch("the same weights are loaded in float32, for the plain path")
    path = PlainPath(_plain_model(opened, device))
    return ModelCheck(path, opened.spec, opened.tokenizer, watch).verdict(evidence, expected)


def _plain_model(opened: OpenModel, device: str) -> Transformer:
    if opened.checkpoint is None:
        return random_model(opened.spec, ModelBuild(device, DTYPES["float32"])).eval()
    return opened.checkpoint.load(device, torch.float32, fused=False)


class EvidenceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two records side by side."""

    status: str  # same | rounding | differs
    agreement: LogprobAgreement
    notes: list[str]
    causes: list[
        VerifyFinding
    ] = []  # of what is recorded, where the deployment itself computes the model


def compare(evidence: ModelEvidence, record: ModelEvidence) -> EvidenceComparison:
    found = agreement(evidence.observations, record.observations)
    notes = []
    if record.fingerprint and evidence.fingerprint and record.fingerprint != evidence.fingerprint:
        notes.append("the files of the weights are not the same")
    for name, value in evidence.versions.items():
        before = record.versions.get(name)
        if before is not None and before != value:
            notes.append(f"{name} was {before} and is {value}")
    if found.empty:
        notes.append("no place is in both records")
    status = "same" if found.kl <= SAME_KL else "rounding" if found.kl <= ROUNDING_KL else "differs"
    return EvidenceComparison(
        status="differs" if found.empty else status, agreement=found, notes=notes
    )


def explainable(compared: EvidenceComparison, verdict: VerifyVerdict) -> bool:
    """Is it worth a search what the record was computed with, on the plain path of this model?"""
    other = compared.status != "same" and not compared.agreement.empty
    return other and verdict.status == "agrees"


def with_causes(compared: EvidenceComparison, of_record: VerifyVerdict) -> EvidenceComparison:
    """A named cause is a difference, however small; weights that were rounded otherwise are judged by size alone."""
    named = [one for one in of_record.findings if one.explained > 0]
    causes = [one for one in named if one.name != "quantisation"]
    if not causes:
        return compared
    return msgspec.structs.replace(compared, status="differs", causes=causes)
