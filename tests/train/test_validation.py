"""Held-out loss, bits per byte and sample texts: right, the same in every layout, without an effect on training."""

import functools
import math

import msgspec
import pytest
import torch
from forked import run_ranks
from tiny_runs import recipe

from cairn.core.errors import ConfigError
from cairn.models.attend import PackedDocuments
from cairn.models.layers import ModelBuild
from cairn.models.weights import random_model
from cairn.train import serving_kl
from cairn.train.config import Data, Model, Precision, Schedule, Validation
from cairn.train.data import procedural
from cairn.train.data.batch import IGNORED, make_batch
from cairn.train.data.source import microbatch
from cairn.train.data.tokenizer_trainer import byte_tokenizer
from cairn.train.metrics_log import HeldOut, JsonLines, numbers, read_held_out, read_log
from cairn.train.parallel.layout import Layout
from cairn.train.prepare import prepare
from cairn.train.recipes import RECIPES
from cairn.train.recipes import recipe as named_recipe
from cairn.train.run import make_validation, run
from cairn.train.validation import in_words, text_bytes

SMALL = Model(preset="tiny-qwen3", layers=2, hidden=32, heads=2, kv_heads=2, intermediate=48)
STORIES = Data(sources=["stories"], vocab=300, sequence=64, sequences=4, microbatch=2)
HELD = Validation(share=0.1, every=2, batches=2, prompts=["Once upon", "The cat"], tokens=6)


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer():
    """Every run here learns the same one: the first trains it, and ranks, which are forks, find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procedural, "small_tokenizer", functools.cache(procedural.small_tokenizer))
        yield


def config(folder, layout=None, **changes):
    fields = dict(
        model=SMALL,
        data=STORIES,
        validation=HELD,
        parallel=layout or Layout(),
        steps=6,
        schedule=Schedule(kind="constant"),
    )
    return recipe(folder, **(fields | changes))


def measured(rank, world, folder, layout):
    prepared = prepare(config(folder, layout))
    return make_validation(prepared).measure()


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_the_held_out_loss_is_that_of_the_plain_model(kernels, tmp_path):
    prepared = prepare(config(tmp_path, precision=Precision(kernels=kernels)))
    held = make_validation(prepared).measure()
    spec, corpus = prepared.state.spec, prepared.corpus
    model = random_model(spec, ModelBuild("cpu"), 0)
    batch = microbatch(corpus.held_out, range(8))
    with torch.no_grad():
        hidden_TD = model(batch.tokens_T, batch.positions_T, PackedDocuments(batch.lengths))
        nats = torch.nn.functional.cross_entropy(
            model.logits(hidden_TD), batch.targets_T, ignore_index=IGNORED, reduction="sum"
        ).item()
    assert held.tokens == batch.valid()
    assert held.loss == pytest.approx(nats / batch.valid(), rel=1e-5)
    # The text of the targets, read back by the tokenizer document by document.
    size = sum(
        len(corpus.tokenizer.decode([t for t in part.tolist() if t >= 0]).encode())
        for part in batch.targets_T.split(batch.lengths)
    )
    assert held.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    # The continuations, one token at a time and one text at a time.
    for prompt, text in zip(HELD.prompts, held.texts, strict=True):
        ids = corpus.tokenizer.encode(prompt)
        for _ in range(HELD.tokens):
            with torch.no_grad():
                hidden_TD = model(
                    torch.tensor(ids), torch.arange(len(ids)), PackedDocuments([len(ids)])
                )
                token = int(model.logits(hidden_TD[-1:]).argmax())
            if token in corpus.tokenizer.eos_ids:
                break
            ids.append(token)
        assert text == corpus.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return measured(0, 1, tmp_path_factory.mktemp("alone"), Layout())


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), Layout(fsdp=2), Layout(tp=2), Layout(pp=2), Layout(cp=2)]
)
def test_every_layout_measures_the_same(layout, alone, tmp_path):
    for held in run_ranks(2, measured, tmp_path, layout):
        assert held.loss == pytest.approx(alone.loss, rel=1e-6)
        assert held.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-6)
        assert (held.tokens, held.texts) == (alone.tokens, alone.texts)


def test_a_blend_has_a_loss_of_each_source(tmp_path):
    """Each is that of the source's own held-out samples; together they are the loss of the blend."""
    blend = msgspec.structs.replace(STORIES, sources=["stories", "arithmetic"], weights=[3.0, 1.0])
    wanted = config(tmp_path, data=blend, steps=2)
    said: list[str] = []
    held = run(wanted, log_line=said.append).outcome.held_out
    prepared = prepare(config(tmp_path / "alone", data=blend))
    start = make_validation(prepared).measure()  # of random weights
    model = random_model(prepared.state.spec, ModelBuild("cpu"), 0)
    for place, (name, loss) in enumerate(start.by_source.items()):
        samples = [prepared.corpus.held_out.sources[place].batch(n) for n in range([6, 2][place])]
        nats = tokens = 0
        for one in samples:
            with torch.no_grad():
                hidden_TD = model(one.tokens_T, one.positions_T, PackedDocuments(one.lengths))
                nats += torch.nn.functional.cross_entropy(
                    model.logits(hidden_TD), one.targets_T, ignore_index=IGNORED, reduction="sum"
                ).item()
            tokens += one.valid()
        assert loss == pytest.approx(nats / tokens, rel=1e-5), name
    (line,) = [line for line in said if line.startswith("step 2: held-out loss")]
    for name, loss in held.by_source.items():
        assert f"{name} {loss:.4f}" in line
        assert numbers(held)[f"validation/loss of {name}"] == loss
        assert f"held out, {name}" in (tmp_path / "report.html").read_text()
    (kept,) = read_held_out(tmp_path)
    assert list(kept.by_source) == ["stories", "arithmetic"]


