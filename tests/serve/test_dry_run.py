"""Which kernels an engine launches, seen without a GPU."""

import msgspec

from cairn.kernels.tooling.build_ahead import by_hash
from cairn.models.presets import preset
from cairn.serve.config import EngineConfig
from cairn.serve.engine import dry_run

CONFIG = EngineConfig(
    model="tiny", device="cuda", max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512
)


def launched(layers: int):
    spec = msgspec.structs.replace(preset("qwen3-0.6b"), layers=layers, vocab=2048)
    return by_hash(dry_run.launches_of(spec, CONFIG, "NVIDIA H200", "sm_90"))


def test_every_part_of_a_step_is_launched_and_layers_that_are_alike_are_not_repeated(monkeypatch):
    few = launched(4)
    names = {launch.source.name for launch in few.values()}
    assert {"_inputs_kernel", "_rmsnorm_kernel", "_rope_kernel", "_keep_kernel"} <= names
    assert {"sample_kernel", "_logprobs_kernel", "_penalize_kernel", "_count_kernel"} <= names
    assert any(type(launch.source).__name__ == "GluonASTSource" for launch in few.values())
    monkeypatch.setattr(dry_run, "fewer_layers", lambda spec: spec)
    assert launched(4).keys() == few.keys()


def test_layers_that_differ_are_all_run():
    spec = preset("qwen3-0.6b")
    assert dry_run.fewer_layers(spec).layers == 2
    windows = tuple(512 * (layer % 2) for layer in range(spec.layers))
    mixed = msgspec.structs.replace(spec, windows=windows)
    assert dry_run.fewer_layers(mixed) == mixed
