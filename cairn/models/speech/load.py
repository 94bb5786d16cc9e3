"""A Whisper from its folder: Hugging Face's files or CTranslate2's.

config.json, model.safetensors, tokenizer.json, generation_config.json     transformers
config.json, model.bin, tokenizer.json                                     CTranslate2: sizes are those of its tensors
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.safetensors_file import SafetensorsFolder, read_json
from cairn.models.speech.cpu_form import has_compiled_form
from cairn.models.speech.ctranslate2 import is_ctranslate2, read_variables
from cairn.models.speech.model import Whisper
from cairn.models.speech.spec import MULTILINGUAL, SpeechTokens, WhisperSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder

HEAD_SIZE = 64  # of every Whisper
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
Get = Callable[[str], Tensor]
# Ours -> the two others'; N is the number of a layer.
OUTSIDE = {
    "conv1": ("model.encoder.conv1", "encoder/conv1"),
    "conv2": ("model.encoder.conv2", "encoder/conv2"),
    "encoder_norm": ("model.encoder.layer_norm", "encoder/layer_norm"),
    "decoder_norm": ("model.decoder.layer_norm", "decoder/layer_norm"),
}
TABLES = {
    "sound_positions": (
        "model.encoder.embed_positions.weight",
        "encoder/position_encodings/encodings",
    ),
    "text_positions": (
        "model.decoder.embed_positions.weight",
        "decoder/position_encodings/encodings",
    ),
    "embedding": ("model.decoder.embed_tokens.weight", "decoder/embeddings/weight"),
}
INSIDE = {
    "attention_norm": ("self_attn_layer_norm", "self_attention/layer_norm"),
    "out": ("self_attn.out_proj", "self_attention/linear_1"),
    "look_norm": ("encoder_attn_layer_norm", "attention/layer_norm"),
    "look_q": ("encoder_attn.q_proj", "attention/linear_0"),
    "look_out": ("encoder_attn.out_proj", "attention/linear_2"),
    "feed_forward_norm": ("final_layer_norm", "ffn/layer_norm"),
    "up": ("fc1", "ffn/linear_0"),
    "down": ("fc2", "ffn/linear_1"),
}
JOINED = {
    "qkv": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention/linear_0",
    ),
    "look_kv": (("encoder_attn.k_proj", "encoder_attn.v_proj"), "attention/linear_1"),
}


class OpenWhisper(NamedTuple):
    """A Whisper whose weights are not on a device yet."""

    name: str
    spec: WhisperSpec
    tokens: SpeechTokens
    tokenizer: Tokenizer
    get: Get  # a tensor of ours, by its name

    def load(
        self,
        device: str,
        dtype: torch.dtype,
        plain: bool = False,
        stored: torch.dtype | None = None,
    ) -> Whisper:
        """`stored`: the type of its matrices in compiled layers where that is another one than the model's."""
        with torch.device("meta"):
            model = Whisper(self.spec)
        state = {}
        for name, blank in model.state_dict().items():
            tensor = self.get(name)
            if tensor.shape != blank.shape:
                raise WeightsError(
                    f"{name} has shape {list(tensor.shape)}, expected {list(blank.shape)}",
                    hint="the weights do not belong to this config.json",
                )
            state[name] = tensor.to(device, dtype)
        model.load_state_dict(state, assign=True)
        model.requires_grad_(False).eval()
        if not plain:
            model.fuse(stored or dtype)
        return model


def stored_dtype(opened: OpenWhisper) -> torch.dtype:
    """Float16 where its files store it so and this CPU has kernels for it."""
    stored = opened.get("encoder.0.up.weight").dtype
    half = stored == torch.float16 and has_compiled_form(opened.spec, stored)
    return torch.float16 if half else torch.float32


def is_whisper(folder: Path) -> bool:
    if not folder.is_dir() or not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    return config.get("model_type") == "whisper" or (
        "lang_ids" in config and is_ctranslate2(folder)
    )


def open_whisper(name: str, folder: Path) -> OpenWhisper:
    config, tokenizer = read_json(folder / "config.json"), tokenizer_from_folder(folder)
    if is_ctranslate2(folder):
        variables = read_variables(folder)
        spec = _spec_of(variables)
        lists = (config.get("suppress_ids"), config.get("suppress_ids_begin"))
        return OpenWhisper(
            name, spec, tokens_of(tokenizer, lists), tokenizer, _ctranslate2(variables)
        )
    generation = folder / "generation_config.json"
    settings = read_json(generation) if generation.is_file() else config
    spec = _spec(config, settings)
    lists = (settings.get("suppress_tokens"), settings.get("begin_suppress_tokens"))
    files = SafetensorsFolder(folder)
    return OpenWhisper(name, spec, tokens_of(tokenizer, lists), tokenizer, _transformers(files))


