"""Formats without a library in the suite, against numpy packers: matrices exactly, and logits of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from quantized_files import CASES, gptq, mxfp4_blocks
from safetensors.torch import save_file

from cairn.core.errors import CairnError, UnsupportedModel, WeightsError
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import Checkpoint, open_checkpoint
from cairn.models.linear.maps import Vocabulary, linears
from cairn.models.quantized.gguf_blocks import BLOCKS, block_planes
from cairn.models.quantized.planes import dequantized
from cairn.models.quantized.scheme import quantization_of
from cairn.models.quantized.source import QuantizedTensors

TOKENS = [3, 17, 29, 5, 11, 23, 2, 31]
Q = "model.layers.0.self_attn.q_proj"


class Tensors(dict):
    """A source of tensors that are not in a file."""

    def names(self) -> list[str]:
        return list(self)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self[name]


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def write(
    folder: Path, model, quantization: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    """The model's folder, with some of its matrices stored otherwise."""
    modules = {name.rpartition(".")[0] for name in tensors}
    plain = {
        k: v.contiguous()
        for k, v in model.state_dict().items()
        if k.removesuffix(".weight") not in modules
    }
    save_file(plain | tensors, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


def quantised(folder: Path, case: str) -> tuple[Checkpoint, torch.Tensor]:
    """A checkpoint in a format, and transformers' logits with the matrices that it stands for."""
    chance, model, stored = np.random.default_rng(0), llama(), {}
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            made = CASES[case].write(chance, *module.weight.shape)
            module.weight.data = made.weight
            stored |= {f"model.{name}.{part}": tensor for part, tensor in made.tensors.items()}
    write(folder, model, CASES[case].config, stored)
    with torch.no_grad():
        return open_checkpoint(folder), model(torch.tensor([TOKENS])).logits[0]


def logits_of(model) -> torch.Tensor:
    attend = PackedDocuments([len(TOKENS)])
    with torch.no_grad():
        return model.logits(model(torch.tensor(TOKENS), attend.positions_T(), attend))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_has_transformers_logits(tmp_path, case):
    checkpoint, expected = quantised(tmp_path, case)
    packed = checkpoint.load("cpu", torch.float32, fused=True, notes=[])
    assert sum(part.form is not None for part in linears(packed)) == 4
    torch.testing.assert_close(logits_of(packed), expected, atol=2e-4, rtol=1e-5)
    plain = checkpoint.load("cpu", torch.float32)
    torch.testing.assert_close(logits_of(plain), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(64, 128), (40, 96)])
def test_a_matrix_is_read_exactly(case, shape):
    made = CASES[case].write(np.random.default_rng(3), *shape)
    files = Tensors({f"m.{part}": tensor for part, tensor in made.tensors.items()})
    quantization = quantization_of({"quantization_config": CASES[case].config})
    tensors = QuantizedTensors(files, quantization, torch.float32)
    assert tensors.names() == ["m.weight"]
    assert tensors.shape("m.weight") == shape
    assert torch.equal(tensors.tensor("m.weight"), made.weight)


