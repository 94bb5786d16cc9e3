"""`cairn prune`: zeros in place of weights, or fewer experts, and how much that costs."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Prune(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prune a model: weights by magnitude, Wanda or SparseGPT, or whole experts by what they add (REAP).

    Writes a checkpoint of the same format with zeros in it, or with fewer experts, and a page with the curve of
    perplexity over what is gone. Zeros save nothing by themselves: no server of today has a kernel for 2:4.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a folder, a .gguf file, owner/name on the hub, or the name of a packaged model"""
    out: Path
    """a new folder"""
    method: Literal["magnitude", "wanda", "sparsegpt"] = "wanda"
    sparsity: float | None = None
    """share of the weights of each matrix that becomes zero"""
    pattern: str | None = None
    """n:m keeps n of each m neighbours: 2:4"""
    experts: Positive | None = None
    """how many experts of each layer stay"""
    curve: bool = True
    """measure a quarter, half and three quarters of what is asked for as well"""
    data: Path | None = None
    """calibration text: .txt, .jsonl with text or messages, or a token store; by default the texts of the labs"""
    judge: Path | None = None
    """text that perplexity is measured on; by default the end of the calibration text"""
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    """windows of calibration text; 0: 32 on a CPU, 512 on a GPU"""
    length: Annotated[int, msgspec.Meta(ge=0)] = 0
    """tokens of a window; 0: 512 on a CPU, 2,048 on a GPU"""
    judged: Positive = 8
    """windows that are kept apart to judge with"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """type of the weights that are written; auto: as stored"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    config: Path | None = None
    """a TOML file with any of these settings"""
    json: bool = False
    """print the result as JSON"""


def run(args: list[str]) -> int:
    options = load(Prune, args=args, env_prefix="CAIRN_PRUNE_", file_field="config").value
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    from cairn.compress.prune_run import PruneJob, prune

    say = (lambda text: None) if options.json else (lambda text: print(text, file=sys.stderr))
    fields = {name: getattr(options, name) for name in PruneJob.__struct_fields__}
    result = prune(PruneJob(**fields), say)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
        return 0
    print(result.quality.words())
    print(f"{result.out}: {result.what} by {result.method}, page {Path(result.out) / 'prune.html'}")
    return 0
