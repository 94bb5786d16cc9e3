"""Likelihoods and texts of real models: against transformers, whatever the batch, and from the command line."""

import json
import math

import pytest
import torch
from shared_data import model_folder, packaged_chat_model, shared, transformers_oracle

from cairn.cli.main import main
from cairn.core.errors import ConfigError
from cairn.eval.local_model import LocalModel
from cairn.eval.requests import GenerateUntil, LogLikelihood, Rolling
from cairn.models.checkpoint import open_checkpoint
from cairn.serve.engine.sampling_params import SamplingParams

PAIRS = [
    LogLikelihood("Once upon a time", ", there was a little girl"),
    LogLikelihood("Once upon a time", ", there was a big engine"),
    LogLikelihood("", "One day a dog ran to the park and saw a red ball there."),
    LogLikelihood("The sun was ", "warm"),
]


@pytest.fixture(scope="module")
def stories():
    with LocalModel(str(model_folder("stories15M")), device="cpu", max_length=128) as model:
        yield model


@pytest.fixture(scope="module")
def text():
    return shared("data", "corpora", "wikitext2_valid.txt").read_text()[:1200]


def perplexity_of_transformers(model, ids, window, stride):
    """The loop of transformers' own guide to perplexity, with its own loss."""
    total = count = before = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        labels = inputs.clone()
        labels[:, : -(end - before)] = -100
        valid = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += model(inputs, labels=labels).loss.item() * valid
        count, before = count + valid, end
        if end == len(ids):
            break
    return math.exp(total / count)


def perplexity(windows):
    return math.exp(-sum(one.logprob for one in windows) / sum(one.tokens for one in windows))


def test_the_perplexity_of_stories_is_that_of_transformers(stories, text):
    oracle = transformers_oracle().AutoModelForCausalLM.from_pretrained(
        model_folder("stories15M"), dtype=torch.float32
    )
    ids = stories.tokenizer.encode(text)
    for window, stride in ((128, 64), (100, 100)):
        found = perplexity(stories.rolling([Rolling(text, window, stride)])[0])
        expected = perplexity_of_transformers(oracle, ids, window, stride)
        assert found == pytest.approx(expected, rel=1e-5)
        assert abs(found - expected) < 1e-3 * max(1.0, expected / 100)
    # Rolling windows: each token once, by the oracle's own logits, and the prefix token in front of them, not twice.
    assert ids[0] == stories.prefix_token
    with torch.no_grad():
        logits = oracle(torch.tensor([ids[:128]])).logits[0]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:129]), reduction="sum")
    assert -stories.rolling([Rolling(text)])[0][0].logprob == pytest.approx(nats.item(), rel=1e-5)


def test_the_perplexity_of_the_packaged_chat_model_is_that_of_transformers(text):
    path = packaged_chat_model()
    transformers, checkpoint = transformers_oracle(), open_checkpoint(path)
    # Its weights as `gguf` dequantises them; transformers would need accelerate to do the same.
    weights = {name: checkpoint.tensors.tensor(name).float() for name in checkpoint.tensors.names()}
    with torch.device("meta"):
        oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    oracle = oracle.to_empty(device="cpu").eval()
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(oracle.config)
    missing = oracle.load_state_dict(weights, strict=False).missing_keys
    oracle.tie_weights()
    assert missing in ([], ["lm_head.weight"])
    model = LocalModel(str(path), device="cpu")
    ids = model.tokenizer.encode(text[:400])
    found = perplexity(model.rolling([Rolling(text[:400], 64, 32)])[0])
    assert found == pytest.approx(perplexity_of_transformers(oracle, ids, 64, 32), abs=1e-3)