def test_experts_of_gpt_oss_have_a_name_each():
    chance, experts, hidden, inner = np.random.default_rng(2), 3, 64, 32
    both = [mxfp4_blocks(chance, 2 * inner, hidden) for _ in range(experts)]
    down = [mxfp4_blocks(chance, hidden, inner) for _ in range(experts)]
    files = Tensors(
        {
            f"mlp.experts.{name}_{part}": torch.stack([one.tensors[part] for one in made])
            for name, made in (("gate_up_proj", both), ("down_proj", down))
            for part in ("blocks", "scales")
        }
    )
    files["mlp.experts.gate_up_proj_bias"] = torch.zeros(experts, 2 * inner)
    quantization = quantization_of({"quantization_config": {"quant_method": "mxfp4"}})
    tensors = QuantizedTensors(files, quantization, torch.float32)
    for expert in range(experts):
        at = f"mlp.experts.{expert}"
        assert torch.equal(tensors.tensor(f"{at}.gate_proj.weight"), both[expert].weight[::2])
        assert torch.equal(tensors.tensor(f"{at}.up_proj.weight"), both[expert].weight[1::2])
        assert torch.equal(tensors.tensor(f"{at}.down_proj.weight"), down[expert].weight)
    assert "mlp.experts.gate_up_proj_bias" in tensors.names()
    files["mlp.experts.down_proj_scales"] = files["mlp.experts.down_proj_scales"][:, 1:]
    with pytest.raises(WeightsError, match=r"down_proj_blocks has shape .* and .*down_proj_scales"):
        QuantizedTensors(files, quantization, torch.float32)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_gguf_are_dequantised_as_the_gguf_package_does(block):
    kind = GGMLQuantizationType[block]
    values, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(5).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    for at in range(0, 2 * size, size):  # scales that are numbers: their exponents are kept small
        for half in {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(
            block, (0, 2) if "_K" in block else (0,)
        ):
            raw[:, at + half + 1] &= 0x3B
    planes = block_planes(torch.from_numpy(raw), block, size)
    assert planes.shape == (3, 2 * values)
    assert torch.equal(dequantized(planes), torch.from_numpy(dequantize(raw, kind)))


@pytest.mark.parametrize(
    ("name", "kind", "kept"),
    [("llama", "Q8_0", 8), ("llama", "Q5_1", 8), ("qwen3_moe", "Q4_0", 6), ("gpt2", "Q8_0", 0)],
)
def test_a_gguf_file_stays_packed_where_it_can(tmp_path, name, kind, kept):
    """q and k of llama have their rows in another order; experts and GPT-2's transposed matrices are floats.

    On a CPU the blocks are multiplied as they lie in the file, by activations that are rounded to 8 bits.
    """
    model, tensors = tiny_gguf.checkpoint(name)
    path = tiny_gguf.convert(model.config, tensors, tmp_path / "x.gguf", GGMLQuantizationType[kind])
    checkpoint, notes = open_checkpoint(path), []
    assert checkpoint.method() == "gguf"
    packed = checkpoint.load("cpu", torch.float32, notes=notes)
    held = [part for part in linears(packed) if part.form is not None]
    assert len([part for part in held if not isinstance(part, Vocabulary)]) >= kept
    exact = logits_of(checkpoint.load("cpu", torch.float32))
    assert (logits_of(packed) - exact).norm() < 0.03 * exact.norm()


# -- rules of a config ----------------------------------------------------------------------------


def test_dynamic_rules_of_gptq_change_bits_or_skip():
    rules = {r"-:.*mlp\.gate$": {}, r"+:.*\.18\..*": {"bits": 8, "group_size": 32}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": rules}
    found = quantization_of({"quantization_config": config})
    assert found.scheme("model.layers.3.mlp.gate") is None
    assert found.scheme("model.layers.18.mlp.up_proj").bits == 8
    assert found.scheme("model.layers.18.mlp.up_proj").group == 32
    assert (found.scheme("model.layers.3.mlp.up_proj").bits, found.bits()) == (4, 4.125)


def test_what_is_not_converted_is_named_by_whole_parts():
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "modules_to_not_convert": ["mlp.gate"],
    }
    found = quantization_of({"quantization_config": config})
    assert found.scheme("model.layers.0.mlp.gate") is None
    assert found.scheme("model.layers.0.mlp.gate_proj") is not None


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    quantised(tmp_path, "modelopt-nvfp4")
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    stated.pop("quant_method")
    beside = {"producer": {"name": "modelopt"}, "quantization": stated}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert open_checkpoint(tmp_path).method() == "modelopt"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantisation method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ with 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's 'W4A8_AWQ'"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "has the pattern"),
        ("gptq", "expected an object"),
    ],
)
def test_an_unknown_scheme_is_refused_by_its_name(config, message):
    with pytest.raises(UnsupportedModel, match="(?i)" + message.replace("(", "\\(")) as error:
        quantization_of({"quantization_config": config})
    assert error.value.hint


# -- bad input ------------------------------------------------------------------------------------


def spoilt(tmp_path: Path, part: str, change) -> CairnError:
    """What is said of a GPTQ checkpoint one of whose tensors was changed."""
    model, made = llama(), gptq(np.random.default_rng(0), 64, 64)
    made.tensors[part] = change(made.tensors[part].clone())
    stored = {
        f"{Q}.{name}": tensor.contiguous()
        for name, tensor in made.tensors.items()
        if tensor.numel()
    }
    write(tmp_path, model, CASES["gptq"].config, stored)
    with pytest.raises(CairnError) as error:
        open_checkpoint(tmp_path).load("cpu", torch.float32, notes=[])
    assert "\n" not in str(error.value)
    assert error.value.hint
    return error.value


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qweight", lambda t: t[:-1], "expected"),
        ("scales", lambda t: t[:-1], "scales has shape [1, 64], expected [2, 64]"),
        ("qzeros", lambda t: t[:0], "is quantised and has no qzeros"),
        ("scales", lambda t: t.int(), "scales is stored as torch.int32"),
        (
            "scales",
            lambda t: t.index_fill_(0, torch.tensor(1), float("nan")),
            "64 scales that are 0, NaN or infinite",
        ),
        (
            "scales",
            lambda t: t.index_fill_(1, torch.tensor(3), 0.0),
            "2 scales that are 0, NaN or infinite",
        ),
        ("g_idx", lambda t: t * 0, "g_idx puts"),
    ],
)
def test_damaged_planes_are_refused_in_one_line(tmp_path, part, change, message):
    assert message in spoilt(tmp_path, part, change).message


def test_a_group_size_that_is_not_the_file_s_is_refused_from_headers(tmp_path):
    quantised(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"expected \[\d, \d+\] for a matrix of"):
        open_checkpoint(tmp_path)


def test_a_quantised_module_that_the_config_leaves_out_is_refused(tmp_path):
    quantised(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["o_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"o_proj has qweight, .* leaves it in floating point"):
        open_checkpoint(tmp_path)
