"""`cairn quantize` and `cairn prune` from the command line: what they leave behind, and what they refuse."""

import itertools
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cairn.cli.main import main
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export, tensors
from cairn.models.runnable import open_model
from cairn.models.spec import Experts, ModelSpec
from cairn.models.weights import random_model

SMALL = ["--samples", "4", "--length", "64", "--judged", "2", "--device", "cpu"]
TINY = "cairn-tiny"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with the shipped model's tokenizer: quantised in a second."""
    return written(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = Experts(count=4, per_token=2, intermediate=32)
    return written(tmp_path_factory.mktemp("mixture") / "model", experts)


def written(out: Path, experts: Experts | None = None) -> Path:
    shipped = open_model(TINY)
    assert shipped.checkpoint is not None
    spec = ModelSpec(
        family="qwen3_moe" if experts else "qwen3", vocab=shipped.spec.vocab, hidden=64, layers=2,
        heads=4, kv_heads=2, head_dim=16, intermediate=96, context=256, tied=True, qk_norm=True,
        experts=experts, eos_ids=(0, 2),
    )  # fmt: skip
    export(random_model(spec, ModelBuild("cpu", torch.bfloat16)), out, like=shipped.checkpoint.path)
    return out


def quantize(model: Path | str, out: Path, *flags: str) -> int:
    return main(["quantize", str(model), "--out", str(out), *SMALL, *flags])


def test_a_model_is_quantised_and_says_what_it_lost(folder: Path, tmp_path: Path, capsys):
    flags = ["--scheme", "w4a16", "--method", "gptq", "--keep", "auto", "--json"]
    assert quantize(folder, tmp_path / "q", *flags) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "q" / "quantize.json").read_text())
    assert len(told["errors"]) == 8  # four matrices in each of two layers
    assert all(one["error"] <= one["nearest"] for one in told["errors"])
    assert told["group"] == 32  # of 64 and 96 columns
    assert told["notes"][0].startswith("group 32 because 128 does not divide rows of 64")
    page = (tmp_path / "q" / "quantize.html").read_text()
    assert "Distribution of the errors" in page
    assert "What each matrix costs" in page
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


def test_experts_are_quantised_and_the_router_is_not(mixture: Path, tmp_path: Path, capsys):
    assert quantize(mixture, tmp_path / "q", "--scheme", "w8a8", "--method", "gptq", "--json") == 0
    names = open_checkpoint_names(tmp_path / "q")
    assert "model.layers.0.mlp.experts.3.down_proj.weight_scale" in names
    assert "model.layers.0.mlp.gate.weight" in names
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


def test_matrices_in_16_bits_are_ignored_and_stored_whole(folder: Path, tmp_path: Path, capsys):
    out, keep = tmp_path / "q", ["--keep", "0.attention.qkv", "down"]
    assert quantize(folder, out, "--scheme=w8a8", "--method=smoothquant", *keep) == 0
    assert "in 16 bits: layers.0.attention.qkv, layers.0.feed" in capsys.readouterr().err
    parts = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
    expected = {
        f"model.{name}" for name in (*parts, "layers.0.mlp.down_proj", "layers.1.mlp.down_proj")
    }
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"lm_head", *expected}
    names = open_checkpoint_names(out)
    assert {f"{module}.weight" for module in expected} <= names
    assert not {f"{module}.weight_scale" for module in expected} & names
    open_checkpoint(out).load("cpu", torch.float32)


