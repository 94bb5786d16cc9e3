"""Other weights under a running engine: it answers as one that was started with them, and finds no old pages."""

import functools
import threading
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file
from tiny_engines import at_rest, greedy, prompt_of, submit

from cairn.comm.transfer.choose_transport import make_transport
from cairn.comm.transfer.weight_sync import WeightSource
from cairn.core.errors import CairnError, ConfigError, RequestError, WeightsError
from cairn.models.checkpoint import open_checkpoint
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.linear.maps import linears
from cairn.models.linear.transposed import TransposedForm
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.transformer import Transformer
from cairn.models.weight_shards import held_by_rows, write_shards
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.start import start_with
from cairn.serve.engine.weight_sources import SyncedWeights

FAMILY = "qwen3"
PROMPT = prompt_of(37, seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The same model with its layers' weights in another order, so that answers differ."""
    old, new = tiny_checkpoints.folder(FAMILY), tmp_path_factory.mktemp("other")
    tensors = load_file(old / "model.safetensors")
    flipped = {
        name: value.flip(0).contiguous() if "mlp" in name else value
        for name, value in tensors.items()
    }
    for path in old.iterdir():
        if path.suffix == ".json":
            (new / path.name).write_bytes(path.read_bytes())
    save_file(flipped, new / "model.safetensors", metadata={"format": "pt"})
    return new


def fresh(**how) -> Engine:
    """On a model of its own: others must not see its weights change."""
    net = open_checkpoint(tiny_checkpoints.folder(FAMILY)).load("cpu", torch.float32)
    config = EngineConfig(
        model=FAMILY,
        device="cpu",
        dtype="float32",
        block_size=16,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        **how,
    )
    opened = OpenModel(FAMILY, net.spec, None, (), None)
    return start_with(opened, Runnable(FAMILY, net, "a test"), config).engine


@functools.cache
def wanted(folder: Path, prompt: tuple[int, ...] = tuple(PROMPT), most: int = 14) -> list[int]:
    net = open_checkpoint(folder).load("cpu", torch.float32)
    return list(Generation(net, prompt, GenerateSampling(max_tokens=most), ()))


def answer(engine: Engine) -> list[int]:
    (request,) = submit(engine, [PROMPT])
    engine.run()
    return request.outputs


@pytest.mark.parametrize(
    "how", [{}, {"plain": True}, {"batch_invariant": True}], ids=["fast", "plain", "invariant"]
)
def test_it_answers_as_an_engine_that_was_started_with_them(other, how):
    engine = fresh(**how)
    assert answer(engine) == greedy(FAMILY, PROMPT)
    engine.load_weights(1, str(other))
    # The prompt's pages are still there, and belong to the first weights.
    assert answer(engine) == wanted(other) != greedy(FAMILY, PROMPT)
    (again,) = submit(engine, [PROMPT])
    engine.run()
    assert again.cached > 0
    engine.load_weights(2, str(tiny_checkpoints.folder(FAMILY)))
    assert answer(engine) == greedy(FAMILY, PROMPT)
    at_rest(engine)


def test_copies_by_columns_follow(other):
    engine = fresh(plain=True)
    for part in linears(engine.runner.model):
        part.take(TransposedForm(part.joined()))
    engine.load_weights(1, str(other))
    assert answer(engine) == wanted(other)


@pytest.mark.parametrize("overlap", [False, True])
def test_kept_requests_go_on_and_waiting_ones_have_the_new_weights(other, overlap):
    engine = fresh()
    engine.overlap = overlap
    (running,) = submit(engine, [PROMPT], max_tokens=20)
    for _ in range(6):
        engine.step()
    engine.pause()
    engine.step()
    before = list(running.outputs)
    assert before == greedy(FAMILY, PROMPT, 20)[: len(before)]
    assert not engine.has_work
    assert engine.step() == []
    (waiting,) = submit(engine, [prompt_of(20, seed=3)])
    engine.load_weights(7, str(other))
    engine.resume()
    engine.run()
    assert running.outputs[: len(before)] == before
    assert len(running.outputs) == 20
    assert running.outputs != greedy(FAMILY, PROMPT, 20)
    assert waiting.outputs == wanted(other, tuple(waiting.prompt))
    # The kept request's pages are of two versions: nobody finds them.
    assert answer(engine) == wanted(other)
    at_rest(engine)


def test_a_number_that_comes_again_finds_no_pages_of_the_weights_that_had_it(other):
    """A trainer that went back counts from there again, and a server is told to go back to what it had."""
    engine, first = fresh(), str(tiny_checkpoints.folder(FAMILY))
    engine.load_weights(1, str(other))
    assert answer(engine) == wanted(other)
    engine.load_weights(1, first)
    assert answer(engine) == greedy(FAMILY, PROMPT)
    (running,) = submit(engine, [PROMPT], max_tokens=30)
    for _ in range(6):
        engine.step()
    engine.load_weights(2, str(other))
    engine.run()  # its last pages are of both
    engine.load_weights(1, first)
    prompt = [*PROMPT, *running.outputs]
    (behind,) = submit(engine, [prompt])
    engine.run()
    assert behind.outputs == greedy(FAMILY, prompt)
    at_rest(engine)


def test_pause_without_keeping_ends_everything(other):
    engine = fresh()
    requests = submit(engine, [PROMPT, prompt_of(5, seed=2)])
    engine.step()
    assert set(engine.pause(keep=False)) == set(requests)
    assert {request.finish for request in requests} == {"abort"}
    engine.reset_prefix_cache()
    engine.resume()
    assert answer(engine) == greedy(FAMILY, PROMPT)


def test_the_prefix_cache_is_not_reset_under_a_request():
    engine = fresh()
    submit(engine, [PROMPT])
    engine.step()
    with pytest.raises(RequestError, match="pages are in use"):
        engine.reset_prefix_cache()


def test_what_fails_leaves_the_old_weights(other, tmp_path):
    engine = fresh()
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in other.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors.pop(sorted(tensors)[-1])
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="missing"):
        engine.load_weights(1, str(broken))
    with pytest.raises(
        ConfigError, match="another model than the one that is served: family llama"
    ):
        engine.load_weights(1, str(tiny_checkpoints.folder("llama")))
    with pytest.raises(CairnError):
        engine.load_weights(1, str(tmp_path / "nothing"))
    with pytest.raises(RequestError, match="version is 0"):
        engine.load_weights(0, str(other))
    assert engine.version == 0
    assert answer(engine) == greedy(FAMILY, PROMPT)


