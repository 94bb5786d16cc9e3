"""Text, jsonl and chats as data without a step before; and a chat template for a model that has none."""

import json

import msgspec
import pytest
import tokenizers
from forked import run_ranks
from tiny_runs import recipe

from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.train.config import Checkpoint, Data, Model, Schedule, Validation
from cairn.train.corpus import open_corpus
from cairn.train.data.default_template import with_chat_template
from cairn.train.data.raw_text import holds_chats, is_raw, store_of, texts_of
from cairn.train.data.store import Store
from cairn.train.data.text_files import find_files
from cairn.train.data.tokenize import tokenize
from cairn.train.data.tokenizer_identity import id_limit
from cairn.train.data.tokenizer_trainer import byte_tokenizer, save_tokenizer
from cairn.train.metrics_log import read_held_out, read_log
from cairn.train.run import run

BYTES = byte_tokenizer()
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes!"}]}
SMALL = Model(preset="tiny-qwen3", layers=1, hidden=32, heads=2, kv_heads=1, intermediate=48)


@pytest.fixture
def files(tmp_path):
    """A text file, a folder of two, jsonl with texts, and chats."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (tmp_path / "a.txt").write_text("One day a dog ran to the park. " * 40)
    (folder / "b.md").write_text("A cat sat. " * 60)
    (folder / "c.jsonl").write_text(
        "".join(json.dumps({"text": f"line {n} "}) + "\n" for n in range(40))
    )
    (tmp_path / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 40)
    return tmp_path


def test_what_is_text_and_what_is_not(files):
    assert [is_raw(files / name) for name in ("a.txt", "corpus", "chats.jsonl")] == [True] * 3
    tokenize(find_files([files / "a.txt"]), BYTES, files / "store")
    (files / "t.parquet").write_bytes(b"x")
    (files / "empty").mkdir()
    for name in ("store", "t.parquet", "empty", "absent"):
        assert not is_raw(files / name)
    assert holds_chats(files / "chats.jsonl")
    assert not holds_chats(files / "corpus")


def test_the_store_is_that_of_tokenize_and_is_made_once(files):
    made = store_of(files / "corpus", BYTES, files / "cache")
    tokenize(find_files([files / "corpus"]), BYTES, files / "plain")
    assert Store(made).identity == Store(files / "plain").identity
    stamp = (made / "tokens.bin").stat().st_mtime_ns
    assert store_of(files / "corpus", BYTES, files / "cache") == made
    assert (made / "tokens.bin").stat().st_mtime_ns == stamp
    (files / "corpus" / "b.md").write_text("A dog sat. " * 61)
    assert store_of(files / "corpus", BYTES, files / "cache") != made
    assert Store(store_of(files / "chats.jsonl", BYTES, files / "cache")).has_mask


def test_several_processes_share_one_store(files):
    def make(rank, world):
        return str(store_of(files / "corpus", BYTES, files / "cache"))

    assert len(set(run_ranks(3, make))) == 1
    assert len([entry for entry in (files / "cache").iterdir() if entry.is_dir()]) == 1


def test_a_tokenizer_is_trained_on_the_beginning_of_every_text(files, monkeypatch):
    monkeypatch.setattr("cairn.train.data.raw_text.READ_FOR_TOKENIZER", 20)
    texts = list(texts_of([files / "corpus", files / "chats.jsonl"]))
    assert "A cat sat" in texts[0]
    assert texts[-4:] == ["Hi", "Yes!", "Hi", "Yes!"]


def test_a_run_learns_from_text_and_goes_on_exactly(files):
    data = Data(
        sources=[str(files / "corpus"), str(files / "a.txt")],
        vocab=280,
        sequence=32,
        sequences=4,
        microbatch=4,
    )
    settings = dict(
        model=SMALL, data=data, validation=Validation(share=0.2), schedule=Schedule(kind="constant")
    )

    def losses(name):
        return [record.loss for record in read_log(files / name)]

    run(recipe(files / "whole", steps=6, **settings), log_line=lambda text: None)
    for steps in (3, 6):
        run(recipe(files / "parts", steps=steps, **settings), log_line=lambda text: None)
    assert losses("whole") == losses("parts")
    assert losses("whole")[-1] < losses("whole")[0]
    assert read_held_out(files / "whole")[-1].bits_per_byte > 0
    assert len(list((files / "whole" / "data").glob("*/docs.idx"))) == 2


def bare(*marks):
    """A tokenizer of bytes without a chat template, and only the marks that are named."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain = tokenizers.Tokenizer.from_str(BYTES.backend.to_str())
    backend.pre_tokenizer, backend.decoder = plain.pre_tokenizer, plain.decoder
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend.model = tokenizers.models.BPE({name: at for at, name in enumerate(alphabet)}, [])
    backend.add_special_tokens(["</s>", *marks])
    named = {"eos_token": "</s>"}
    return Tokenizer(backend, SpecialTokens(named=named, eos_ids=(256,)), {}, "a base model")


@pytest.mark.parametrize(
    ("base", "rows", "limit", "text"),
    [
        (bare(), None, 259, "<|im_start|>user\nHi<|im_end|>\n"),  # as many rows as are needed
        (bare(), 259, 259, "<|im_start|>user\nHi<|im_end|>\n"),  # padding rows of the embedding
        (bare("<|im_start|>", "<|im_end|>"), 259, 259, "<|im_start|>user\nHi<|im_end|>\n"),
        (bare(), 258, 257, "<|im_start|>user\nHi</s>\n"),  # no room: the end of text ends a message
    ],
)
def test_a_base_model_gets_a_template_that_fits_its_embedding(base, rows, limit, text):
    made = with_chat_template(base, rows)
    assert made.chat([{"role": "user", "content": "Hi"}], None, False) == text
    assert id_limit(made) == limit
    assert with_chat_template(made, rows) is made
    ends = made.encode(text.strip(), special=False)[-1]
    assert ends in made.eos_ids
    assert not base.templates


def test_the_template_is_saved_with_the_model(files):
    """Fine-tuning weights whose tokenizer has no template; the export can chat."""
    save_tokenizer(bare(), files / "base")
    data = Data(
        sources=[str(files / "chats.jsonl")],
        tokenizer=files / "base",
        sequence=64,
        sequences=2,
        microbatch=2,
    )
    config = recipe(files / "run", steps=2, model=SMALL, data=data, checkpoint=Checkpoint())
    finished = run(config, log_line=lambda text: None)
    made = tokenizer_from_folder(finished.model)
    assert "<|im_start|>assistant" in made.chat([{"role": "user", "content": "Hi"}])
    assert made.id("<|im_end|>") in made.eos_ids
    # The run that goes on uses the tokenizer that it kept.
    again = msgspec.structs.replace(config, steps=3)
    assert run(again, log_line=lambda text: None).outcome.step == 3
    kept = tokenizer_from_folder(files / "run" / "tokenizer")
    corpus = open_corpus(data, 0, 300, kept, cache=files / "run" / "data")
    learnt = corpus.source.batch(0).targets_T
    assert made.decode(learnt[learnt >= 0].tolist(), skip_special=False).startswith(
        "Yes!<|im_end|>"
    )
