"""A text encoder by its name: its shape, tokenizer and pooling at once, its weights when they are needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cairn.models.build import ModelBuild
from cairn.models.checkpoint import check_device, default_device
from cairn.models.encoder.cpu_form import give_cpu_forms
from cairn.models.encoder.families import encoder_spec, is_bidirectional_decoder, is_encoder
from cairn.models.encoder.load import load_encoder
from cairn.models.encoder.model import BidirectionalDecoder
from cairn.models.encoder.spec import EncoderSpec
from cairn.models.families import from_hf
from cairn.models.hub import resolve
from cairn.models.runnable import RANDOM, OpenModel, choose_dtype
from cairn.models.safetensors_file import SafetensorsFolder, read_json
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.models.weights import load_model


class OpenEncoder(OpenModel):
    """An encoder whose weights are not loaded yet."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.encoder: EncoderSpec | None = None
        if is_bidirectional_decoder(config):
            shape = from_hf(_two_sided(config))
        else:
            self.encoder = encoder_spec(config)
            shape = self.encoder.shape
        super().__init__(name, shape, tokenizer_from_folder(folder), (), None)
        self.tensors = SafetensorsFolder(folder)

    def load_encoder(self, device: str, dtype: str, plain: bool = False) -> tuple[nn.Module, str]:
        """The model on a device, and why it has the type that it has."""
        device = default_device() if device == "auto" else device
        check_device(device)
        chosen, why = choose_dtype(self._stored(), False, device, dtype)
        build = ModelBuild(device, chosen, fused=True)
        if self.encoder is not None:
            encoder = load_encoder(self.encoder, self.tensors, build)
            if not plain:
                give_cpu_forms(encoder)
            return encoder, why
        model = load_model(self.spec, self.tensors, build._replace(fused=False))
        return BidirectionalDecoder(model).requires_grad_(False).eval(), why

    def _stored(self) -> torch.dtype:
        matrices = (name for name in self.tensors.names() if len(self.tensors.shape(name)) > 1)
        return self.tensors.dtype(next(matrices))


def open_encoder(name: str) -> OpenEncoder | None:
    """Open a text encoder; None for other models."""
    if name.startswith(RANDOM):
        return None
    folder = resolve(name)
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    return OpenEncoder(name, folder, config) if is_encoder(config) else None


def _two_sided(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same layers as a decoder's, with windows that count one side and the token itself."""
    window = config.get("sliding_window", 512)
    return {
        **config,
        "use_bidirectional_attention": False,
        "sliding_window": window // 2 + 1,
    }
