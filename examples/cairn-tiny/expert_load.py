"""How often is each expert visited? Counted over some texts, with the router that the engine runs.

python expert_load.py runs/experts/model loads.json TEXT.md ...     writes one row for each layer
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.experts import ExpertLayer
from cairn.models.transformer import Transformer


@torch.inference_mode()
def loads(model: Transformer, texts: list[list[int]]) -> list[list[int]]:
    """Visits of each expert, layer by layer."""
    counts: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.layers):
        if isinstance(layer.feed_forward, ExpertLayer):
            counts[number] = torch.zeros(layer.feed_forward.experts.count, dtype=torch.long)
            layer.feed_forward.router.register_forward_hook(partial(_count, counts[number]))
    for text in texts:
        attend = PackedDocuments([len(text)])
        model(torch.tensor(text), attend.positions_T(), attend)
    return [found.tolist() for found in counts.values()]


def _count(
    visits_E: torch.Tensor, module: Any, inputs: Any, found: tuple[torch.Tensor, ...]
) -> None:
    visits_E += found[1].flatten().bincount(minlength=len(visits_E))


def main(folder: str, out: str, *files: str) -> None:
    checkpoint = open_checkpoint(Path(folder))
    model, tokenizer = checkpoint.load("cpu", torch.float32), checkpoint.tokenizer()
    if tokenizer is None:
        raise SystemExit(f"{folder} has no tokenizer")
    context, texts = model.spec.context, []
    for file in files:
        ids = tokenizer.encode(Path(file).read_text())
        texts += [ids[i : i + context] for i in range(0, len(ids), context)]
    rows = []
    for visits in loads(model, texts):
        mean = sum(visits) / len(visits)
        rows.append({"visits": visits, "max over mean": round(max(visits) / mean, 3)})
        print(
            f"most {max(visits) / mean:.2f} of the mean, least {min(visits) / mean:.2f}: {visits}"
        )
    Path(out).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
