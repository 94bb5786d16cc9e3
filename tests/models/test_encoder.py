"""Text encoders against transformers on the same random weights: states, heads, pooling, and what the files say."""

import json

import pytest
import tiny_encoders
import torch
from safetensors.torch import load_file, save_file

from cairn.core.errors import RequestError, UnsupportedModel, WeightsError
from cairn.models.build import ModelBuild
from cairn.models.encoder.attend import Bidirectional
from cairn.models.encoder.families import encoder_spec
from cairn.models.encoder.head import classifier_head, probabilities
from cairn.models.encoder.load import load_encoder
from cairn.models.encoder.open import open_encoder
from cairn.models.encoder.pool import pooled
from cairn.models.encoder.pooling_rules import PoolingRules, read_pooling_rules
from cairn.models.encoder.texts import encode_pairs, encode_texts

LENGTHS = [1, 5, 23, 23, 40]
families = pytest.mark.parametrize("family", tiny_encoders.CONFIGS)


def texts_of(vocab, lengths=LENGTHS):
    torch.manual_seed(1)
    return [torch.randint(5, vocab, (length,)) for length in lengths]


@families
def test_hidden_states_are_those_of_transformers_in_both_forms(family, tmp_path):
    theirs = tiny_encoders.reference(family)
    opened = open_encoder(str(tiny_encoders.save(tmp_path, theirs)))
    texts = texts_of(opened.spec.vocab)
    with torch.inference_mode():
        expected = torch.cat([theirs(text[None]).last_hidden_state[0] for text in texts])
        for plain in (True, False):
            model, _ = opened.load_encoder("cpu", "float32", plain)
            attend = Bidirectional(LENGTHS, plain=plain)
            found = model(torch.cat(texts), attend.positions_T(), attend)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.1  # there is something to compare


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_form_of_a_gpu_computes_the_same(family, tmp_path, monkeypatch):
    """By the references of its kernels: norms that add, joined projections, a table of rotations by token."""
    from cairn.models.encoder import model as form
    from cairn.models.encoder.gpu_form import PackedStep

    opened = open_encoder(str(tiny_encoders.save(tmp_path, tiny_encoders.reference(family))))
    model = load_encoder(
        opened.encoder, opened.tensors, ModelBuild("cpu", torch.float32, fused=True)
    )
    texts, attend = texts_of(opened.spec.vocab), Bidirectional(LENGTHS)
    found = []
    for step in (form.packed_step, lambda _, *given: PackedStep(*given)):
        monkeypatch.setattr(form, "packed_step", step)
        with torch.inference_mode():
            found.append(model(torch.cat(texts), attend.positions_T(), attend))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_scores_of_a_classifier_are_those_of_transformers(family, tmp_path):
    """Of pairs, so that token types count where a model has them."""
    theirs = tiny_encoders.reference(family, "ForSequenceClassification", num_labels=3)
    opened = open_encoder(str(tiny_encoders.save(tmp_path, theirs)))
    model, _ = opened.load_encoder("cpu", "float32")
    spec = opened.encoder
    head = classifier_head(spec, opened.tensors)
    pair = encode_pairs(opened.tokenizer, [("the quick fox", "the lazy dog, isn't it")])[0]
    types = torch.arange(len(pair.ids)) >= pair.segment
    given = types.long() if spec.token_types > 1 else torch.zeros(len(pair.ids)).long()
    attend = Bidirectional([len(pair.ids)])
    tokens = torch.tensor(pair.ids)
    with torch.inference_mode():
        extra = {} if family == "modernbert" else {"token_type_ids": given[None]}
        expected = theirs(tokens[None], **extra).logits
        hidden = model(tokens, attend.positions_T(), attend, given)
        found = head(pooled(hidden, [len(tokens)], [spec.classifier.pooling]))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(probabilities(spec.classifier, found), expected.softmax(-1))
    assert spec.classifier.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_pooling_of_each_kind():
    hidden_TD = torch.randn(11, 4)
    lengths = [3, 7, 1]
    parts = hidden_TD.split(lengths)
    expected = {
        "mean": torch.stack([part.mean(0) for part in parts]),
        "max": torch.stack([part.amax(0) for part in parts]),
        "cls": torch.stack([part[0] for part in parts]),
        "last": torch.stack([part[-1] for part in parts]),
    }
    for rule, wanted in expected.items():
        torch.testing.assert_close(pooled(hidden_TD, lengths, [rule] * 3), wanted)
    mixed = pooled(hidden_TD, lengths, ["cls", "mean", "max"])
    torch.testing.assert_close(mixed[1], expected["mean"][1])
    torch.testing.assert_close(mixed[2], expected["max"][2])