def tokens_of(tokenizer: Tokenizer, lists: tuple[Any, Any]) -> SpeechTokens:
    backend = tokenizer.backend
    find = backend.token_to_id
    languages = {
        match[1]: id
        for id, token in backend.get_added_tokens_decoder().items()
        if (match := LANGUAGE.fullmatch(token.content))
    }
    start, end, silent = (
        find(f"<|{name}|>") for name in ("startoftranscript", "endoftext", "notimestamps")
    )
    if start is None or end is None or silent is None:
        raise UnsupportedModel(
            f"{tokenizer.source} has no <|startoftranscript|>, <|endoftext|> or <|notimestamps|>",
            hint="this is no tokenizer of Whisper",
        )
    return SpeechTokens(
        start=start,
        end=end,
        transcribe=find("<|transcribe|>"),
        translate=find("<|translate|>"),
        no_timestamps=silent,
        no_speech=next(
            (find(one) for one in ("<|nospeech|>", "<|nocaptions|>") if find(one) is not None), None
        ),
        previous=find("<|startofprev|>"),
        languages=languages,
        suppressed=tuple(id for id in lists[0] or () if id >= 0),
        suppressed_first=tuple(id for id in lists[1] or () if id >= 0),
    )


def _spec(config: Mapping[str, Any], settings: Mapping[str, Any]) -> WhisperSpec:
    heads = config["encoder_attention_heads"]
    if heads != config["decoder_attention_heads"]:
        raise UnsupportedModel("config.json: encoder and decoder differ in their attention heads")
    return WhisperSpec(
        bins=config["num_mel_bins"],
        hidden=config["d_model"],
        heads=heads,
        encoder_layers=config["encoder_layers"],
        decoder_layers=config["decoder_layers"],
        intermediate=config["encoder_ffn_dim"],
        vocab=config["vocab_size"],
        frames=config.get("max_source_positions", 1500),
        context=config.get("max_target_positions", 448),
        multilingual=settings.get("is_multilingual", config["vocab_size"] >= MULTILINGUAL),
    )


def _spec_of(variables: Mapping[str, Tensor]) -> WhisperSpec:
    """CTranslate2's config.json has no sizes."""
    try:
        hidden, bins, _ = variables["encoder/conv1/weight"].shape
        vocab = variables["decoder/embeddings/weight"].shape[0]
        wide = variables["encoder/layer_0/ffn/linear_0/weight"].shape[0]
    except KeyError as missing:
        raise WeightsError(f"model.bin has no {missing}") from None
    return WhisperSpec(
        bins=bins,
        hidden=hidden,
        heads=hidden // HEAD_SIZE,
        encoder_layers=_layers(variables, "encoder"),
        decoder_layers=_layers(variables, "decoder"),
        intermediate=wide,
        vocab=vocab,
        frames=variables["encoder/position_encodings/encodings"].shape[0],
        context=variables["decoder/position_encodings/encodings"].shape[0],
        multilingual=vocab >= MULTILINGUAL,
    )


def _layers(variables: Mapping[str, Tensor], side: str) -> int:
    numbered = (re.match(rf"{side}/layer_(\d+)/", name) for name in variables)
    return len({match[1] for match in numbered if match})


def _transformers(files: SafetensorsFolder) -> Get:
    present = set(files.names())

    def stored(name: str) -> Tensor:
        bare = name.removeprefix("model.")
        if name not in present and bare not in present:
            raise WeightsError(f"the checkpoint has no tensor {name}")
        return files.tensor(name if name in present else bare)

    def get(name: str) -> Tensor:
        if name in TABLES:
            return stored(TABLES[name][0])
        path, _, kind = name.rpartition(".")
        if path in OUTSIDE:
            return stored(f"{OUTSIDE[path][0]}.{kind}")
        side, number, part = path.split(".")
        prefix = f"model.{side}.layers.{number}"
        if part in INSIDE:
            return stored(f"{prefix}.{INSIDE[part][0]}.{kind}")
        pieces = []
        for projection in JOINED[part][0]:
            if kind == "bias" and projection.endswith("k_proj"):  # keys have none
                values = projection.replace("k_proj", "v_proj")
                pieces.append(torch.zeros_like(stored(f"{prefix}.{values}.bias")))
            else:
                pieces.append(stored(f"{prefix}.{projection}.{kind}"))
        return torch.cat(pieces)

    return get


def _ctranslate2(variables: Mapping[str, Tensor]) -> Get:
    kinds = {"weight": "gamma", "bias": "beta"}

    def get(name: str) -> Tensor:
        if name in TABLES:
            return variables[TABLES[name][1]]
        path, _, kind = name.rpartition(".")
        own = kinds[kind] if path.endswith("norm") else kind
        if path in OUTSIDE:
            return variables[f"{OUTSIDE[path][1]}/{own}"]
        side, number, part = path.split(".")
        inside = INSIDE[part][1] if part in INSIDE else JOINED[part][1]
        return variables[f"{side}/layer_{number}/{inside}/{own}"]

    return get
