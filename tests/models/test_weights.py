"""Weights arrive bit by bit, in every layout, and leave as they came; a damaged checkpoint is one line."""

import errno
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file

from cairn.core.errors import CairnError, ConfigError, WeightsError
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export, tensors
from cairn.models.presets import preset
from cairn.models.rope_scaling import stretched
from cairn.models.safetensors_file import SafetensorsFolder, write_tensors
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.models.weights import load_model, random_model

families = pytest.mark.parametrize("name", tiny_checkpoints.FAMILY_NAMES)
layouts = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class Rank:
    """A place among ranks that never talk: enough to lay out a model and to fill it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    enter = reduce = gather = None


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of a tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_checkpoints.folder("llama"), tmp_path / "checkpoint"))


def refusal(folder: Path) -> WeightsError:
    """What opening and loading the folder ends with: one line, and what to do."""
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert len(caught.value.message.splitlines()) == 1
    assert len(caught.value.hint.splitlines()) == 1
    return caught.value


def load(folder: Path, **options) -> Transformer:
    """As `cairn generate` does it: it also asks for the size and the type of what is stored."""
    opened = open_checkpoint(folder)
    assert opened.nbytes() > 0
    assert opened.stored_dtype().is_floating_point
    return opened.load(**options)


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a checkpoint of one file."""
    stored = load_file(folder / MODEL_FILE) | changes
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / MODEL_FILE, metadata={"format": "pt"})


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def logits(model: Transformer) -> torch.Tensor:
    attend = PackedDocuments([40])
    tokens_T = torch.arange(40) * 7 % model.spec.vocab
    with torch.no_grad():
        return model.logits(model(tokens_T, attend.positions_T(), attend))


def by_slot(model: Transformer) -> dict[str, torch.Tensor]:
    return {s.name: model.get_parameter(s.parameter).detach()[s.index] for s in model.slots()}


# -- there and back -----------------------------------------------------------------------------


@families
@layouts
def test_a_checkpoint_comes_back_bit_by_bit(name, fused, tmp_path):
    source = tiny_checkpoints.folder(name)
    export(load(source, fused=fused), tmp_path / "out")
    assert_same(stored_tensors(tmp_path / "out"), stored_tensors(source))