def test_likelihoods_do_not_depend_on_the_batch_or_the_order(stories, text):
    alone = stories.loglikelihood(PAIRS)
    windows = stories.rolling([Rolling(text), Rolling(text[:300])])
    for batch_tokens in (24, 4096):
        with LocalModel(
            str(model_folder("stories15M")), device="cpu", max_length=128, batch_tokens=batch_tokens
        ) as packed:
            found = packed.loglikelihood(PAIRS[::-1])[::-1]
            assert [one.greedy for one in found] == [one.greedy for one in alone]
            assert [one.tokens for one in found] == [one.tokens for one in alone]
            for one, other in zip(found, alone, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            again = packed.rolling([Rolling(text), Rolling(text[:300])])
            assert perplexity(again[0]) == pytest.approx(perplexity(windows[0]), rel=1e-5)
    # One at a time, the same request has the same bits whatever stands beside it.
    assert stories.loglikelihood([PAIRS[2]])[0] == alone[2]
    assert alone[0].greedy
    assert not alone[1].greedy


def test_generation_stops_at_the_string_and_is_the_same_in_any_company(stories):
    requests = [GenerateUntil(p, ("Lily",), 24) for p in ("Once upon a time", "The dog", "One day")]
    together = stories.generate_until(requests)
    assert together[0] == ", there was a little girl named "
    assert [stories.generate_until([one])[0] for one in requests] == together


def test_prompts_are_cut_at_the_left_and_windows_checked(stories):
    long = GenerateUntil("A dog. " * 100 + "Once upon a time", (), 8)
    whole = stories.tokenizer.encode(long.context)
    assert len(whole) > 128
    engine = stories._engine.generate([whole[-120:]], SamplingParams(temperature=0.0, max_tokens=8))
    assert stories.generate_until([long]) == [engine[0].outputs[0].text]
    with pytest.raises(ConfigError, match="no room"):
        stories.generate_until([GenerateUntil("x", (), 128)])
    with pytest.raises(ConfigError, match="stride 300"):
        stories.rolling([Rolling("x", 0, 300)])


def test_the_verb_scores_files_of_every_kind(tmp_path, capsys):
    choice = {"question": "Once upon a time", "choices": ["there was", "xylophone"], "answer": 0}
    asked = {"question": "x", "answer": "y"}
    (tmp_path / "a.txt").write_text("Once upon a time there was a little girl named Lily. " * 4)
    (tmp_path / "b.jsonl").write_text(json.dumps(choice) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps(asked) + "\n")
    tasks = ",".join(str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.jsonl"))
    page = tmp_path / "page.html"
    common = ["eval", str(model_folder("stories15M")), "--device", "cpu", "--max-tokens", "4"]
    assert main([*common, "--tasks", tasks, "--json", "--html", str(page)]) == 0
    before = tmp_path / "before.json"
    before.write_text(capsys.readouterr().out)
    found = {task["task"]: task for task in json.loads(before.read_text())["tasks"]}
    assert 1 < found["a.txt"]["metrics"]["perplexity"]["value"] < 20
    assert found["b.jsonl"]["metrics"]["acc"]["value"] == 1.0
    assert found["c.jsonl"]["metrics"]["exact_match"]["value"] == 0.0
    assert "perplexity" in page.read_text()
    # Scores are not lost where they cannot be compared, and what cannot work is refused before they are computed.
    (tmp_path / "b.jsonl").write_text(2 * (json.dumps(choice) + "\n"))
    against = [*common, "--against", str(before), "--tasks"]
    assert main([*against, str(tmp_path / "b.jsonl"), "--html", str(page)]) == 2
    out, err = capsys.readouterr()
    assert "acc_norm" in out
    assert "2 documents, and 1 before" in err
    assert "a.txt" not in page.read_text()
    (tmp_path / "d.txt").write_text("Lily")
    assert main([*against, str(tmp_path / "d.txt")]) == 2
    assert "no scores of d.txt" in capsys.readouterr().err
    assert main([*common, "--tasks", tasks, "--html", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
    assert main(["eval"]) == 2
    assert "no task" in capsys.readouterr().err