def test_packed_weights_are_refused_by_name(other):
    engine = fresh(weights="int8")
    before = answer(engine)
    with pytest.raises(
        ConfigError, match=r"packed when it started \((Int8|RoundedRows)"
    ) as refused:
        engine.load_weights(1, str(other))
    assert "float" in (refused.value.hint or "")
    assert (engine.version, len(answer(engine))) == (0, len(before))


@pytest.mark.parametrize("ranks", [1, 3])
def test_from_the_ranks_of_a_trainer(other, ranks):
    """Each holds rows of every tensor; the engine pulls what it needs from all of them."""
    net = open_checkpoint(other).load("cpu", torch.float32)
    ends = [make_transport("tcp", f"trainer-{rank}-of-{ranks}") for rank in range(ranks)]
    sources = [_published(net, end, rank, ranks) for rank, end in enumerate(ends)]
    threads = [threading.Thread(target=source.until_taken, args=(5, 1, 60.0)) for source in sources]
    for thread in threads:
        thread.start()
    engine = fresh()
    engine.load_weights(5, SyncedWeights(addresses=[source.address for source in sources]))
    for thread in threads:
        thread.join(60)
    for source in sources:
        source.close()
    assert answer(engine) == wanted(other)


def _published(net: Transformer, end, rank: int, ranks: int) -> WeightSource:
    held = held_by_rows(net.spec, torch.float32, rank, ranks)
    source = WeightSource(end, held)
    write_shards(source.memory, held, net)
    source.publish(5)
    return source
