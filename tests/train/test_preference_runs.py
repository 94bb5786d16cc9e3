"""Recipes with an [objective]: files of preferences, from lines to a model that prefers."""

import json

import msgspec
import pytest
import tiny_tokenizers
import torch
import transformers

from cairn.core.errors import ConfigError, DataError
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.train.config import Adapter, Checkpoint, Data, Model, Objective, Optim, Schedule, Train
from cairn.train.data.batch import IGNORED
from cairn.train.data.preferences import Preferences
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Layout
from cairn.train.run import run

TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with a tokenizer and a chat template."""
    torch.manual_seed(3)
    folder, backend = tmp_path_factory.mktemp("base") / "m", tiny_tokenizers.byte_level()
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return tiny_tokenizers.save(
        folder, backend, eos_token="<|end|>", bos_token="<|begin|>", chat_template=TEMPLATE
    )


def pairs(file):
    lines = [
        {"prompt": f"{n} is ", "chosen": "good" if n % 2 else "fine", "rejected": "bad and wrong"}
        for n in range(8)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def singles(file):
    lines = [
        {"prompt": f"{n} is ", "completion": "good" if n % 2 else "bad", "label": bool(n % 2)}
        for n in range(8)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def recipe(base, file, out, kind, **changes):
    fields = dict(
        steps=8,
        out=out,
        device="cpu",
        model=Model(checkpoint=base),
        data=Data(sources=[str(file)], sequence=64, sequences=8, microbatch=4),
        optim=Optim(lr=2e-2, weight_decay=0.0),
        schedule=Schedule(kind="constant"),
        objective=Objective(kind=kind),
        adapter=Adapter(rank=4),
        checkpoint=Checkpoint(every=0, export=False),
    )
    return Train(**(fields | changes))


FIRST = {"dpo": 0.6931, "ipo": 1.0, "kto": 0.5, "orpo": None, "simpo": None, "reward": None}


@pytest.mark.parametrize("kind", FIRST)
def test_each_objective_learns_to_prefer(base, tmp_path, kind):
    file = (singles if kind == "kto" else pairs)(tmp_path / "p.jsonl")
    config = recipe(base, file, tmp_path / "r", kind)
    if kind == "ipo":  # which aims at a margin: a nearer one, in smaller steps
        nearer = Objective(kind="ipo", beta=0.5)
        config = msgspec.structs.replace(config, objective=nearer, optim=Optim(lr=5e-3))
    finished = run(config, log_line=lambda line: None)
    outcome, records = finished.outcome, read_log(tmp_path / "r")
    if FIRST[kind] is not None:  # policy and reference agree at first
        assert outcome.first_loss == pytest.approx(FIRST[kind], abs=1e-3)
    assert outcome.last_loss < 0.98 * outcome.first_loss
    if kind == "kto":
        assert records[-1].metrics["margin"] > 1.0
    else:
        assert records[-1].metrics["preferred"] == 1.0


def test_whole_weights_have_the_first_ones_as_reference(base, tmp_path):
    file = pairs(tmp_path / "p.jsonl")
    config = recipe(base, file, tmp_path / "r", "dpo", adapter=Adapter(), optim=Optim(lr=1e-3))
    outcome = run(config, log_line=lambda line: None).outcome
    assert outcome.first_loss == pytest.approx(0.6931, abs=1e-3)
    assert outcome.last_loss < 0.6


def test_samples(base, tmp_path):
    tokenizer = tokenizer_from_folder(base)
    file = tmp_path / "p.jsonl"
    asked = [{"role": "user", "content": "hi"}]
    line = {
        "prompt": asked,
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no no"}],
        "margin": 2.0,
    }
    file.write_text("\ufeff" + json.dumps(line) + "\n\n", encoding="utf-8")
    source = Preferences([tmp_path], tokenizer, 96, 0, judged=False)
    batch = source.batch(3)
    assert len(batch.tokens_T) == 96
    assert len(batch.lengths) == 3
    assert batch.extra["margin"].unique().tolist() == [2.0]
    said = [
        tokenizer.decode(part[part != IGNORED].tolist(), skip_special=False)
        for part in batch.targets_T.split(batch.lengths)
    ]
    assert said == ["yes<|end|>", "no no<|end|>", ""]
    assert batch.extra["side"].tolist() == [
        side for side, length in enumerate(batch.lengths) for _ in range(length)
    ]
    scored = Preferences([file], tokenizer, 96, 0, judged=False, scored=True).batch(3)
    last = [length - 1 for length in scored.lengths[:2]]
    for part, at in zip(scored.targets_T.split(scored.lengths), last, strict=False):
        assert (part != IGNORED).nonzero().flatten().tolist() == [at]
        assert part[at] in tokenizer.eos_ids
    with pytest.raises(DataError, match=r"p\.jsonl:1: two answers .* --data\.sequence 64"):
        Preferences([file], tokenizer, 16, 0, judged=False)
    with pytest.raises(DataError, match="has no completion"):
        Preferences([file], tokenizer, 96, 0, judged=True)


def test_mistakes(base, tmp_path):
    config = recipe(base, tmp_path / "absent.jsonl", tmp_path / "r", "dpo")
    with pytest.raises(DataError, match="there are no preferences at"):
        run(config, log_line=lambda line: None)
    with pytest.raises(ConfigError, match="whole answer"):
        msgspec.structs.replace(config, parallel=Layout(cp=2))
    with pytest.raises(ConfigError, match="needs a reference"):
        recipe(base, "p", tmp_path, "kto", model=Model(), adapter=Adapter())
