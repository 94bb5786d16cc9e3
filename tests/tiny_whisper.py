"""A tiny Whisper with random weights and its tokens, in Hugging Face's files and in CTranslate2's."""

import json
import struct
from pathlib import Path
from typing import Any

import tiny_tokenizers
import torch
import transformers
from tokenizers import AddedToken

STEERING = "endoftext startoftranscript en de translate transcribe startoflm startofprev nospeech notimestamps"


def tokenizer():
    backend = tiny_tokenizers.byte_level(300)
    times = [f"<|{at * 0.02:.2f}|>" for at in range(1501)]
    names = [f"<|{name}|>" for name in STEERING.split()]
    backend.add_tokens(
        [AddedToken(name, normalized=False, special=True) for name in [*names, *times]]
    )
    return backend


def reference() -> Any:
    torch.manual_seed(4)
    backend = tokenizer()
    end = backend.token_to_id("<|endoftext|>")
    config = transformers.WhisperConfig(
        vocab_size=backend.get_vocab_size(), num_mel_bins=80, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_target_positions=40, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=end + 1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name:
            torch.nn.init.normal_(parameter, 0.02, 0.12)
    return model.eval()


def save(folder: Path, model: Any) -> Path:
    model.generation_config = transformers.GenerationConfig(
        is_multilingual=True, suppress_tokens=[7, 9], begin_suppress_tokens=[20]
    )
    model.save_pretrained(folder)
    backend = tokenizer()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def save_ctranslate2(folder: Path, model: Any, int8: bool = False) -> Path:
    folder.mkdir()
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"lang_ids": [1], "suppress_ids": [7, 9], "suppress_ids_begin": [20]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").write_bytes(_file(_variables(model), int8))
    return folder


def _variables(model: Any) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    found = {
        "decoder/embeddings/weight": state["model.decoder.embed_tokens.weight"],
        "encoder/position_encodings/encodings": state["model.encoder.embed_positions.weight"],
        "decoder/position_encodings/encodings": state["model.decoder.embed_positions.weight"],
    }

    def plain(ours: str, theirs: str) -> None:
        for kind in ("weight", "bias"):
            found[f"{ours}/{kind}"] = state[f"{theirs}.{kind}"]

    def norm(ours: str, theirs: str) -> None:
        found[f"{ours}/gamma"], found[f"{ours}/beta"] = (
            state[f"{theirs}.weight"],
            state[f"{theirs}.bias"],
        )

    def joined(ours: str, theirs: str, names: str) -> None:
        found[f"{ours}/weight"] = torch.cat([state[f"{theirs}.{n}_proj.weight"] for n in names])
        zero = torch.zeros(model.config.d_model)
        found[f"{ours}/bias"] = torch.cat(
            [state.get(f"{theirs}.{n}_proj.bias", zero) for n in names]
        )

    for side in ("encoder", "decoder"):
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for at in range(2):
            ours, theirs = f"{side}/layer_{at}", f"model.{side}.layers.{at}"
            norm(f"{ours}/self_attention/layer_norm", f"{theirs}.self_attn_layer_norm")
            joined(f"{ours}/self_attention/linear_0", f"{theirs}.self_attn", "qkv")
            plain(f"{ours}/self_attention/linear_1", f"{theirs}.self_attn.out_proj")
            norm(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
            plain(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            plain(f"{ours}/ffn/linear_1", f"{theirs}.fc2")
            if side == "decoder":
                norm(f"{ours}/attention/layer_norm", f"{theirs}.encoder_attn_layer_norm")
                plain(f"{ours}/attention/linear_0", f"{theirs}.encoder_attn.q_proj")
                joined(f"{ours}/attention/linear_1", f"{theirs}.encoder_attn", "kv")
                plain(f"{ours}/attention/linear_2", f"{theirs}.encoder_attn.out_proj")
    for name in ("conv1", "conv2"):
        plain(f"encoder/{name}", f"model.encoder.{name}")
    return found


def _file(variables: dict[str, torch.Tensor], int8: bool) -> bytes:
    made: dict[str, tuple[int, torch.Tensor]] = {}
    for name, tensor in variables.items():
        if int8 and "linear" in name and name.endswith("weight"):
            scale = 127 / tensor.abs().amax(1)
            made[name] = (1, (tensor * scale[:, None]).round().to(torch.int8))
            made[f"{name}_scale"] = (0, scale)
        else:
            made[name] = (0, tensor)
    parts = [struct.pack("<I", 6), _text("WhisperSpec"), struct.pack("<II", 3, len(made))]
    for name, (kind, tensor) in made.items():
        raw = tensor.detach().contiguous().numpy().tobytes()
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        parts += [_text(name), shape, struct.pack("<BI", kind, len(raw)), raw]
    parts += [struct.pack("<I", 1), _text("decoder/projection/weight")]
    return b"".join([*parts, _text("decoder/embeddings/weight")])


def _text(value: str) -> bytes:
    raw = value.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw
