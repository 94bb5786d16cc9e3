"""Checkpoints with one planted fault: cairn-tiny with another config, weights or template; and its plain path."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cairn.models.hub import SHIPPED
from cairn.models.transformer import Transformer
from cairn.verify.hypotheses import Hypothesis
from cairn.verify.plain_path import PlainPath, ProbePrompt

TINY = SHIPPED / "cairn-tiny"
WINDOW = 64


def copy(folder: Path, config: dict | None = None, template: str | None = None) -> Path:
    """cairn-tiny with some fields of its config changed, and perhaps another chat template."""
    folder.mkdir(parents=True)
    for file in TINY.iterdir():
        if file.suffix in (".json", ".jinja", ".safetensors"):
            (folder / file.name).symlink_to(file)
    if config is not None:
        written = json.loads((TINY / "config.json").read_text()) | config
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(written))
    if template is not None:
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.jinja").write_text(template)
    return folder


def windowed(folder: Path, window: int) -> Path:
    """Every second layer sees `window` tokens."""
    kinds = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(11)]
    return copy(
        folder, {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    )


def quantised(folder: Path, bits: int, group: int = 128) -> Path:
    """Matrices rounded symmetrically in groups: another scheme than the one that verification tries."""
    copy(folder)
    tensors = load_file(TINY / "model.safetensors")
    most = 2 ** (bits - 1) - 1
    for name, weight in tensors.items():
        if weight.ndim == 2 and "embed" not in name:
            rows, columns = weight.shape
            w_NGE = weight.float().view(rows, columns // group, group)
            step_NG1 = w_NGE.abs().amax(-1, keepdim=True).clamp(min=1e-8) / most
            tensors[name] = (
                ((w_NGE / step_NG1).round() * step_NG1).view(rows, columns).to(torch.bfloat16)
            )
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(TINY / "model.safetensors", folder / "model.safetensors")
    return folder


class SharedPlainPath(PlainPath):
    """Builds each hypothesis once and scores each text with it once: most tests ask the same of cairn-tiny."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self._models: dict[str, Transformer] = {}
        self._scores: dict[tuple[Transformer, tuple[int, ...], int], torch.Tensor] = {}

    def _under(self, hypothesis: Hypothesis) -> Transformer:
        if hypothesis.says not in self._models:
            self._models[hypothesis.says] = super()._under(hypothesis)
        return self._models[hypothesis.says]

    def _score(self, model: Transformer, prompt: ProbePrompt, shared: int) -> torch.Tensor:
        key = (model, tuple(prompt.ids), prompt.first)
        if key not in self._scores:
            self._scores[key] = super()._score(model, prompt, shared)
        return self._scores[key]
