"""T5: an encoder and a decoder that looks at it compute what transformers' do, token by token and at once."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from cairn.cli.chat import generate
from cairn.core.errors import UnsupportedModel, UsageError, WeightsError
from cairn.models.text_to_text.load import load_t5
from cairn.models.text_to_text.model import DecodedTokens, answer, buckets_of
from cairn.models.text_to_text.spec import t5_spec

SIZES = dict(
    vocab_size=97,
    d_model=32,
    d_kv=12,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=3,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    decoder_start_token_id=0,
)
KINDS = {"relu": {}, "gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}}


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    torch.manual_seed(1)
    config = transformers.T5Config(**SIZES | KINDS[request.param])
    reference = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp("t5")
    reference.save_pretrained(folder)
    return reference, folder


@torch.inference_mode()
def test_logits_and_greedy_tokens_are_those_of_transformers(both):
    reference, folder = both
    model = load_t5(folder)
    source, target = torch.randint(2, 97, (40,)), torch.randint(2, 97, (25,))
    target[0] = 0
    memory, whole = model.remember(source), DecodedTokens()
    ours = model.read(target, whole, memory)
    theirs = reference(input_ids=source[None], decoder_input_ids=target[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    parts, steps = [], DecodedTokens()
    for part in target.split([1, 1, 7, 16]):
        parts.append(model.read(part, steps, memory))
    torch.testing.assert_close(torch.cat(parts), ours, atol=2e-4, rtol=0)
    made = reference.generate(source[None], max_new_tokens=32, do_sample=False, num_beams=1)[0]
    wanted = made[1:].tolist()
    assert list(answer(model, source.tolist(), 32)) == (
        wanted[: wanted.index(1)] if 1 in wanted else wanted
    )


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_are_those_of_transformers(both_ways):
    from transformers.models.t5.modeling_t5 import T5Attention

    behind = torch.arange(-200, 200)
    theirs = T5Attention._relative_position_bucket(-behind, both_ways, 32, 128)
    assert torch.equal(buckets_of(behind, 32, 128, both_ways), theirs)


def test_what_does_not_belong_together_is_refused(both):
    _, folder = both
    config = dict(SIZES, model_type="t5")
    with pytest.raises(UnsupportedModel, match="feed_forward_proj is 'gated-mish'"):
        t5_spec(config | {"feed_forward_proj": "gated-mish"})
    with pytest.raises(UnsupportedModel, match="sparsity"):
        t5_spec(config | {"sparsity": 3})
    written = (folder / "config.json").read_text()
    (folder / "config.json").write_text(written.replace('"d_ff": 48', '"d_ff": 64'))
    try:
        with pytest.raises(WeightsError, match="expected"):
            load_t5(folder)
    finally:
        (folder / "config.json").write_text(written)


def test_the_verb_answers_with_the_likeliest_tokens(both, capsys):
    """And refuses what only decoders do."""
    _, folder = both
    write_tokenizer(folder)
    asked = [str(folder), "--prompt", "ab c", "--max-tokens", "6", "--json"]
    assert generate.run(asked) == 0
    found = json.loads(capsys.readouterr().out)
    prompt = [5, 6, 4, 7]
    assert found["token_ids"] == list(answer(load_t5(folder), prompt, 6))
    assert found["prompt_tokens"] == len(prompt)
    with pytest.raises(UsageError, match="--chat is given"):
        generate.run([str(folder), "--prompt", "a", "--chat"])


def write_tokenizer(folder) -> None:
    """A letter each."""
    letters = {letter: at for at, letter in enumerate(["<pad>", "</s>", "<unk>", "-", " ", *"abc"])}
    letters |= {f"<{at}>": at for at in range(len(letters), 97)}
    made = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def test_an_answer_may_begin_with_token_0_where_padding_is_another():
    begins = {"decoder_start_token_id": 0, "pad_token_id": 3}
    assert t5_spec({"model_type": "t5", **begins}).start_id == 0
    assert t5_spec({"model_type": "t5", "pad_token_id": 3}).start_id == 3
