"""Writes the tiny checkpoints beside this file with compressed-tensors 0.20, and what transformers 5 makes of them.

    python tests/quantized_checkpoints/make.py       needs compressed-tensors, which the suite does without

Each folder has a checkpoint, and expected.json: the logits of TOKENS with dequantised weights in float32, and digests
of the dequantised matrices.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

HERE = Path(__file__).parent
TOKENS = [3, 17, 29, 5, 11, 23, 2, 31]
GROUP = dict(num_bits=4, type="int", strategy="group", group_size=32)
FP8 = dict(num_bits=8, type="float")
TOKEN = dict(strategy="token", dynamic=True)


def group(
    weights: dict[str, Any], inputs: dict[str, Any] | None = None, *targets: str
) -> dict[str, Any]:
    return {
        "targets": list(targets or ("Linear",)),
        "weights": weights,
        "input_activations": inputs,
    }


SCHEMES: dict[str, dict[str, Any]] = {
    "w4a16": {"all": group(GROUP)},
    "w4a16-asymmetric": {"all": group(GROUP | dict(symmetric=False))},
    "w3a16": {"all": group(GROUP | dict(num_bits=3))},
    "w8a16": {"all": group(GROUP | dict(num_bits=8, symmetric=False))},
    "w8a8": {
        "all": group(
            dict(num_bits=8, type="int", strategy="channel"), dict(num_bits=8, type="int", **TOKEN)
        )
    },
    "fp8-dynamic": {"all": group(FP8 | dict(strategy="channel"), FP8 | TOKEN)},
    "fp8-static": {
        "all": group(FP8 | dict(strategy="tensor"), FP8 | dict(strategy="tensor", dynamic=False))
    },
    "fp8-block": {
        "all": group(
            FP8 | dict(strategy="block", block_structure=[32, 64]),
            FP8 | dict(strategy="group", group_size=64, dynamic=True),
        )
    },
    "nvfp4a16": {
        "all": group(
            dict(
                num_bits=4,
                type="float",
                strategy="tensor_group",
                group_size=16,
                scale_dtype="float8_e4m3fn",
                zp_dtype="float8_e4m3fn",
            )
        )
    },
    "mxfp4a16": {
        "all": group(
            dict(
                num_bits=4,
                type="float",
                strategy="group",
                group_size=32,
                scale_dtype="uint8",
                zp_dtype="uint8",
            )
        )
    },
    "mixed": {
        "attention": group(GROUP, None, "re:.*q_proj", "re:.*k_proj", "re:.*o_proj"),
        "mlp": group(FP8 | dict(strategy="channel"), FP8 | TOKEN, "re:.*mlp.*"),
    },
}
IGNORED = {"mixed": ["lm_head", "model.layers.0.self_attn.v_proj", "re:.*down_proj"]}
CACHE = {"fp8-dynamic"}


def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return made


def calibrate(module: torch.nn.Module, args: QuantizationArgs) -> None:
    """Scales and zero points from the smallest and the largest weight of what shares them."""
    w_NK = module.weight.data
    rows, columns = w_NK.shape
    if args.strategy in ("group", "tensor_group"):
        values = w_NK.view(rows, -1, args.group_size)
        low, high = values.amin(-1), values.amax(-1)
    elif args.strategy == "block":
        high_, wide = args.block_structure
        padded = torch.nn.functional.pad(w_NK, (0, -columns % wide, 0, -rows % high_))
        blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high_))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "channel":
        low, high = w_NK.amin(1, keepdim=True), w_NK.amax(1, keepdim=True)
    else:
        low, high = w_NK.amin().view(1), w_NK.amax().view(1)
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(w_NK.amin(), w_NK.amax())
        module.weight_global_scale.data.copy_(whole)
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)


@torch.no_grad()
def make(name: str, groups: dict[str, Any]) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    made = model().bfloat16()
    cache = (
        dict(num_bits=8, type="float", strategy="tensor", symmetric=True) if name in CACHE else None
    )
    config = QuantizationConfig(
        config_groups=groups, ignore=IGNORED.get(name, ["lm_head"]), kv_cache_scheme=cache
    )
    apply_quantization_config(made, config)
    for module in made.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if isinstance(module, torch.nn.Linear) and scheme is not None:
            calibrate(module, scheme.weights)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.05)
        for part in ("k_scale", "v_scale"):
            if hasattr(module, part):
                getattr(module, part).data.fill_(0.02 if part == "k_scale" else 0.03)
    compressor = ModelCompressor.from_pretrained_model(made)
    compressor.compress_model(made)
    made.save_pretrained(folder)
    compressor.update_config(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    expect(folder)


@torch.no_grad()
def expect(folder: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = four_bit_floats(loaded)
    ModelCompressor.from_pretrained_model(loaded).decompress_model(loaded)
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear):
            state.setdefault(f"{name}.weight", module.weight.data.float())
    plain = model()  # in which nothing rounds the activations
    plain.load_state_dict(state, strict=False)
    logits = plain(torch.tensor([TOKENS])).logits[0]
    digests = {name: digest(value) for name, value in state.items() if "layers" in name}
    (folder / "expected.json").write_text(
        json.dumps({"logits": logits.tolist(), "weights": digests})
    )


def four_bit_floats(loaded: torch.nn.Module) -> dict[str, torch.Tensor]:
    """NVFP4 in float32: the library itself rounds what it dequantises to bfloat16."""
    state = {}
    for name, module in loaded.named_modules():
        if hasattr(module, "weight_global_scale"):
            rows, half = module.weight_packed.shape
            codes = unpack_fp4_from_uint8(module.weight_packed, rows, 2 * half, dtype=torch.float32)
            scale = module.weight_scale.float() / module.weight_global_scale
            state[f"{name}.weight"] = (codes.view(rows, -1, 16) * scale[..., None]).flatten(1)
    return state


def digest(weight: torch.Tensor) -> str:
    return hashlib.blake2b(weight.float().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


if __name__ == "__main__":
    for scheme, groups in SCHEMES.items():
        make(scheme, json.loads(json.dumps(groups)))
