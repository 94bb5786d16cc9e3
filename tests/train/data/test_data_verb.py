"""`cairn data` as a person types it."""

import json

import pytest

from cairn.cli.main import main


def run(capsys, *args: str) -> tuple[int, str, str]:
    status = main(["data", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("verb") / "tok")
    assert main(["data", "tokenizer", "stories", "chats", "--vocab", "400", "--out", folder]) == 0
    return folder


def test_from_made_up_text_to_a_store_and_back(tmp_path, capsys, tokenizer):
    made, store = str(tmp_path / "made.jsonl"), str(tmp_path / "store")
    assert run(capsys, "make", "stories", "--documents", "20", "--out", made)[0] == 0
    status, out, _ = run(
        capsys, "tokenize", made, "--tokenizer", tokenizer, "--out", store, "--workers", "1", "--json"
    )  # fmt: skip
    assert status == 0
    assert json.loads(out)["documents"] == 20
    status, out, _ = run(capsys, "info", store, "--verify", "--json")
    facts = json.loads(out)
    assert (facts["documents"], facts["dtype"], facts["verified"]) == (20, "uint16", True)
    with open(made) as file:
        texts = [json.loads(line)["text"] for line in file]
    assert run(capsys, "show", store, "7")[1] == texts[7] + "<|endoftext|>\n"
    shown = json.loads(run(capsys, "show", store, "7", "--json")[1])
    assert shown["text"] == texts[7] + "<|endoftext|>"
    assert "documents   20" in run(capsys, "info", store)[1]


def test_chats_show_what_is_learnt(tmp_path, capsys, tokenizer):
    made, store = str(tmp_path / "made.jsonl"), str(tmp_path / "store")
    run(capsys, "make", "chats", "--documents", "5", "--out", made)
    flags = ["--tokenizer", tokenizer, "--out", store, "--workers", "1"]
    status, out, _ = run(capsys, "tokenize", "--chat", made, *flags)
    assert status == 0
    assert "learnt" in out
    shown = json.loads(run(capsys, "show", store, "0", "--json")[1])
    assert sum(shown["learn"]) > 0
    assert "<|im_start|>assistant" in run(capsys, "show", store, "0")[1]
    without = run(capsys, "tokenize", made, *flags, "--replace")[2]
    assert "chats are tokenized with --chat" in without
    recipe = tmp_path / "recipe.toml"  # as a run has it in its folder
    recipe.write_text(f'[data]\nsources = ["{store}"]\nsequence = 256\n')
    sample = json.loads(run(capsys, "sample", str(tmp_path), "3", "--json")[1])
    assert sum(sample["lengths"]) == 256
    answers = [i for i, learnt in zip(sample["ids"], sample["learn"], strict=True) if learnt]
    assert 0 < len(answers) < 256
    assert "<|im_start|>assistant" in run(capsys, "sample", str(recipe), "3")[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tokenize", "no.txt", "--tokenizer", "T", "--out", "x"], "there is no file no.txt"),
        (["info", "nowhere"], "there is no data at nowhere"),
        (["tokenizer", "stories", "--vocab", "10", "--out", "x"], "vocabulary of 10 tokens"),
        (["tokenise"], "did you mean 'tokenize'?"),
        (["sample", "."], ". has no recipe.toml"),
        (["sample", "runs/no"], "there is no run runs/no"),
        (["make", "poems", "--out", "x"], "poems"),
        (["make", "stories", "--out", "no/such/folder/x"], "cannot write no/such/folder/x"),
        (["make", "stories", "--out", "file/x"], "cannot write file/x"),
        (["tokenizer", "stories", "--out", "file/x"], "file/x cannot be written"),
    ],
)
def test_mistakes_are_answered_with_a_way_out(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    status, out, err = run(capsys, *args)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert not out


def test_chats_that_are_one_list(tmp_path, capsys, tokenizer):
    """As ShareGPT is published: one JSON list, over many lines."""
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    path, store = tmp_path / "all.json", str(tmp_path / "store")
    path.write_text(json.dumps([{"conversations": turns}] * 3, indent=1))
    flags = ["--chat", "--tokenizer", tokenizer, "--out", store, "--workers", "1"]
    status, out, _ = run(capsys, "tokenize", str(path), *flags, "--json")
    assert status == 0
    assert json.loads(out)["documents"] == 3
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": 7}]))
    status, _, err = run(capsys, "tokenize", str(path), *flags, "--replace")
    assert status == 2
    assert "all.json line 2: conversations is int" in err
    path.write_text('[{"conversations": []}')
    assert (
        "begins as a list and is none" in run(capsys, "tokenize", str(path), *flags, "--replace")[2]
    )


def test_calls_that_a_template_cannot_write_are_not_lost(tmp_path, capsys, tokenizer):
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "No."},
    ]
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    flags = ["--chat", "--tokenizer", tokenizer, "--out", str(tmp_path / "store")]
    status, _, err = run(capsys, "tokenize", str(path), *flags)
    assert status == 2
    assert "message 1 calls tools, and the chat template leaves the calls out" in err


def test_bad_input_stops_before_the_store_exists(tmp_path, capsys, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": \n')
    store = tmp_path / "store"
    flags = ["--tokenizer", tokenizer, "--out", str(store), "--workers", "1"]
    status, _, err = run(capsys, "tokenize", str(tmp_path / "a.jsonl"), *flags)
    assert status == 2
    assert "a.jsonl line 2 is not JSON" in err
    assert not store.exists()
    status, _, err = run(capsys, "show", tokenizer)
    assert status == 2
    assert "no format that can be trained on" in err