def test_validation_changes_no_step_and_a_resumed_run_measures_the_same(tmp_path):
    def losses(name):
        return [(record.step, record.loss) for record in read_log(tmp_path / name)]

    def held(name):
        return [msgspec.structs.replace(one, seconds=0) for one in read_held_out(tmp_path / name)]

    whole = run(config(tmp_path / "whole"), log_line=lambda text: None)
    said: list[str] = []
    run(config(tmp_path / "parts", steps=4), log_line=said.append)
    run(config(tmp_path / "parts"), log_line=said.append)
    run(config(tmp_path / "without", validation=Validation()), log_line=lambda text: None)
    # Of a source that is made up, nothing is taken away from the training data.
    assert losses("whole") == losses("without") == losses("parts")
    assert held("whole") == held("parts")
    assert [one.step for one in held("whole")] == [2, 4, 6]
    assert whole.outcome.held_out.loss == held("whole")[-1].loss
    assert not read_held_out(tmp_path / "without")
    assert any(line.startswith("step 6: held-out loss") for line in said)
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "held out" in page
    assert "Once upon" in page


def test_special_tokens_and_ignored_targets_spell_no_bytes():
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode("Größe"), tokenizer.eos_ids[0]]
    targets = torch.tensor([*ids[1:], IGNORED])
    batch = make_batch(torch.tensor(ids), targets, [len(ids)], [0])
    assert text_bytes(batch, tokenizer) == len("röße".encode())
    assert text_bytes(batch, None) == 0


@pytest.mark.parametrize("name", RECIPES)
def test_validation_costs_at_most_two_percent_of_a_recipe(name):
    """In tokens: a pass without gradients is a third of one with them."""
    chosen = named_recipe(name)
    validation, data = chosen.validation, chosen.data
    times = chosen.steps // validation.every + bool(chosen.steps % validation.every)
    prompt = 8  # tokens, about
    texts = (
        validation.tokens * 64 * -(-len(validation.prompts) * (validation.tokens + prompt) // 64)
    )
    per_time = validation.batches * data.sequences * data.sequence + texts
    assert validation.share > 0
    assert times * per_time / 3 <= 0.02 * chosen.steps * chosen.tokens_per_step


def test_a_prompt_without_a_token_is_refused_before_the_run():
    with pytest.raises(ConfigError, match="empty text"):
        config(None, validation=Validation(prompts=["Once", ""], tokens=6))


def test_numbers_and_lines_for_other_tools(tmp_path):
    held = HeldOut(step=4, loss=2.0, bits_per_byte=None, tokens=8, seconds=0.5, texts=["a\nb"])
    assert numbers(held) == {
        "validation/loss": 2.0,
        "validation/tokens": 8.0,
        "validation/seconds": 0.5,
    }
    assert in_words(held) == ["step 4: held-out loss 2.0000", "step 4: a b"]
    assert in_words(HeldOut(step=1)) == []
    sink = JsonLines(tmp_path, 0)
    for step in (2, 4, 6):
        sink.put(msgspec.structs.replace(held, step=step))
    sink.close()
    JsonLines(tmp_path, 4).close()
    assert [one.step for one in read_held_out(tmp_path)] == [2, 4]


@pytest.mark.gpu
def test_the_held_out_loss_on_a_gpu_is_that_of_a_cpu(tmp_path):
    """In bfloat16, through our kernels where the shape allows them."""
    precision = Precision(kind="bfloat16")
    here = make_validation(prepare(config(tmp_path))).measure()
    there = make_validation(prepare(config(tmp_path, device="cuda", precision=precision))).measure()
    assert there.tokens == here.tokens
    assert there.loss == pytest.approx(here.loss, rel=0.01)
    assert all(
        text.startswith(start) for text, start in zip(there.texts, HELD.prompts, strict=True)
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_kl_to_the_served_model_is_what_rounding_makes(kind, tmp_path, monkeypatch):
    """Nothing where both sides are plain; more as soon as the server computes something else."""
    held = msgspec.structs.replace(HELD, prompts=[], serving_kl=True)
    prepared = prepare(config(tmp_path, validation=held, precision=Precision(kind=kind)))
    found = make_validation(prepared).measure()
    assert 0 <= found.serving_kl < (1e-9 if kind == "float32" else 1e-4)
    assert "KL to the served model" in in_words(found)[0]
    right = serving_kl.serving_model

    def wrong(state):
        model = right(state)
        model.layers[0].feed_forward_norm.eps = 1e-2
        return model

    monkeypatch.setattr(serving_kl, "serving_model", wrong)
    assert make_validation(prepared).measure().serving_kl > 1e-7


def test_the_kl_to_the_served_model_is_off_by_default(tmp_path):
    held = msgspec.structs.replace(HELD, prompts=[])
    assert make_validation(prepare(config(tmp_path, validation=held))).measure().serving_kl is None


def test_a_rank_with_some_of_the_layers_cannot_measure_the_served_model(tmp_path, monkeypatch):
    state = prepare(config(tmp_path)).state
    everything = state.parallel.named_state()
    assert serving_kl.obstacle(state) is None
    first = {name: piece for name, piece in everything.items() if not name.startswith("layers.1.")}
    monkeypatch.setattr(state.parallel, "named_state", lambda: first)
    assert serving_kl.obstacle(state) == "no rank holds the whole model"
