"""Which kernels an engine launches, seen without a GPU."""

from itertools import product

import msgspec
import pytest
import torch

from cairn.core.errors import ConfigError
from cairn.kernels.tooling.absent_gpu import absent_gpu
from cairn.kernels.tooling.build_ahead import by_hash
from cairn.models.adapter.attach import addends
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.build import ModelBuild
from cairn.models.presets import preset
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine import adapter_slots, dry_run
from cairn.serve.engine.batch import Layout
from cairn.serve.engine.cuda_graph import Shape
from cairn.serve.engine.start import start_with

CONFIG = EngineConfig(
    model="tiny", device="cuda", max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512
)


def launched(layers: int, **changed: str | int):
    spec = msgspec.structs.replace(preset("qwen3-0.6b"), layers=layers, vocab=2048)
    config = msgspec.structs.replace(CONFIG, **changed)
    return by_hash(dry_run.launches_of(spec, config, "NVIDIA H200", "sm_90"))


def test_every_part_of_a_step_is_launched_and_layers_that_are_alike_are_not_repeated(monkeypatch):
    few = launched(4)
    names = {launch.source.name for launch in few.values()}
    assert {"_inputs_kernel", "_rmsnorm_kernel", "_rope_kernel", "_keep_kernel"} <= names
    assert {"sample_kernel", "_logprobs_kernel", "_penalize_kernel", "_count_kernel"} <= names
    assert any(type(launch.source).__name__ == "GluonASTSource" for launch in few.values())
    monkeypatch.setattr(dry_run, "fewer_layers", lambda spec, least: spec)
    assert launched(4).keys() == few.keys()


def test_float8_weights_and_pages_launch_kernels_of_their_own():
    names = {one.source.name for one in launched(2, weights="fp8", kv_cache_dtype="fp8").values()}
    assert {"one_row_kernel", "stream_kernel", "_gated_fp8_kernel", "_quantize_kernel"} <= names


def test_weights_in_4_bits_with_a_head_launch_kernels_of_their_own():
    head = dict(
        speculate="random:eagle3", draft_tokens=1, max_num_seqs=1, max_num_batched_tokens=64
    )
    names = {one.source.name for one in launched(9, weights="w4a16", **head).values()}
    assert {"packed_kernel", "_draft_kernel", "_accept_kernel", "sample_kernel"} <= names