def open_checkpoint_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", ["llama", "llama3", "phi3-longrope"])
def test_a_gguf_file_becomes_a_smaller_one_that_reads_the_same(name: str, tmp_path: Path, capsys):
    import gguf
    import tiny_gguf

    from cairn.models.gguf.write import write_gguf
    from cairn.models.quantized.round_model import round_model
    from cairn.models.quantized.rounding import SCHEMES

    model, tensors = tiny_gguf.checkpoint(name)
    like = tiny_gguf.convert(model.config, tensors, tmp_path / "like.gguf")
    ours = open_checkpoint(like).load("cpu", torch.float32)
    made = round_model(ours, SCHEMES["q4_0"], torch.float16)
    path = write_gguf(made, tmp_path / "q", like, "q4_0")
    back = open_checkpoint(path).load("cpu", torch.float32)
    assert back.spec == ours.spec  # rotary factors are tensors of the file, which are no weights
    for (slot, value), (_, other) in zip(
        ours.named_parameters(), back.named_parameters(), strict=True
    ):
        close = 0.02 if "embedding" in slot or "head" in slot else 1e-6  # these are Q8_0
        torch.testing.assert_close(value, other, atol=close, rtol=1e-5, msg=slot)
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {"Q4_0", "Q8_0", "F32"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheme", "fp8", "--method", "awq"], "method awq is for 4 bits"),
        (["--scheme", "w4a16", "--method", "smoothquant"], "which scheme w4a16 does not have"),
        (["--scheme", "w3a16"], "w3a16"),
        (["--group", "128"], "groups of 128 do not divide rows of 64 and 96"),
        (["--group", "12"], "hint: use --group 32"),
        (["--scheme", "fp8", "--group", "64", "--method", "rtn"], "no groups of 64"),
        (["--scheme", "fp8", "--asymmetric", "--method", "rtn"], "has no zero points"),
        (["--scheme", "q8_0", "--method", "rtn"], "takes its metadata from the GGUF file"),
        (["--length", "1"], "a window of 1 token predicts none"),
        (["--data", "nowhere.txt"], "there is no data at nowhere.txt"),
        (["--keep", "mlp.down"], "no matrix has that in its name"),
        (["--keep", "layers."], "leaves no matrix to round"),
        (["--keep", "auto", "--most-added", "1e-12"], "all matrices would stay in 16 bits"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    folder: Path, tmp_path: Path, capsys, flags: list[str], message: str
):
    assert quantize(folder, tmp_path / "q", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_bad_calibration_text_is_refused(folder: Path, tmp_path: Path, capsys):
    def refused(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        assert quantize(folder, tmp_path / "q", "--data", str(tmp_path / name)) == 2
        return capsys.readouterr().err

    assert "has no text" in refused("empty.txt", b"  \n")
    assert "fewer than one window" in refused("short.txt", b"only a few words")
    assert "is not UTF-8" in refused("binary.txt", b"\xff\xfe\x00")
    assert "line 2 has neither" in refused("a.jsonl", b'{"text": "a"}\n{"words": "b"}\n')
    assert "line 1 is not JSON" in refused("b.jsonl", b"{text}\n")
    assert "fewer than one window" in refused("bom.jsonl", b'\xef\xbb\xbf{"text": "a"}\n')


def test_tokens_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path, capsys):
    from cairn.train.data.tokenizer_trainer import byte_tokenizer, save_tokenizer

    save_tokenizer(byte_tokenizer(), tmp_path / "bytes")
    (tmp_path / "a.txt").write_text("some words " * 200)
    store = tmp_path / "store"
    made = main(
        ["data", "tokenize", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "bytes"),
         "--out", str(store)]
    )  # fmt: skip
    assert made == 0
    capsys.readouterr()
    assert quantize(folder, tmp_path / "q", "--data", str(store)) == 2
    assert "was made with another tokenizer" in capsys.readouterr().err


def test_a_quantised_model_and_a_full_folder_are_refused(folder: Path, tmp_path: Path, capsys):
    assert quantize(folder, tmp_path / "q", "--scheme", "fp8", "--method", "rtn") == 0
    capsys.readouterr()
    assert quantize(tmp_path / "q", tmp_path / "again") == 2
    assert "is quantised already (compressed-tensors)" in capsys.readouterr().err
    assert quantize(folder, tmp_path / "q") == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_the_folder_that_it_runs_in_is_refused(folder: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert quantize(folder, Path()) == 2
    assert "--out . is the folder that this runs in" in capsys.readouterr().err


def test_no_room_on_the_disk_is_said_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys, monkeypatch
):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    assert quantize(folder, tmp_path / "q", "--scheme", "fp8", "--method", "rtn") == 2
    assert "1000 B left" in capsys.readouterr().err.replace("1,000", "1000")
    assert not (tmp_path / "q").exists()


@pytest.fixture
def a_full_disk() -> Iterator[None]:
    """A limit on the size of files fails a write in the middle, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_in_the_middle_leaves_nothing(folder: Path, tmp_path: Path, a_full_disk):
    model = open_checkpoint(folder).load("cpu", torch.float32)
    with pytest.raises(OSError, match="File too large"):
        export(model, tmp_path / "q")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_it_is_written_leaves_nothing(folder: Path, tmp_path: Path):
    model = open_checkpoint(folder).load("cpu", torch.float32)

    def stopped() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(tensors(model), 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(model, tmp_path / "q", stream=stopped())
    assert not list(tmp_path.iterdir())


def test_a_place_that_may_not_be_written_to_is_refused_at_once(
    folder: Path, tmp_path: Path, capsys
):
    assert quantize(folder, Path("/proc/self/q")) == 2
    assert "you may not write to /proc/" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_a_pruned_model_has_its_zeros(folder: Path, tmp_path: Path, capsys, method: str):
    flags = ["--pattern", "2:4"] if method == "sparsegpt" else ["--sparsity", "0.5"]
    out = tmp_path / "p"
    assert (
        main(
            ["prune", str(folder), "--out", str(out), "--method", method, *flags, *SMALL, "--json"]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert len(told["curve"]) == (1 if method == "sparsegpt" else 4)
    loaded = open_checkpoint(out).load("cpu", torch.float32)
    for layer in loaded.layers:
        share = float((layer.feed_forward.down.weight == 0).float().mean())
        assert share == pytest.approx(0.5, abs=0.01)
    assert "Perplexity" in (out / "prune.html").read_text()


def test_experts_are_pruned_and_the_model_loads(mixture: Path, tmp_path: Path, capsys):
    out = tmp_path / "p"
    assert main(["prune", str(mixture), "--out", str(out), "--experts", "3", *SMALL]) == 0
    spec = open_checkpoint(out).load("cpu", torch.float32).spec
    assert spec.experts is not None
    assert spec.experts.count == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "exactly one of --sparsity, --pattern and --experts"),
        (["--sparsity", "1.5"], "is not between 0 and 1"),
        (["--pattern", "4:2"], "is not a pattern"),
        (["--pattern", "2:5"], "groups of 5 do not divide rows of 64"),
        (["--experts", "2"], "has no experts"),
    ],
)
def test_pruning_refuses_in_one_line(folder: Path, tmp_path: Path, capsys, flags, message):
    assert main(["prune", str(folder), "--out", str(tmp_path / "p"), *flags, *SMALL]) == 2
    assert message in capsys.readouterr().err
