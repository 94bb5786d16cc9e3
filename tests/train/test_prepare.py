"""What is found out before gigabytes move: whose tokenizer the weights know, where the run is written, what fits."""

from pathlib import Path

import pytest

from cairn.core.errors import CairnError, ConfigError, DataError
from cairn.models.hub import resolve
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.train import prepare as preparing
from cairn.train.config import Data, Log, Model, Train
from cairn.train.data.store_writer import StoreWriter
from cairn.train.data.tokenizer_identity import tokenizer_hash
from cairn.train.data.tokenizer_trainer import byte_tokenizer, save_tokenizer
from cairn.train.parallel.layout import Layout, Options
from cairn.train.prepare import (
    check_balance,
    check_folder,
    check_memory,
    describe,
    shape_of,
    spec_of,
)

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


def test_text_is_no_data_with_or_without_a_tokenizer(other, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("words")
    for more in ({}, {"tokenizer": other}):
        with pytest.raises(DataError, match="is text, not tokens"):
            describe(recipe(Model(), sources=[str(text)], **more))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="is an empty folder"):
        describe(recipe(Model(), sources=[str(tmp_path / "nothing")]))


def test_a_balance_that_nobody_would_keep_is_refused():
    moe, dense = shape_of(Model(preset="tiny-moe")), shape_of(Model())
    alone = Train(spread=Options(balance_loss=0.01))
    with pytest.raises(ConfigError, match="without experts"):
        check_balance(alone, dense)
    with pytest.raises(ConfigError, match="with one process"):
        check_balance(alone, moe)
    check_balance(Train(), moe)
    spread = Train(
        spread=Options(balance_bias=0.01), parallel=Layout(dp=2), data=Data(microbatch=4)
    )
    check_balance(spread, moe)


def test_a_folder_that_is_a_file_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is a file"):
            check_folder(Train(out=out))
    check_folder(Train(out=tmp_path / "new" / "run"))


def test_a_sink_that_is_missing_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(CairnError, match="wandb is not installed"):
        preparing.prepare(Train(out=tmp_path / "run", device="cpu", log=Log(wandb=True)))
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_is_refused_with_its_parts(monkeypatch):
    config = Train(model=Model(preset="qwen3-8b"))
    spec = shape_of(config.model)
    monkeypatch.setattr(preparing, "free_bytes", lambda device: 64 << 30)
    with pytest.raises(ConfigError, match=r"states 61\.0") as error:  # 30.5 + 61 GiB
        check_memory(config, spec, "cpu")
    assert "64 GiB are free" in error.value.message
    monkeypatch.setattr(preparing, "free_bytes", lambda device: 96 << 30)
    check_memory(config, spec, "cpu")