@families
def test_transformers_reads_an_export_as_the_original(name, tmp_path):
    export(load(tiny_checkpoints.folder(name), fused=True), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    original = tiny_checkpoints.reference(name)
    assert_same(again.state_dict(), original.state_dict())
    tokens = torch.arange(23)[None] * 5 % 211
    with torch.no_grad():
        original(tokens[:, :1])  # dynamic scaling forgets the longest sequence so far
        assert torch.equal(again(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_a_checkpoint_in_shards_loads_as_the_whole(name, tmp_path):
    tiny_checkpoints.reference(name).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same(by_slot(load(tmp_path)), by_slot(load(tiny_checkpoints.folder(name))))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_an_export_in_shards_is_read_by_transformers_and_by_us(name, tmp_path):
    model = load(tiny_checkpoints.folder(name))
    export(model, tmp_path / "out", shard_bytes=60_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in tensors(model))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(again.state_dict(), tiny_checkpoints.reference(name).state_dict())
    assert_same(by_slot(load(tmp_path / "out")), by_slot(model))


def test_no_shard_is_larger_than_asked_unless_one_tensor_is(tmp_path):
    model = load(tiny_checkpoints.folder("llama"))
    export(model, tmp_path / "out", shard_bytes=30_000)
    for file in (tmp_path / "out").glob("*.safetensors"):
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 30_000 or len(sizes) == 1


def test_a_model_that_was_made_here_is_read_by_transformers(tmp_path):
    """From a preset, never loaded: the config is ours alone."""
    model = random_model(preset("tiny-gemma3"), ModelBuild("cpu", torch.float32), seed=3)
    export(model, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens_T = torch.arange(40) * 7 % model.spec.vocab
    with torch.no_grad():
        difference = again(tokens_T[None]).logits[0] - logits(model)
    assert difference.abs().max() <= 2e-4


def test_a_table_of_positions_may_be_longer_than_the_context_that_is_asked_for(tmp_path):
    model = random_model(preset("tiny-gpt2"), ModelBuild("cpu"))
    export(model, tmp_path / "made")
    shorter = load_model(
        stretched(model.spec, 8), SafetensorsFolder(tmp_path / "made"), ModelBuild("cpu")
    )
    assert torch.equal(shorter.position_embedding.weight, model.position_embedding.weight[:8])


def test_an_export_takes_the_tokenizer_along(tmp_path):
    like = tmp_path / "like"
    like.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "notes.txt"):
        (like / name).write_text(name)
    export(load(tiny_checkpoints.folder("llama")), tmp_path / "out", like=like)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_an_export_overwrites_nothing_and_leaves_nothing_half_done(tmp_path):
    model = load(tiny_checkpoints.folder("llama"))
    (tmp_path / "empty").mkdir()
    export(model, tmp_path / "empty")
    for taken in ("empty", "empty/config.json"):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            export(model, tmp_path / taken)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_an_export_that_was_interrupted_can_be_repeated(tmp_path):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "leftover").touch()
    export(load(tiny_checkpoints.folder("llama")), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", MODEL_FILE}


def test_an_export_that_fails_leaves_no_folder_to_be_taken_for_a_checkpoint(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cairn.models.export.write_tensors", fail)
    with pytest.raises(OSError, match="No space left"):
        export(load(tiny_checkpoints.folder("llama")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_split_model_is_not_exported_from_one_rank(tmp_path):
    model = random_model(preset("tiny-llama"), ModelBuild("cpu", torch.float32, Rank(0, 2)))
    with pytest.raises(ConfigError, match="split over 2 ranks"):
        export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# -- views and copies ---------------------------------------------------------------------------


def mapped_ranges(path: Path) -> list[range]:
    """Where this process has mapped a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    return any(tensor.data_ptr() in span for span in mapped_ranges(path))


def test_a_tensor_of_the_right_type_stays_a_view_of_the_file(checkpoint):
    model = load(checkpoint)
    assert all(is_mapped(p, checkpoint / MODEL_FILE) for p in model.parameters())


def test_a_view_outlives_the_checkpoint_and_writing_to_it_does_not_reach_the_file(checkpoint):
    before = (checkpoint / MODEL_FILE).read_bytes()
    weight = load(checkpoint).norm.weight
    with torch.no_grad():
        weight.fill_(7.0)
    assert (weight == 7.0).all()
    assert (checkpoint / MODEL_FILE).read_bytes() == before


def test_a_tensor_that_has_to_change_is_copied(checkpoint):
    file = checkpoint / MODEL_FILE
    model = load(checkpoint, dtype=torch.bfloat16)
    assert not any(is_mapped(p, file) for p in model.parameters())
    fused = load(checkpoint, fused=True)
    assert not is_mapped(fused.get_parameter("layers.0.attention.qkv.fused.weight"), file)
    assert is_mapped(fused.get_parameter("layers.0.attention.out.weight"), file)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_a_conversion_rounds_each_value_once(name, dtype):
    folder = tiny_checkpoints.folder(name)
    converted = by_slot(load(folder, dtype=dtype, fused=True))
    for slot, tensor in by_slot(load(folder)).items():
        assert torch.equal(converted[slot], tensor.to(dtype)), slot


def test_the_stored_type_is_kept_unless_another_is_asked_for(tmp_path):
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoints.folder("qwen3"), dtype=torch.bfloat16
    )
    reference.save_pretrained(tmp_path)
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.bfloat16}
    wide = by_slot(load(tmp_path, dtype=torch.float32))
    for name, tensor in by_slot(load(tmp_path)).items():
        assert torch.equal(wide[name], tensor.float()), name


def test_a_checkpoint_of_mixed_types_loads_in_that_of_its_largest_tensor(checkpoint):
    change_tensors(checkpoint, **{"model.norm.weight": torch.full((48,), 0.5).half()})
    model = load(checkpoint)
    assert model.norm.weight.dtype == torch.float32
    assert (model.norm.weight == 0.5).all()


def test_progress_adds_up_to_the_bytes_of_the_checkpoint(checkpoint):
    opened, done = open_checkpoint(checkpoint), []
    opened.load(progress=done.append)
    assert (
        sum(done) == opened.nbytes() == sum(t.nbytes for t in stored_tensors(checkpoint).values())
    )


MEASURE = """
    import sys
    from pathlib import Path
    import torch
    from cairn.models.checkpoint import open_checkpoint

    def kilobytes(name: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(name))

    folder = Path(sys.argv[1])
    torch.zeros(8, dtype=torch.uint8).sum()  # whatever torch needs for its first sum
    before = kilobytes("VmRSS:")
    model = open_checkpoint(folder).load()
    pages = (p.view(torch.uint8).flatten()[1::512] for p in model.parameters())
    total = sum(page.sum().item() for page in pages)
    print(total, 1024 * (kilobytes("VmHWM:") - before))
"""


def test_a_checkpoint_of_bfloat16_takes_its_own_size_of_memory(tmp_path):
    """A bf16 checkpoint of a quarter gigabyte, all of it used: at most 1.15 of the file, copies included."""
    spec = ModelSpec(
        family="llama", vocab=16_000, hidden=1024, layers=8, heads=16, kv_heads=8, head_dim=64,
        intermediate=3072, context=128, bos_id=1, eos_ids=(2,),
    )  # fmt: skip
    folder = tmp_path / "out"
    model = Transformer(spec, ModelBuild("cpu", torch.bfloat16))
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, number / 64)
    export(model, folder)
    size = (folder / MODEL_FILE).stat().st_size
    assert 200e6 < size < 300e6
    pages = (p.view(torch.uint8).flatten()[1::512] for p in model.parameters())
    expected = sum(page.sum().item() for page in pages)
    del model
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    shutil.rmtree(folder)  # pytest would keep it
    total, extra = map(int, done.stdout.split())
    assert total == expected
    assert 0.9 * size < extra <= 1.15 * size


# -- random weights -----------------------------------------------------------------------------

PRESETS = ["tiny-llama", "tiny-qwen3", "tiny-moe", "tiny-gemma3", "tiny-gpt2"]


@pytest.mark.parametrize("name", PRESETS)
def test_random_weights_do_not_depend_on_the_layout(name):
    whole = by_slot(random_model(preset(name), ModelBuild("cpu", torch.float32), seed=5))
    assert_same(
        by_slot(random_model(preset(name), ModelBuild("cpu", torch.float32, fused=True), 5)), whole
    )
    for rank in range(2):
        for fused in (False, True):
            build = ModelBuild("cpu", torch.float32, Rank(rank, 2), fused)
            split = random_model(preset(name), build, seed=5)
            shares = {slot.name: slot.share(whole[slot.name]) for slot in split.slots()}
            assert_same(by_slot(split), shares)


@pytest.mark.parametrize("name", PRESETS)
def test_the_shares_of_all_ranks_make_the_whole(name):
    whole = by_slot(random_model(preset(name), ModelBuild("cpu", torch.float32)))
    builds = [ModelBuild("cpu", torch.float32, Rank(rank, 2)) for rank in range(2)]
    parts = [random_model(preset(name), build) for build in builds]
    shares = [by_slot(part) for part in parts]
    for slot in parts[0].slots():
        if slot.cut is None:
            joined = shares[1][slot.name]
        else:
            joined = torch.cat([share[slot.name] for share in shares], dim=slot.cut[0])
        assert torch.equal(joined, whole[slot.name]), slot.name


def test_random_weights_depend_on_name_and_seed():
    first, again, other = (
        by_slot(random_model(preset("tiny-moe"), ModelBuild("cpu", torch.float32), seed))
        for seed in (0, 0, 1)
    )
    assert_same(first, again)
    drawn = [name for name, tensor in first.items() if tensor.ndim > 1]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    heads = [tuple(first[name].flatten()[:4].tolist()) for name in drawn]
    assert len(set(heads)) == len(drawn)


@pytest.mark.parametrize("name", PRESETS)
def test_random_weights_are_small_and_norms_are_neutral(name):
    model = random_model(preset(name), ModelBuild("cpu", torch.float32))
    for slot, tensor in by_slot(model).items():
        if tensor.ndim > 1:
            assert tensor.std() == pytest.approx(0.02, rel=0.1), slot
            assert tensor.mean().abs() < 0.004, slot
        elif slot.endswith("norm.weight"):
            assert (tensor == (0.0 if model.spec.norm_plus_one else 1.0)).all(), slot
        else:
            assert (tensor == 0.0).all(), slot


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "qwen3_moe", "gpt2", "gemma2"])
@layouts
def test_a_rank_loads_its_slice_of_the_checkpoint(name, fused):
    folder = tiny_checkpoints.folder(name)
    whole = by_slot(load(folder))
    for rank in range(2):
        split = load(folder, shards=Rank(rank, 2), fused=fused)
        shares = {slot.name: slot.share(whole[slot.name]) for slot in split.slots()}
        assert any(shares[slot].shape != whole[slot].shape for slot in shares)
        assert_same(by_slot(split), shares)


def test_rows_beyond_the_vocabulary_are_zero():
    """211 tokens over two ranks: the second has a row that belongs to no token."""
    split = load(tiny_checkpoints.folder("llama"), shards=Rank(1, 2))
    assert split.embedding.weight.shape[0] == 106
    assert (split.embedding.weight[105] == 0).all()
    assert (split.embedding.weight[104] != 0).any()


# -- accepted -----------------------------------------------------------------------------------


@pytest.fixture
def old_gpt2(tmp_path) -> Path:
    """As OpenAI's own checkpoint is stored: no prefix, and the causal mask of every layer."""
    folder = Path(shutil.copytree(tiny_checkpoints.folder("gpt2"), tmp_path / "gpt2"))
    stored = load_file(folder / MODEL_FILE)
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file(renamed, folder / MODEL_FILE)
    return folder


@pytest.mark.parametrize("mask", [torch.float32, torch.bool, torch.uint8], ids=str)
def test_a_gpt2_without_prefix_and_with_masks_loads(old_gpt2, mask):
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 160, 160).to(mask) for i in range(3)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    change_tensors(old_gpt2, **masks)
    assert_same(by_slot(load(old_gpt2)), by_slot(load(tiny_checkpoints.folder("gpt2"))))
    assert (
        open_checkpoint(old_gpt2).nbytes()
        == open_checkpoint(tiny_checkpoints.folder("gpt2")).nbytes()
    )


def test_tables_of_rotary_positions_are_ignored(checkpoint):
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}
    change_tensors(checkpoint, **tables)
    assert_same(by_slot(load(checkpoint)), by_slot(load(tiny_checkpoints.folder("llama"))))


@pytest.fixture
def tied(tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoints.folder("qwen3"), tmp_path / "tied"))


def test_a_tied_head_may_be_stored_as_well(tied):
    embedding = load_file(tied / MODEL_FILE)["model.embed_tokens.weight"]
    change_tensors(tied, **{"lm_head.weight": embedding.clone()})
    assert_same(by_slot(load(tied)), by_slot(load(tiny_checkpoints.folder("qwen3"))))


def test_a_tied_head_that_differs_is_refused(tied):
    """`transformers` unties such a model; to load it tied would be silently wrong."""
    change_tensors(tied, **{"lm_head.weight": torch.randn(211, 48)})
    reference = transformers.AutoModelForCausalLM.from_pretrained(tied)
    assert not torch.equal(reference.lm_head.weight, reference.model.embed_tokens.weight)
    error = refusal(tied)
    assert error.message.startswith("lm_head.weight differs from model.embed_tokens.weight")
    assert "tie_word_embeddings" in error.hint


# -- refused ------------------------------------------------------------------------------------


def header_bytes(folder: Path) -> int:
    return struct.unpack("<Q", (folder / MODEL_FILE).read_bytes()[:8])[0]


@pytest.mark.parametrize(
    "where", ["nothing", "in the length", "length only", "in the header", "no data", "in the data",
              "last byte"],
)  # fmt: skip
def test_a_truncated_file_is_refused_wherever_it_ends(checkpoint, where):
    file, header = checkpoint / MODEL_FILE, header_bytes(checkpoint)
    size = file.stat().st_size
    cuts = {
        "nothing": 0,
        "in the length": 5,
        "length only": 8,
        "in the header": 8 + header // 2,
        "no data": 8 + header,
        "in the data": size // 2,
        "last byte": size - 1,
    }
    os.truncate(file, cuts[where])
    error = refusal(checkpoint)
    assert error.message.startswith(f"{file} ({cuts[where]} bytes) cannot be read as safetensors")
    assert "truncated" in error.hint


@pytest.mark.parametrize(
    "change",
    [
        lambda header: b"\xff" * len(header),
        lambda header: b"x" + header[1:],
        lambda header: header.replace(b'"F32"', b'"F3\\n"', 1),
        lambda header: header.replace(b'"shape":[48]', b'"shape":[47]', 1),
        lambda header: header.replace(b'"data_offsets":[0', b'"data_offsets":[8', 1),
    ],
    ids=["not text", "not JSON", "unknown type", "another shape", "another offset"],
)
def test_a_corrupt_header_is_refused(checkpoint, change):
    file, length = checkpoint / MODEL_FILE, header_bytes(checkpoint)
    data = file.read_bytes()
    changed = change(data[8 : 8 + length])
    assert changed != data[8 : 8 + length]
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])
    assert "cannot be read as safetensors" in refusal(checkpoint).message


def test_a_length_of_the_header_beyond_all_measure_is_refused(checkpoint):
    with (checkpoint / MODEL_FILE).open("r+b") as file:
        file.write(b"\xff" * 8)
    assert "cannot be read as safetensors" in refusal(checkpoint).message


def test_a_file_without_tensors_is_refused(checkpoint):
    (checkpoint / MODEL_FILE).write_bytes(struct.pack("<Q", 2) + b"{}")
    assert refusal(checkpoint).message == f"the checkpoint in {checkpoint} has no tensors"


def test_a_file_with_nothing_but_leftovers_is_refused(checkpoint):
    save_file({"h.0.attn.bias": torch.ones(4)}, checkpoint / MODEL_FILE)
    assert refusal(checkpoint).message == f"{checkpoint} has no weights"


@pytest.mark.parametrize(
    ("tensor", "shape", "expected"),
    [
        ("model.norm.weight", (47,), [48]),
        ("model.layers.1.self_attn.k_proj.weight", (96, 48), [32, 48]),
        ("model.layers.2.mlp.down_proj.weight", (80, 48), [48, 80]),
        ("lm_head.weight", (210, 48), [211, 48]),
        ("model.embed_tokens.weight", (), [211, 48]),
    ],
)
def test_a_wrong_shape_is_named_with_the_expected_one(checkpoint, tensor, shape, expected):
    change_tensors(checkpoint, **{tensor: torch.zeros(shape)})
    error = refusal(checkpoint)
    assert error.message == f"{tensor} has shape {list(shape)}, expected {expected}"
    assert "config.json" in error.hint


def test_a_wrong_shape_of_a_transposed_tensor_is_named_as_it_is_stored(old_gpt2):
    change_tensors(old_gpt2, **{"h.1.attn.c_attn.weight": torch.zeros(144, 48)})
    message = "h.1.attn.c_attn.weight has shape [144, 48], expected [48, 144]"
    assert refusal(old_gpt2).message == message


def test_missing_tensors_are_counted_and_named(checkpoint):
    change_tensors(
        checkpoint, **{"model.norm.weight": None, "model.layers.1.self_attn.q_proj.weight": None}
    )
    message = "2 of 30 tensors are missing, such as model.layers.1.self_attn.q_proj.weight, model.n"
    assert refusal(checkpoint).message.startswith(message)


def test_extra_tensors_are_counted_and_named(checkpoint):
    change_tensors(
        checkpoint,
        **{
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(96),
            "model.layers.3.mlp.up_proj.weight": torch.zeros(80, 48),
        },
    )
    error = refusal(checkpoint)
    assert error.message.startswith("2 tensors have no place in a llama model of 3 layers, such as")
    assert "model.layers.0.self_attn.q_proj.bias" in error.message


def test_an_untied_head_that_is_missing_is_an_error(checkpoint):
    change_tensors(checkpoint, **{"lm_head.weight": None})
    assert refusal(checkpoint).message == "1 of 30 tensors are missing, such as lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_tensor_of_whole_numbers_is_refused(checkpoint, tensor, dtype):
    shape = load_file(checkpoint / MODEL_FILE)[tensor].shape
    change_tensors(checkpoint, **{tensor: torch.ones(shape, dtype=dtype)})
    error = refusal(checkpoint)
    assert tensor in error.message
    assert "stored as" in error.message


def test_whole_numbers_are_refused_by_the_loader_itself(checkpoint):
    change_tensors(checkpoint, **{"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    opened = open_checkpoint(checkpoint)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is stored as torch\.int8"):
        load_model(opened.spec, opened.tensors, ModelBuild("cpu", torch.float32))


@pytest.fixture
def sharded(tmp_path) -> Path:
    folder = tmp_path / "sharded"
    export(load(tiny_checkpoints.folder("llama")), folder, shard_bytes=100_000)
    return folder


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    (folder / INDEX_FILE).write_text(json.dumps(change(index)))


def test_a_missing_shard_is_named(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    error = refusal(sharded)
    assert error.message == f"{file} does not exist, but the index names it"
    assert "shard is missing" in error.hint


def test_shards_without_their_index_and_a_pointer_in_place_of_a_file_are_told(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(sharded).hint
    (sharded / INDEX_FILE).unlink()
    assert "download it, too" in refusal(sharded).hint


def test_an_adapter_in_place_of_a_model_is_told(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    error = refusal(tmp_path)
    assert (error.message, "--lora-modules" in error.hint) == (
        f"{tmp_path} is an adapter, which has no weights of its own",
        True,
    )


def test_a_truncated_shard_is_named(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    os.truncate(file, 1000)
    assert refusal(sharded).message.startswith(f"{file} (1000 bytes) cannot be read")


def test_an_index_that_promises_too_much_is_refused(sharded):
    file = min(path.name for path in sharded.glob("*.safetensors"))
    change_index(sharded, lambda i: {"weight_map": i["weight_map"] | {"odd.weight": file}})
    message = f"{sharded / file} lacks 1 tensors that the index promises, such as odd.weight"
    assert refusal(sharded).message == message


def test_an_index_that_promises_too_little_is_refused(sharded):
    def forget(index):
        return {"weight_map": {k: v for k, v in index["weight_map"].items() if "norm" not in k}}

    change_index(sharded, forget)
    assert refusal(sharded).message.startswith("7 of 30 tensors are missing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "holds a list, expected an object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {}}', "has no tensors"),
        ('{"weight_map": {"a": "."}}', "cannot be read as safetensors"),
        ('{"weight_map": {"a": "\\u0000"}}', "does not exist, but the index names it"),
    ],
    ids=lambda text: text[:30],
)
def test_an_index_that_is_none_is_refused(sharded, content, message):
    (sharded / INDEX_FILE).write_text(content)
    assert message in refusal(sharded).message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"3", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(checkpoint, name, content):
    (checkpoint / name).write_bytes(content)
    assert str(checkpoint / name) in refusal(checkpoint).message


@pytest.mark.parametrize("eos", ["</s>", {"id": 2}, [2, "x"], 2.5, True])
def test_an_end_token_that_is_no_number_is_refused(checkpoint, eos):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CairnError, match="field 'eos_token_id' is"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, (2,))])
def test_end_tokens_come_from_the_generation_config_first(checkpoint, eos, expected):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert open_checkpoint(checkpoint).eos_ids == expected


def test_a_folder_without_weights_says_what_it_holds(checkpoint):
    (checkpoint / MODEL_FILE).unlink()
    error = refusal(checkpoint)
    assert error.message == f"no model.safetensors in {checkpoint}"
    assert error.hint == "the folder holds: config.json, generation_config.json"


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_not_read(checkpoint, pickled):
    (checkpoint / MODEL_FILE).rename(checkpoint / pickled)
    assert refusal(checkpoint).hint.startswith("pickled weights are not read: convert them")


def test_a_folder_in_the_place_of_the_weights_is_refused(checkpoint):
    (checkpoint / MODEL_FILE).unlink()
    (checkpoint / MODEL_FILE).mkdir()
    assert refusal(checkpoint).message == f"no model.safetensors in {checkpoint}"


def test_a_link_to_nowhere_is_refused(checkpoint):
    (checkpoint / MODEL_FILE).unlink()
    (checkpoint / MODEL_FILE).symlink_to(checkpoint / "absent")
    assert refusal(checkpoint).message == f"no model.safetensors in {checkpoint}"


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert refusal(tmp_path).message == f"{tmp_path} has no config.json"


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CairnError, match="absent does not exist"):
        open_checkpoint(tmp_path / "absent")


