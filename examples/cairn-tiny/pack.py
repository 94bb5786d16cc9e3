"""Puts what build.sh made where the package has it: weights, tokenizer, evaluation, the course of the training.

    python pack.py WORK_FOLDER --to cairn/models/shipped/cairn-tiny

    WORK/runs/sft/model/*                    -> as they are
    WORK/evaluation.json (on the GPU that trained it), evaluation_cpu.json, seen.json
                                             -> evaluation.json   {"gpu": ..., "cpu": ..., "seen": ...}
    WORK/{pretrain,sft}.json, their logs     -> training.json, loss.svg

Refuses what would make the package larger than 20 MB. Does not write the card: that is for a person, and a test
holds it to these files.
"""

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from cairn.report.plot import Point, Series, chart

LIMIT_BYTES = 20_000_000
MODEL = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
STORES = ("wiki", "mdn", "peps", "sampled", "grammar", "sums", "chats")
# The page's colours have names that only the page knows; a file of its own needs its own.
STYLE = """<style>svg{background:#fdfdfb}text{font:11px system-ui,sans-serif;fill:#5b6670}.grid,.axis{stroke:#d9dcd6}
.stroke{fill:none;stroke-width:1.6}.c0{stroke:#2f6fa8}.c1{stroke:#c2702a}.n0{fill:#2f6fa8}.n1{fill:#c2702a}</style>"""


def course(work: Path, name: str) -> dict[str, Any]:
    """One run: how long, how fast, and its losses as [step, loss]."""
    said = json.loads((work / f"{name}.json").read_text())
    log = (work / "runs" / name / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in log]
    tokens = rows[-1]["tokens"]
    return {
        "steps": said["step"],
        "tokens": tokens,
        "seconds": round(said["seconds"], 1),
        "tokens_per_s": round(tokens / said["seconds"]),
        "peak_gib": round(rows[-1]["peak_gib"], 1),
        "bad_steps": said["bad_steps"],
        "losses": [[row["step"], round(row["loss"], 4)] for row in rows],
    }


def stored_tokens(index: Path) -> int:
    """The number of tokens that a store's index gives in its header."""
    with index.open("rb") as file:
        file.seek(8)
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length))["tokens"]


def training(work: Path) -> dict[str, Any]:
    weights = (work / "runs/sft/model/model.safetensors").read_bytes()
    return {
        "sha256": hashlib.sha256(weights).hexdigest(),
        "made": json.loads((work / "corpus/counts.json").read_text()),
        "tokens": {name: stored_tokens(work / "tokens" / name / "docs.idx") for name in STORES},
        "pretrain": course(work, "pretrain"),
        "sft": course(work, "sft"),
    }


def loss_plot(pretrain: list[Point], sft: list[Point]) -> str:
    """Both curves over steps, the second where the first ends, as a picture that stands alone."""
    end = pretrain[-1][0]
    moved = [(end + step, loss) for step, loss in sft]
    names = ("pretraining: every token", "fine-tuning: the assistant's words")
    series = [Series(names[0], pretrain), Series(names[1], moved)]
    figure = chart("cairn-tiny", series, x="step", y="loss (nats per token)")
    found = re.search(r"<svg.*</svg>", figure, re.S)
    if found is None:
        raise ValueError("the plot has no picture")
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="390"'
    legend = "".join(
        f'<text x="250" y="{72 + 16 * place}" class="n{place}">{name}</text>'
        for place, name in enumerate(names)
    )
    body = found[0].removeprefix("<svg").removesuffix("</svg>").replace(">", f">{STYLE}", 1)
    return f"{head}{body}{legend}</svg>\n"


def written(value: object) -> str:
    """JSON with one line for each entry, and a list of points on a single one."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\](,?)\s*", r"[\1, \2]\3 ", text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for name in MODEL:
        shutil.copyfile(options.work / "runs/sft/model" / name, options.to / name)
    found = training(options.work)
    evaluations = {"gpu": "evaluation.json", "cpu": "evaluation_cpu.json", "seen": "seen.json"}
    measured = {
        place: json.loads((options.work / name).read_text(encoding="utf-8"))
        for place, name in evaluations.items()
    }
    (options.to / "training.json").write_text(written(found), encoding="utf-8")
    (options.to / "evaluation.json").write_text(written(measured), encoding="utf-8")
    curves = [[tuple(point) for point in found[name]["losses"]] for name in ("pretrain", "sft")]
    (options.to / "loss.svg").write_text(loss_plot(*curves), encoding="utf-8")
    size = sum(path.stat().st_size for path in options.to.rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        raise SystemExit(f"{options.to} has {size:,} bytes, more than {LIMIT_BYTES:,}")
    print(f"{options.to}: {size:,} bytes")


if __name__ == "__main__":
    main()
