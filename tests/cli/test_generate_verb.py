"""`cairn generate`: text on stdout, words about it on stderr, and every mistake two lines."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers
import tokenizers
import torch
import transformers

from cairn.cli.main import main
from cairn.models.checkpoint import Checkpoint, open_checkpoint
from cairn.models.generate import GenerateSampling, Generation

PROMPT = "Once upon a time"
CONTEXT = 96
TEMPLATE = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny Llama with a byte-level tokenizer and no chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make(folder, tiny_tokenizers.byte_level(), eos_token="<|end|>", bos_token="<|begin|>")


def make(folder: Path, backend: tokenizers.Tokenizer, **tokens: str) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=0, pad_token_id=None,
        initializer_range=0.4,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return tiny_tokenizers.save(folder, backend, **tokens)


@pytest.fixture
def model(made, tmp_path) -> Path:
    """The same files under a folder of this test's own: each may be replaced."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def generate(*args: str | Path) -> int:
    """In this process, in float32: torch is imported once."""
    return main(["generate", *map(str, args), "--dtype", "float32", "--device", "cpu"])


def start(*args: str | Path, **options) -> subprocess.Popen:
    """The real command."""
    command = [sys.executable, "-m", "cairn", "generate", *map(str, args), "--dtype", "float32"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def expected(folder: Path, text: str, **sampling) -> tuple[list[int], str, str]:
    """What the library generates: tokens, text and finish."""
    checkpoint = open_checkpoint(folder)
    tokenizer = checkpoint.tokenizer()
    settings = GenerateSampling(**sampling)
    generation = Generation(checkpoint.load(), tokenizer.encode(text), settings, checkpoint.eos_ids)
    tokens = list(generation)
    return tokens, tokenizer.decode(tokens), generation.finish


# -- it works -----------------------------------------------------------------------------------


def test_the_command_writes_the_text_and_then_what_it_took(made):
    child = start(made, "--prompt", PROMPT, "--max-tokens", "20", stdout=subprocess.PIPE)
    output, errors = (stream.decode() for stream in child.communicate(timeout=60))
    tokens, text, finish = expected(made, PROMPT, max_tokens=20)
    assert child.returncode == 0
    assert output == text + "\n"
    loading, summary = errors.splitlines()
    assert loading.startswith(f"{made}: llama, ")
    assert "computed in float32 on cpu (as asked), loaded in " in loading
    assert f"tokens in, {len(tokens)} out ({finish}); first token after " in summary


def test_text_comes_piece_by_piece(made, monkeypatch):
    class Terminal(io.StringIO):
        shown: list[str]

        def flush(self) -> None:
            if self.getvalue() != "".join(self.shown):
                self.shown.append(self.getvalue().removeprefix("".join(self.shown)))

    terminal = Terminal()
    terminal.shown = []
    monkeypatch.setattr(sys, "stdout", terminal)
    assert generate(made, "--prompt", PROMPT, "--max-tokens", 20) == 0
    assert len(terminal.shown) > 10
    assert "".join(terminal.shown) == expected(made, PROMPT, max_tokens=20)[1] + "\n"


def test_json_is_one_document_with_every_field(made, capsys):
    assert generate(made, "--prompt", PROMPT, "--max-tokens", 12, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    tokens, text, finish = expected(made, PROMPT, max_tokens=12)
    assert result["model"] == str(made)
    assert (result["token_ids"], result["text"], result["finish_reason"]) == (tokens, text, finish)
    assert result["prompt_tokens"] == len(open_checkpoint(made).tokenizer().encode(PROMPT))
    assert result["completion_tokens"] == len(tokens)
    assert (result["device"], result["dtype"]) == ("cpu", "float32")
    assert set(result["seconds"]) == {"load", "prefill", "decode"}
    assert all(seconds > 0 for seconds in result["seconds"].values())
    wanted = {"decode_tokens_per_s", "limit_tokens_per_s", "share", "limit_note"}
    assert set(result["speed"]) == wanted
    assert result["speed"]["decode_tokens_per_s"] > 0
    assert set(result) == {
        "model", "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason",
        "device", "dtype", "seconds", "speed",
    }  # fmt: skip


def test_the_tokenizer_is_built_once(made, capsys, monkeypatch):
    """That of a GGUF file with 262,144 tokens takes seconds and hundreds of megabytes."""
    built, build = [], Checkpoint.tokenizer

    def counted(self: Checkpoint):
        built.append(self.path)
        return build(self)

    monkeypatch.setattr(Checkpoint, "tokenizer", counted)
    assert generate(made, "--prompt", "Once", "--max-tokens", "1") == 0
    assert built == [made]


def test_a_single_token_has_no_speed(made, capsys):
    assert generate(made, "--prompt", PROMPT, "--max-tokens", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["speed"]["decode_tokens_per_s"] is None


def test_the_prompt_may_come_from_stdin(made, capsys, monkeypatch):
    text = "Größe: 日本語 😀\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
    assert generate(made, "--prompt", "-", "--max-tokens", 9, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["token_ids"] == expected(made, text, max_tokens=9)[0]


def test_the_prompt_may_be_token_ids(made, capsys):
    ids = open_checkpoint(made).tokenizer().encode(PROMPT)
    assert generate(made, "--token-ids", *ids, "--max-tokens", 9, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["token_ids"] == expected(made, PROMPT, max_tokens=9)[0]


def test_a_word_behind_the_prompt_keeps_its_space(tmp_path, capsys):
    """A tokenizer that drops the space before the first word of a text must not drop this one."""
    backend = tiny_tokenizers.sentencepiece()
    folder = make(tmp_path / "model", backend, eos_token="</s>", bos_token="<s>")
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # it knows the space and nothing else
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.model.norm.weight.fill_(1)
        model.lm_head.weight[backend.token_to_id("▁")] = 1
    model.save_pretrained(folder)
    assert generate(folder, "--prompt", "Once", "--max-tokens", 3) == 0
    assert capsys.readouterr().out == "   \n"


def test_a_seed_gives_the_same_text_again(made, capsys):
    texts = []
    for seed in (3, 3, 4):
        sampling = ("--temperature", 1.2, "--top-k", 50, "--top-p", 0.95, "--seed", seed)
        assert generate(made, "--prompt", PROMPT, "--max-tokens", 24, *sampling) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    sampling = ("--temperature", 1.2, "--top-k", 50, "--top-p", 0.95, "--seed", 3)
    assert generate(made, "--prompt", PROMPT, "--max-tokens", 24, *sampling, "--plain") == 0
    same = dict(temperature=1.2, top_k=50, top_p=0.95, seed=3, max_tokens=24)
    assert capsys.readouterr().out == expected(made, PROMPT, **same)[1] + "\n"


def test_the_engine_and_the_plain_generator_give_the_same_greedy_text(made, capsys):
    results = []
    for more in ((), ("--plain",), ("--weights", "float")):
        assert generate(made, "--prompt", PROMPT, "--max-tokens", 30, "--json", *more) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert (
        len({(one["text"], tuple(one["token_ids"]), one["finish_reason"]) for one in results}) == 1
    )
    assert generate(made, "--prompt", PROMPT, "--max-tokens", 5, "--json", "--weights", "int8") == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 5


def test_a_template_of_ones_own(made, capsys, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    chat = ("--chat", "--chat-template", file, "--prompt", "Hello", "--max-tokens", 5, "--json")
    assert generate(made, *chat) == 0
    found = json.loads(capsys.readouterr().out)["token_ids"]
    tokenizer = open_checkpoint(made).tokenizer()
    ids = tokenizer.encode("[Hello]", special=False)
    assert generate(made, "--token-ids", *ids, "--max-tokens", 5, "--json") == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == found


def test_a_random_model_has_no_text(capsys):
    args = ("random:tiny-qwen3", "--token-ids", 1, 2, 3, "--max-tokens", 4)
    assert generate(*args, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] is None
    assert generate(*args) == 0
    assert capsys.readouterr().out == " ".join(map(str, result["token_ids"])) + " \n"


def test_a_chat_goes_through_the_template(model, capsys):
    (model / "chat_template.jinja").write_text(TEMPLATE)
    chat = ("--chat", "--system", "Be brief.", "--prompt", "Hello", "--max-tokens", 5, "--json")
    assert generate(model, *chat) == 0
    result = json.loads(capsys.readouterr().out)
    text = "<|begin|>system: Be brief.<|begin|>user: Hello"
    assert result["token_ids"] == expected(model, text, max_tokens=5)[0]


def test_settings_may_come_from_a_file_and_flags_win(made, capsys, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(f'prompt = "{PROMPT}"\nmax_tokens = 50\ntemperature = 1.0\nseed = 8\n')
    assert generate(made, "--config", config, "--max-tokens", 6, "--json", "--plain") == 0
    same = dict(temperature=1.0, seed=8, max_tokens=6)
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected(made, PROMPT, **same)[0]


def test_a_reader_that_has_enough_is_no_error(made):
    """As in `cairn generate ... | head -c 1`."""
    reading, writing = os.pipe()
    child = start(made, "--prompt", PROMPT, "--max-tokens", "90", stdout=writing)
    os.close(writing)
    assert os.read(reading, 1)
    os.close(reading)
    _, errors = child.communicate(timeout=60)
    assert b"Traceback" not in errors
    assert b"error:" not in errors
    assert child.returncode in (0, 141)  # 0 where everything was written before the reader had left


# -- it refuses ---------------------------------------------------------------------------------


def complaint(capsys, *args: str | Path) -> tuple[str, str]:
    """The two lines on stderr with which a bad command line ends, and nothing else."""
    status = main(["generate", *map(str, args)])
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    error_line, hint_line = captured.err.splitlines()
    assert error_line.startswith("error: ")
    assert hint_line.startswith("hint: ")
    return error_line.removeprefix("error: "), hint_line.removeprefix("hint: ")


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        ([], "no prompt", "give --prompt"),
        (["--prompt", "x", "--token-ids", "1"], "both --prompt and --token-ids are given", ""),
        (["--token-ids", "1", "--chat"], "--chat needs a text", "--prompt"),
        (["--prompt", "x", "--system", "y"], "--system is given without --chat", "add --chat"),
        (["--prompt", "x", "--chat"], "chat template", ""),
        (
            ["--prompt", "x", "--chat-template", "y"],
            "--chat-template is given without --chat",
            "add",
        ),
        (["--prompt", "x", "--chat", "--chat-template", "/absent"], "/absent cannot be read", ""),
        (
            ["--prompt", "x", "--plain", "--weights", "int4"],
            "--weights int4 is given, and --plain",
            "",
        ),
        (["--prompt", "x", "--temprature", "1"], "unknown flag '--temprature'", "--temperature"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1", "0 or more"),
        (["--prompt", "x", "--temperature", "nan"], "expected a number, got 'nan'", "temperature"),
        (["--prompt", "x", "--temperature", "x"], "expected a number, got 'x'", "temperature"),
        (["--prompt", "x", "--top-p", "2"], "top_p is 2", "at most 1"),
        (["--prompt", "x", "--top-k", "-1"], "top_k is -1", "0 (all)"),
        (["--prompt", "x", "--seed", "-1"], "seed is -1", "between 0"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens is 0", "at least 1"),
        (["--prompt", "x", "--dtype", "int8"], "'float16', got 'int8'", "dtype"),
        (["--prompt", "x", "--max-tokens", "96"], "max_tokens 96 exceed the context of 96", "95"),
        (["--prompt", "a b " * 60], "tokens, the context of the model is 96", "shorten"),
        (["--prompt", ""], "the prompt is empty", "at least one token"),
        (["--prompt", "\udcff"], "surrogate", "UTF-8"),
        (["--token-ids", "1", "5000"], "token 5000 is outside the vocabulary of", "tokenizer"),
        (["--token-ids", "1", "x"], "each an integer, got ['1', 'x']", "token_ids"),
        (["--prompt", "x", "--device", "cuda"], "no CUDA device is available", "--device cpu"),
        (["--prompt", "x", "--device", "cuda:3"], "no CUDA device is available", "--device cpu"),
        (["--prompt", "x", "--device", "tpu"], "'tpu' is not a device", "use cpu"),
        (["--prompt", "x", "--device", "meta"], "'meta' is not a device", "use cpu"),
        (["--prompt", "x", "--device", "mps"], "'mps' is not a device", "use cpu"),
        (["--prompt", "x", "--device", ""], "'' is not a device", "use cpu"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_in_the_command_line_is_two_lines(made, capsys, monkeypatch, args, message, hint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said, advice = complaint(capsys, made, *args)
    assert message in said
    assert hint in advice


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/absent/model", "no file or folder '/absent/model'"),
        ("absent-owner/absent-name", "absent-owner/absent-name is not in the cache"),
        ("random:lama", "no model shape is called 'lama'"),
        ("random:tiny-llama", "random:tiny-llama has no tokenizer"),
        ("", "no file or folder ''"),
    ],
)
def test_a_model_that_is_not_there_is_two_lines(capsys, name, message):
    assert message in complaint(capsys, name, "--prompt", "x")[0]


def test_a_gpu_beyond_the_last_is_two_lines(made, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said, _ = complaint(capsys, made, "--prompt", "x", "--device", "cuda:2")
    assert said == "there is no cuda:2: this machine has 2 CUDA devices"


def test_a_command_line_without_anything_is_two_lines(capsys):
    """A model is not missing, since there is a default; and nothing is loaded for no prompt."""
    assert complaint(capsys)[0] == "no prompt"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE = {
    "truncated weights": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        "model.safetensors (5000 bytes) cannot be read as safetensors",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "no model.safetensors in",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
    "another architecture": (
        lambda folder: edit(folder / "config.json", model_type="mamba"),
        "unknown architecture: model_type 'mamba'",
    ),
    "unknown field": (
        lambda folder: edit(folder / "config.json", residual_multiplier=0.2),
        "field 'residual_multiplier' (value 0.2) is not supported",
    ),
    "another shape": (
        lambda folder: edit(folder / "config.json", intermediate_size=40),
        "mlp.gate_proj.weight has shape [48, 32], expected [40, 32]",
    ),
    "too many layers": (
        lambda folder: edit(folder / "config.json", num_hidden_layers=3),
        "9 of 30 tensors are missing",
    ),
    "too few layers": (
        lambda folder: edit(folder / "config.json", num_hidden_layers=1),
        "9 tensors have no place in a llama model of 1 layers",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": 3}'),
        "tokenizer.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_two_lines(model, capsys, damage):
    change, message = DAMAGE[damage]
    change(model)
    assert message in complaint(capsys, model, "--prompt", PROMPT, "--dtype", "float32")[0]


def test_a_tokenizer_with_more_tokens_than_the_model_is_two_lines(model, capsys):
    edit(model / "config.json", vocab_size=80)
    said, hint = complaint(capsys, model, "--prompt", PROMPT)
    assert "is outside the vocabulary of 80" in said
    assert hint == "the tokenizer does not belong to this model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("temperature = ", "run.toml"),
        ("temperatur = 1.0", "temperatur"),
        ('temperature = "hot"', "temperature"),
        ("top_p = 3.0", "top_p is 3.0"),
        (None, "run.toml"),
    ],
    ids=str,
)
def test_a_bad_file_of_settings_is_two_lines(made, capsys, tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.toml").write_text(content)
    args = (made, "--prompt", "x", "--config", tmp_path / "run.toml")
    assert message in complaint(capsys, *args)[0]


def test_stdin_that_is_no_text_is_two_lines(made, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait"), "utf-8"))
    said, hint = complaint(capsys, made, "--prompt", "-")
    assert "stdin" in said
    assert "UTF-8" in hint


def test_the_real_command_ends_with_two_lines_and_status_2(model):
    os.truncate(model / "model.safetensors", 5000)
    child = start(model, "--prompt", PROMPT, stdout=subprocess.PIPE)
    output, errors = (stream.decode() for stream in child.communicate(timeout=60))
    assert (child.returncode, output) == (2, "")
    error_line, hint_line = errors.splitlines()
    assert error_line.startswith(
        f"error: {model / 'model.safetensors'} (5000 bytes) cannot be read"
    )
    assert hint_line.startswith("hint: the file may be truncated")


@pytest.mark.parametrize(
    ("args", "status"),
    [(["--help"], 0), (["m"], 2), (["m", "--prompt", "x", "--seeed", "1"], 2)],
    ids=["help", "no prompt", "unknown flag"],
)
def test_help_and_wrong_flags_do_not_wait_for_torch(args, status):
    script = (
        "import sys\n"
        "from cairn.cli.main import main\n"
        "status = main(['generate', *sys.argv[1:]])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status
    assert "torch was imported" not in done.stderr
