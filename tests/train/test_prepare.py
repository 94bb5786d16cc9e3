"""What is found out before gigabytes move: whose tokenizer the weights know, where the run is written, what fits."""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from cairn.core.errors import CairnError, ConfigError, DataError
from cairn.models.hub import resolve
from cairn.models.presets import PRESETS, preset
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.train import prepare as preparing
from cairn.train import run_checks
from cairn.train.checkpoint.folder import ABOUT, folder_of, mark_complete
from cairn.train.checkpoint.load import About
from cairn.train.config import Data, Distill, Log, Model, Optim, Train
from cairn.train.data.store_writer import StoreWriter
from cairn.train.data.tokenizer_identity import tokenizer_hash
from cairn.train.data.tokenizer_trainer import byte_tokenizer, save_tokenizer
from cairn.train.describe import describe, shape_of, spec_of
from cairn.train.parallel.layout import Balance, Layout
from cairn.train.run import run
from cairn.train.run_checks import check_balance, check_folder, check_goes_on, check_memory
from cairn.train.run_lock import exclusive_run
from cairn.train.step import train_step

TINY = Model(checkpoint=Path("cairn-tiny"))


def recipe(model=TINY, **data) -> Train:
    return Train(model=model, data=Data(**({"sources": ["stories"], "sequence": 64} | data)))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A tokenizer whose ids all exist in the model, and mean something else there."""
    folder = tmp_path_factory.mktemp("other") / "tok"
    save_tokenizer(byte_tokenizer(), folder)
    return folder


def test_weights_are_found_by_name_and_bring_their_tokenizer():
    corpus, spec, start = describe(recipe())
    assert start is not None
    assert start.path == resolve("cairn-tiny")
    known = tokenizer_from_folder(start.path)
    assert corpus.tokenizer is not None
    assert tokenizer_hash(corpus.tokenizer) == tokenizer_hash(known)
    assert spec.vocab == start.spec.vocab
    assert spec_of(TINY) == start.spec  # and not the preset beside it
    assert spec_of(Model()) == shape_of(Model())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("change", [0, 5])
def test_another_number_of_layers_keeps_what_differs_from_layer_to_layer(name, change):
    own = preset(name)
    layers = own.layers + change
    found = shape_of(Model(preset=name, layers=layers))
    both = range(own.layers)
    assert found.layers == layers
    assert [found.window(n) for n in both] == [own.window(n) for n in both]
    assert [found.rope_of(n) for n in both] == [own.rope_of(n) for n in both]
    assert [found.mixer_of(n) for n in both] == [own.mixer_of(n) for n in both]
    assert [found.experts_of(n) is None for n in both] == [own.experts_of(n) is None for n in both]


def test_windows_go_on_as_they_began():
    assert shape_of(Model(preset="gemma-3-1b", layers=31)).windows[24:] == (512,) * 5 + (0, 512)
    assert shape_of(Model(preset="gemma-3-1b", layers=1)).windows == (512,)
    with pytest.raises(ConfigError, match="attends"):
        shape_of(Model(preset="tiny-qwen3-next", layers=1))


def test_a_tokenizer_that_the_weights_do_not_know_is_refused(other):
    with pytest.raises(ConfigError, match="is not the tokenizer of the weights") as error:
        describe(recipe(tokenizer=other))
    assert "leave data.tokenizer out" in (error.value.hint or "")


def test_a_store_of_another_tokenizer_is_refused(other, tmp_path):
    tokenizer = tokenizer_from_folder(other)
    with StoreWriter(tmp_path / "store", tokenizer) as writer:
        writer.add(tokenizer.encode("a few words, " * 40))
    sources = [str(tmp_path / "store")]
    with pytest.raises(DataError, match="was made with another tokenizer"):
        describe(recipe(sources=sources))
    describe(recipe(Model(), sources=sources))  # weights that are new learn any ids


def test_a_run_that_goes_on_keeps_its_tokenizer(other, tmp_path):
    config = Train(out=tmp_path, data=Data(sources=["arithmetic"], sequence=64, vocab=300))
    save_tokenizer(tokenizer_from_folder(other), tmp_path / "tokenizer")
    fresh = describe(config)[0].tokenizer  # no checkpoint yet: nothing has been learnt with it
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").write_text("{}")
    kept = describe(config)[0].tokenizer
    assert fresh is not None
    assert kept is not None
    assert tokenizer_hash(kept) == tokenizer_hash(byte_tokenizer()) != tokenizer_hash(fresh)


def test_text_is_data_with_or_without_a_tokenizer(other, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("words " * 400)
    for more in ({}, {"tokenizer": other}):
        corpus = describe(recipe(Model(), sources=[str(text)], **more))[0]
        ids = corpus.source.batch(0).tokens_T.tolist()
        assert "words words" in corpus.tokenizer.decode(ids)
    text.write_text("words")
    with pytest.raises(DataError, match="less than one sequence"):
        describe(recipe(Model(), sources=[str(text)]))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="is an empty folder"):
        describe(recipe(Model(), sources=[str(tmp_path / "nothing")]))


def test_a_balance_that_nobody_would_keep_is_refused():
    moe, dense = shape_of(Model(preset="tiny-moe")), shape_of(Model())
    asked = Train(balance=Balance(loss=0.01))
    with pytest.raises(ConfigError, match="without experts"):
        check_balance(asked, dense)
    check_balance(asked, moe)
    check_balance(Train(), dense)


def test_one_process_balances_its_experts(tmp_path):
    data = Data(sources=["random"], sequence=16, sequences=2, microbatch=1)
    config = Train(
        out=tmp_path / "run",
        device="cpu",
        model=Model(preset="tiny-moe", layers=1),
        data=data,
        balance=Balance(bias=0.5),
    )
    prepared = preparing.prepare(config)
    source = prepared.corpus.source
    train_step(prepared.state, [source.batch(0), source.batch(1)])
    (bias,) = (p.tensor for n, p in prepared.state.pieces().items() if n.endswith("router.bias"))
    assert set(bias.tolist()) <= {-0.5, 0.0, 0.5}
    assert bias.any()
    before = bias.clone()
    with torch.no_grad():
        prepared.state.parallel.parameters()["norm.weight"][0] = float("nan")
    train_step(prepared.state, [source.batch(2), source.batch(3)])  # vetoed
    assert torch.equal(bias, before)


def test_a_folder_that_is_a_file_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is a file"):
            check_folder(Train(out=out))
    check_folder(Train(out=tmp_path / "new" / "run"))


@pytest.mark.parametrize("name", ["model", "adapter", "tokenizer"])
def test_what_is_not_of_a_run_is_not_replaced(tmp_path, name):
    """A run writes these in its folder, in place of what is there: a base model beside it would be gone."""
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} would be replaced, and .* is no run"):
        check_folder(Train(out=tmp_path))
    (tmp_path / "recipe.toml").write_text("")
    check_folder(Train(out=tmp_path))


def test_a_run_does_not_replace_the_model_that_it_begins_with(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    base = Model(checkpoint=tmp_path / "other" / ".." / "model")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="which the run would replace at its end"):
        check_folder(Train(out=tmp_path, model=base))
    with pytest.raises(ConfigError, match=r"distill\.teacher is"):
        check_folder(Train(out=tmp_path, distill=Distill(teacher=str(tmp_path / "model"))))
    check_folder(Train(out=tmp_path / "run", model=base))


def test_a_run_that_is_there_is_looked_at_before_weights_are_made(tmp_path):
    config = Train(out=tmp_path)
    spec = shape_of(config.model)
    check_goes_on(config, spec)  # nothing is there
    folder = folder_of(tmp_path / "checkpoints", 4)
    folder.mkdir(parents=True)
    ran = msgspec.to_builtins(config, enc_hook=str)
    about = About(step=4, samples=32, spec=spec, config=ran)
    (folder / ABOUT).write_bytes(msgspec.json.encode(about))
    mark_complete(folder, 4)
    check_goes_on(config, spec)
    with pytest.raises(ConfigError, match="layers is"):
        check_goes_on(config, msgspec.structs.replace(spec, layers=9))
    with pytest.raises(ConfigError, match=r"optim\.states is .float32. there and .int8. here"):
        check_goes_on(Train(out=tmp_path, optim=Optim(states="int8")), spec)
    (folder / ABOUT).write_bytes(b"{")
    check_goes_on(config, spec)  # the loop will pass over it


def test_a_folder_that_a_made_up_source_hides_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random").mkdir()
    model = Model(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=16, vocab=32)
    data = Data(sources=["random"], sequence=16)
    prepared = preparing.prepare(Train(out=tmp_path / "run", device="cpu", model=model, data=data))
    assert any(note.endswith("under that name is ./random") for note in prepared.notes)


def test_two_runs_in_one_folder_are_one_too_many(tmp_path):
    with (
        exclusive_run(tmp_path),
        pytest.raises(ConfigError, match=f"another run writes to .*: process {os.getpid()} on"),
        exclusive_run(tmp_path),
    ):
        pass
    ran = Train(out=tmp_path, model=Model(preset="no such preset"))
    with exclusive_run(tmp_path), pytest.raises(ConfigError, match="another run writes to"):
        run(ran)  # before the model is even looked at
    with exclusive_run(tmp_path):  # and what is over is over
        pass


def test_states_of_8_bits_do_not_stand_in_the_way_of_muon():
    spec = shape_of(Model(preset="qwen3-0.6b"))
    asked = Train(parallel=Layout(tp=8), optim=Optim(states="int8"))
    with pytest.raises(ConfigError, match="3072 columns of the feed-forward / 8 % 256"):
        run_checks.check_layout(asked, spec, 8)
    muon = msgspec.structs.replace(asked, optim=Optim(kind="muon", states="int8"))
    run_checks.check_layout(muon, spec, 8)  # the layers' columns have no scales


def test_a_pipeline_that_idles_is_told():
    one, many = (
        Train(data=Data(sequences=4 * count, microbatch=4), parallel=Layout(pp=2))
        for count in (1, 8)
    )
    assert "1 microbatch leaves each rank idle for 50%" in preparing._idle(one)[0]
    assert not preparing._idle(many)
    assert not preparing._idle(Train())


def test_a_sink_that_is_missing_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(CairnError, match="wandb is not installed"):
        preparing.prepare(Train(out=tmp_path / "run", device="cpu", log=Log(wandb=True)))
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_is_refused_with_its_parts(monkeypatch):
    config = Train(model=Model(preset="qwen3-8b"))
    spec = shape_of(config.model)
    monkeypatch.setattr(run_checks, "free_bytes", lambda device: 64 << 30)
    with pytest.raises(ConfigError, match=r"states 61\.0") as error:  # 30.5 + 61 GiB
        check_memory(config, spec, "cpu")
    assert "64 GiB are free" in error.value.message
    monkeypatch.setattr(run_checks, "free_bytes", lambda device: 96 << 30)
    check_memory(config, spec, "cpu")