@pytest.mark.parametrize(("tokens", "sequences"), [(5, 3), (130, 7), (77, 1), (200, 5)])
def test_a_step_of_any_size_needs_nothing_that_was_not_seen(tokens, sequences):
    """Kernels of step inputs and draws are the same whatever the step's sizes, but for one token and one sequence."""
    spec = msgspec.structs.replace(preset("qwen3-0.6b"), layers=2, vocab=2048)
    opened = OpenModel("tiny", spec, None, (), None)
    with absent_gpu("NVIDIA H200") as launches, torch.inference_mode():
        model = Transformer(spec, ModelBuild("cuda", torch.bfloat16, fused=True)).eval()
        runner = start_with(opened, Runnable("tiny", model, ""), CONFIG, sole=True).engine.runner
        dry_run.dry_run(runner)
        known = set(by_hash(launches))
        longest = -(-tokens // sequences)
        for pages in (1, 2, 3):
            runner.run_blank(Shape(Layout(sequences, tokens, pages, sequences, longest)))
        new = {one.source.name for name, one in by_hash(launches).items() if name not in known}
    assert not new & {"_inputs_kernel", "_keep_kernel", "_schedule_kernel", "sample_kernel"}


def test_a_large_step_launches_only_what_the_warm_up_launched():
    """Whatever its numbers of tokens and sequences: whoever sends the first prompts waits for no compiler."""
    spec = msgspec.structs.replace(preset("qwen3-0.6b"), layers=2, vocab=2048)
    opened = OpenModel("tiny", spec, None, (), None)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_model_len": 16384}
    config = msgspec.structs.replace(CONFIG, **limits)
    with absent_gpu("NVIDIA H200") as launches, torch.inference_mode():
        model = Transformer(spec, ModelBuild("cuda", torch.bfloat16, fused=True)).eval()
        runner = start_with(opened, Runnable("tiny", model, ""), config, sole=True).engine.runner
        dry_run.dry_run(runner)
        known = set(by_hash(launches))
        for tokens, sequences in product((16384, 12823, 5008), (1, 2, 7, 31, 32, 119, 237, 256)):
            layout = Layout(sequences, tokens, 300, sequences, -(-tokens // sequences))
            for fresh in (True, False):
                runner.run_blank(Shape(layout, fresh))
        new = {one.source.name for name, one in by_hash(launches).items() if name not in known}
    assert not new


def test_room_behind_the_weights_spares_steps_of_many_rows_the_kernel_that_shrinks(monkeypatch):
    monkeypatch.setattr(adapter_slots, "_pinned", lambda tensor, device: tensor)
    spec = msgspec.structs.replace(preset("qwen3-0.6b"), layers=1, vocab=2048)
    opened, build = (
        OpenModel("tiny", spec, None, (), None),
        ModelBuild("cuda", torch.bfloat16, fused=True),
    )
    config = msgspec.structs.replace(CONFIG, max_num_seqs=256, lora_room=2)
    with absent_gpu("NVIDIA H200") as launches, torch.inference_mode():
        model = Transformer(spec, build).eval()
        runner = start_with(opened, Runnable("tiny", model, ""), config, sole=True).engine.runner
        made = addends(model, spec, AdapterSpec(rank=16), build)
        assert runner.adapters.slots.put(1, {one.home: one.lora for one in made.values()})
        runner.adapters.active = runner.adapters.in_slots = True
        for home, addend in runner.adapters.slots.addends.items():
            home.addend = addend
        runner.run_blank(Shape(Layout.decode(256), adapters=8))
        names = {one.source.name for one in launches}
        assert {"_expand_kernel", "_gated_kernel"} <= names
        assert "_shrink_kernel" not in names


def test_room_behind_weights_that_are_all_quantised_is_refused():
    spec = msgspec.structs.replace(preset("qwen3-0.6b"), layers=1, vocab=2048)
    opened = OpenModel("tiny", spec, None, (), None)
    config = msgspec.structs.replace(CONFIG, lora_room=2, weights="fp8")
    with absent_gpu("NVIDIA H200"), torch.inference_mode():
        model = Transformer(spec, ModelBuild("cuda", torch.bfloat16, fused=True)).eval()
        with pytest.raises(ConfigError, match="lora_room is 2, and no weight"):
            start_with(opened, Runnable("tiny", model, ""), config, sole=True)


def test_layers_that_differ_are_all_run():
    spec = preset("qwen3-0.6b")
    assert dry_run.fewer_layers(spec).layers == 2
    windows = tuple(512 * (layer % 2) for layer in range(spec.layers))
    mixed = msgspec.structs.replace(spec, windows=windows)
    assert dry_run.fewer_layers(mixed) == mixed


def test_a_warm_up_through_two_layers_launches_every_kernel_of_a_captured_step():
    spec = msgspec.structs.replace(preset("qwen3-0.6b"), layers=4, vocab=2048)
    opened = OpenModel("tiny", spec, None, (), None)
    with absent_gpu("NVIDIA H200") as launches, torch.inference_mode():
        model = Transformer(spec, ModelBuild("cuda", torch.bfloat16, fused=True)).eval()
        runner = start_with(opened, Runnable("tiny", model, ""), CONFIG, sole=True).engine.runner
        assert runner._first_layers[0].most_layers == 2
        for shape in (shapes := runner.graphs.common_shapes()):
            runner._blank(shape)
            runner._warm(shape)
        seen = len(launches)  # each specialisation once
        for shape in shapes:
            runner.run_blank(shape)
        assert 0 < seen == len(launches)
        runner.fused.spec = msgspec.structs.replace(spec, windows=(0, 0, 0, 64))
        assert runner.fused.warming().most_layers is None  # the last is of another kind
