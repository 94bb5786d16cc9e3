"""`cairn quantize`: a model in fewer bits, and how much it lost."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Quantize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Quantise a model: compressed-tensors that transformers, vLLM and `cairn serve` load, or a GGUF file.

    Schemes: w4a16 (int4 in groups), w8a8 (int8, activations by token), fp8, fp8-block (128 x 128), mxfp4, nvfp4; as
    GGUF q8_0, q4_0. Methods: rtn (round to nearest), gptq, awq (4 bits), smoothquant (w8a8). Layers are calibrated
    one after another on the output of the quantised ones before. The report is a page beside the weights.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a folder, a .gguf file, owner/name on the hub, or the name of a packaged model"""
    scheme: Literal["w4a16", "w8a8", "fp8", "fp8-block", "mxfp4", "nvfp4", "q8_0", "q4_0"] = "w4a16"
    method: Literal["rtn", "gptq", "awq", "smoothquant"] = "gptq"
    out: Path
    """a new folder"""
    data: Path | None = None
    """calibration text: .txt, .jsonl with text or messages, or a token store; by default the texts of the labs"""
    judge: Path | None = None
    """text that perplexity and KL are measured on; by default the end of the calibration text"""
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    """windows of calibration text; 0: 32 on a CPU, 512 on a GPU"""
    length: Annotated[int, msgspec.Meta(ge=0)] = 0
    """tokens of a window; 0: 512 on a CPU, 2,048 on a GPU, never more than the model's context"""
    judged: Positive = 8
    """windows that are kept apart to judge with"""
    group: Positive | None = None
    """w4a16: weights that share a scale; by default 128, or the largest of 64, 32, 16 that divides every row"""
    asymmetric: bool = False
    """w4a16: a zero point for each group"""
    act_order: bool = True
    """gptq: columns with the largest inputs first, at scales that are set before"""
    strength: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """smoothquant: how much of an outlier moves into the weights; by default what loses least, for each matrix"""
    keep: tuple[str, ...] = ()
    """matrices that stay in 16 bits: parts of their names, such as feed_forward.down or layers.0., or auto: as many of
    those that cost most as --most-added takes"""
    most_added: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.005
    """--keep auto: the share of perplexity that the matrices in few bits may add, by an estimate from the text"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """type of scales and of what is not quantised; auto: as stored"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    config: Path | None = None
    """a TOML file with any of these settings"""
    json: bool = False
    """print the result as JSON"""


def run(args: list[str]) -> int:
    options = load(Quantize, args=args, env_prefix="CAIRN_QUANTIZE_", file_field="config").value
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    from cairn.compress.quantize_run import QuantizeJob, quantize

    say = (lambda text: None) if options.json else (lambda text: print(text, file=sys.stderr))
    job = QuantizeJob(
        model=options.model,
        scheme=options.scheme,
        method=options.method,
        out=options.out,
        data=options.data,
        judge=options.judge,
        samples=options.samples,
        length=options.length,
        judged=options.judged,
        group=options.group,
        symmetric=not options.asymmetric,
        ordered=options.act_order,
        strength=options.strength,
        keep=tuple(part for part in options.keep if part != "auto"),
        most_added=options.most_added if "auto" in options.keep else None,
        dtype=options.dtype,
        device=options.device,
    )
    result = quantize(job, say)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
        return 0
    print(result.quality.words())
    print(f"{result.out}: {result.scheme}, page {Path(result.out) / 'quantize.html'}")
    return 0