def rules_of(folder, *kinds, **files):
    folder.mkdir()
    content = {"modules": tiny_encoders.modules("Transformer", *kinds)} | files
    for name, body in content.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(body))
    return read_pooling_rules(folder)


def test_what_the_files_beside_a_model_say(tmp_path):
    assert read_pooling_rules(tmp_path) == PoolingRules()
    old = rules_of(
        tmp_path / "old",
        "Pooling",
        "Normalize",
        **{
            "1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        },
        sentence_bert_config={"max_seq_length": 256},
    )
    assert (old.pooling, old.normalize, old.context) == ("cls", True, 256)
    new = rules_of(
        tmp_path / "new",
        "Pooling",
        "Dense",
        **{"1_Pooling__config": {"pooling_mode": "lasttoken", "include_prompt": True}},
        config_sentence_transformers={
            "prompts": {"query": "Query: ", "document": ""},
            "default_prompt_name": "document",
        },
    )
    assert (new.pooling, new.normalize, new.dense) == ("last", False, ("2_Dense",))
    assert (new.prompt("query"), new.prompt(None)) == ("Query: ", "")
    with pytest.raises(RequestError, match="prompt_name is 'other'"):
        new.prompt("other")
    for at, (kinds, config) in enumerate(
        [
            (("Pooling",), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}),
            (("Pooling",), {"pooling_mode": "weightedmean"}),
            (("Pooling",), {"pooling_mode": "mean", "include_prompt": False}),
            (("LSTM",), {}),
        ]
    ):
        with pytest.raises(UnsupportedModel):
            rules_of(tmp_path / str(at), *kinds, **{"1_Pooling__config": config})


def test_texts_are_cut_between_their_special_tokens(tmp_path):
    tokenizer = open_encoder(
        str(tiny_encoders.save(tmp_path, tiny_encoders.reference("bert")))
    ).tokenizer
    text = "the quick brown fox jumps over the lazy dog"
    whole = encode_texts(tokenizer, [text])[0].ids
    cut = encode_texts(tokenizer, [text], 6)[0].ids
    assert cut == [*whole[:5], 3]
    assert encode_texts(tokenizer, [text], 100)[0].ids == whole
    pair = encode_pairs(tokenizer, [("fox", text)])[0]
    assert (pair.ids[pair.segment - 1], pair.ids[-1]) == (3, 3)
    short = encode_pairs(tokenizer, [("fox", text)], len(pair.ids) - 2)[0]
    assert short.ids == [*pair.ids[:-3], 3]
    with pytest.raises(RequestError, match="first text of a pair"):
        encode_pairs(tokenizer, [(text, "fox")], 5)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    folder = tiny_encoders.save(tmp_path, tiny_encoders.reference("bert"))
    tensors = load_file(folder / "model.safetensors")
    odd = tensors | {"encoder.layer.0.surprise.weight": torch.zeros(2)}
    less = {name: value for name, value in tensors.items() if "layer.1.output" not in name}
    for wrong, said in ((odd, "surprise.weight"), (less, "are missing")):
        save_file(wrong, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(WeightsError, match=said):
            open_encoder(str(folder)).load_encoder("cpu", "float32")
    config = json.loads((folder / "config.json").read_text())
    for change in ({"position_embedding_type": "relative_key"}, {"new_field": 3}):
        with pytest.raises(UnsupportedModel):
            encoder_spec(config | change)