@pytest.fixture
def readable_by_others():
    """A checkpoint outside pytest's own folders, which only their owner may enter."""
    with tempfile.TemporaryDirectory(prefix="cairn-permission-") as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(tiny_checkpoints.folder("llama"), Path(folder) / "checkpoint"))
        Path(folder, "checkpoint").chmod(0o755)


@pytest.mark.parametrize("denied", [MODEL_FILE, "config.json", "generation_config.json", "."])
def test_no_permission_is_said_so(readable_by_others, denied):
    load(readable_by_others)  # everything it needs is imported before the rights are gone
    (readable_by_others / denied).chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # nobody: for root, nothing is forbidden
    try:
        error = refusal(readable_by_others)
    finally:
        if root:
            os.seteuid(0)
    assert str(readable_by_others) in error.message
    assert "ermission" in error.message
    assert "permission" in error.hint


def test_the_tensors_of_a_folder_are_listed_without_reading_them(sharded):
    source = SafetensorsFolder(sharded)
    stored = stored_tensors(sharded)
    assert sorted(source.names()) == sorted(stored)
    assert all(source.shape(name) == tuple(tensor.shape) for name, tensor in stored.items())
    assert {source.dtype(name) for name in source.names()} == {torch.float32}


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_weights_are_written_with_the_mode_of_a_new_file(tmp_path, mask):
    """safetensors alone writes 0600: a service under another user could not read the model."""
    before = os.umask(mask)
    try:
        write_tensors({"a": torch.ones(3)}, tmp_path / MODEL_FILE)
    finally:
        os.umask(before)
    assert (tmp_path / MODEL_FILE).stat().st_mode & 0o777 == 0o666 & ~mask
    assert torch.equal(load_file(tmp_path / MODEL_FILE)["a"], torch.ones(3))


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path):
    """A limit on the size of files stands in for it; Python ignores its signal."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match="cannot write the weights") as caught:
            write_tensors({"a": torch.ones(10_000)}, tmp_path / MODEL_FILE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
