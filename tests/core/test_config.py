"""Four layers add up to one configuration, and a mistake is one line that says where it is."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.config import Loaded, SettingOrigin, explain, load, to_toml
from cairn.core.errors import CairnError, ConfigError, UsageError

PREFIX = "CAIRN_TRAIN_"


class Optim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: float = 1e-3
    kind: Literal["adamw", "sgd"] = "adamw"
    nesterov: bool = False


class Train(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Train a model."""

    model: tyro.conf.Positional[str] = "tiny"
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    max_tokens: int | None = None
    stop: list[str] = []
    out: Path | None = None
    shape: tuple[int, int] = (1, 2)
    workers: Literal["auto"] | int = "auto"
    json: bool = False
    config: Path | None = None
    optim: Optim = Optim(lr=3e-4)


def load_train(*args: str, env: dict[str, str] | None = None, file: Path | None = None):
    return load(
        Train, args=list(args), env_prefix=PREFIX, env=env or {}, file=file, file_field="config"
    )


def failure(*args: str, env=None, file=None) -> CairnError:
    with pytest.raises(CairnError) as caught:
        load_train(*args, env=env, file=file)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_without_any_layer_the_defaults_hold():
    loaded = load_train()
    assert loaded.value == Train()
    assert loaded.value.optim.lr == 3e-4, "the default of the parent, not of the class"
    assert {str(origin) for origin in loaded.origins.values()} == {"default"}


def test_every_kind_of_value_works_in_every_layer(toml):
    wanted = Train(
        model="big",
        top_p=0.5,
        max_tokens=7,
        stop=["a", "b c"],
        out=Path("x/y"),
        shape=(3, 4),
        workers=2,
        json=True,
        optim=Optim(lr=0.25, kind="sgd", nesterov=True),
    )
    by_file = load_train(
        file=toml(
            'model = "big"\ntop_p = 0.5\nmax_tokens = 7\nstop = ["a", "b c"]\nout = "x/y"\n'
            "shape = [3, 4]\nworkers = 2\njson = true\n"
            '[optim]\nlr = 0.25\nkind = "sgd"\nnesterov = true\n'
        )
    )
    by_environment = load_train(
        env={
            "CAIRN_TRAIN_MODEL": "big",
            "CAIRN_TRAIN_TOP_P": "0.5",
            "CAIRN_TRAIN_MAX_TOKENS": "7",
            "CAIRN_TRAIN_STOP": "a,b c",
            "CAIRN_TRAIN_OUT": "x/y",
            "CAIRN_TRAIN_SHAPE": "3,4",
            "CAIRN_TRAIN_WORKERS": "2",
            "CAIRN_TRAIN_JSON": "true",
            "CAIRN_TRAIN_OPTIM__LR": "0.25",
            "CAIRN_TRAIN_OPTIM__KIND": "sgd",
            "CAIRN_TRAIN_OPTIM__NESTEROV": "1",
            "CAIRN_SERVE_PORT": "other commands' variables are not ours",
        }
    )
    by_flags = load_train(
        *("big", "--top-p", "0.5", "--max-tokens=7", "--stop", "a", "b c", "--out", "x/y"),
        *("--shape", "3", "4", "--workers", "2", "--json"),
        *("--optim.lr", "0.25", "--optim.kind", "sgd", "--optim.nesterov"),
    )
    assert by_file.value == by_environment.value == by_flags.value == wanted


def test_each_value_knows_where_it_was_written(toml):
    path = toml("top_p = 0.5\n\n[optim]\n# a comment\nlr = 1\n")
    loaded = load_train(
        "big", "--config", str(path), "--no-json", env={"CAIRN_TRAIN_OPTIM__KIND": "sgd"}
    )
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    assert origins["top_p"] == f"file {path} line 1"
    assert origins["optim.lr"] == f"file {path} line 5"
    assert origins["optim.kind"] == "environment CAIRN_TRAIN_OPTIM__KIND"
    assert origins["json"] == "flag --no-json"
    assert origins["model"] == "argument MODEL"
    assert origins["stop"] == "default"
    assert loaded.origins["json"] == SettingOrigin("flag", "--no-json")


LAYERS = ("file", "environment", "flag")


@given(st.fixed_dictionaries({key: st.sets(st.sampled_from(LAYERS)) for key in ("steps", "seed")}))
def test_the_highest_layer_that_speaks_wins(tmp_path_factory, given_in):
    class Run(msgspec.Struct, frozen=True):
        steps: int = 3  # the flag below repeats the default, and still wins
        seed: int = 3

    level = {"file": 1, "environment": 2, "flag": 3}
    path = tmp_path_factory.mktemp("layers") / "run.toml"
    path.write_text("".join(f"{key} = 1\n" for key in given_in if "file" in given_in[key]))
    loaded = load(
        Run,
        args=[word for key in given_in if "flag" in given_in[key] for word in (f"--{key}", "3")],
        env={f"X_{key.upper()}": "2" for key in given_in if "environment" in given_in[key]},
        env_prefix="X_",
        file=path,
    )
    for key, layers in given_in.items():
        winner = max(layers, key=lambda layer: level[layer], default="default")
        assert loaded.origins[key].layer == winner
        assert getattr(loaded.value, key) == level.get(winner, 3)


def test_none_can_be_said_on_the_command_line_and_in_the_environment(toml):
    path = toml("max_tokens = 5\n")
    assert load_train(file=path).value.max_tokens == 5
    assert load_train("--max-tokens", "none", file=path).value.max_tokens is None
    assert load_train(env={"CAIRN_TRAIN_MAX_TOKENS": "None"}, file=path).value.max_tokens is None


def test_none_is_text_where_any_text_may_stand():
    class Ask(msgspec.Struct, frozen=True):
        prompt: str | None = None

    for word in ("none", "None", "null", ""):
        assert load(Ask, args=["--prompt", word], env_prefix="X_", env={}).value.prompt == word
        assert load(Ask, args=[], env_prefix="X_", env={"X_PROMPT": word}).value.prompt == word


@pytest.mark.parametrize(
    ("text", "items"),
    [("a", ["a"]), ("a,b", ["a", "b"]), ("", []), ('["a,b", "c"]', ["a,b", "c"]), ("[x", ["[x"])],
)
def test_a_list_in_the_environment(text, items):
    assert load_train(env={"CAIRN_TRAIN_STOP": text}).value.stop == items


def test_the_file_can_be_named_by_a_flag_or_a_variable_but_the_caller_comes_first(toml, tmp_path):
    path = toml("top_p = 0.5\n")
    assert load_train("--config", str(path)).value.top_p == 0.5
    assert load_train(env={"CAIRN_TRAIN_CONFIG": str(path)}).value.top_p == 0.5
    assert load_train("--config", str(tmp_path / "absent"), file=path).value.top_p == 0.5


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("topp = 0.5", "unknown key 'topp' = 0.5 (file {} line 1)", "did you mean 'top_p'?"),
        (
            "\n[optim]\nrate = 1",
            "unknown key 'optim.rate' = 1 (file {} line 3)",
            "mean 'optim.lr'?",
        ),
        ("zebra = 1", "unknown key 'zebra' = 1 (file {} line 1)", "known keys: model, top_p, "),
        ("lr = 1", "unknown key 'lr' = 1 (file {} line 1)", "did you mean 'optim.lr'?"),
        ("[optimizer]\nlr = 1", "unknown table [optimizer] (file {} line 1)", "mean 'optim'?"),
        ("optim = 3", "optim: expected a table, got 3 (file {} line 1)", "write [optim]"),
        ("json = 1", "json: expected true or false, got 1 (file {} line 1)", "--help` says"),
        ('top_p = "0.5"', "expected a number >= 0 and <= 1, got '0.5' (file {} line 1)", "quotes"),
        ("top_p = 1.5", "top_p: expected a number >= 0 and <= 1, got 1.5 (file {} li", "--help"),
        ("top_p = nan", "top_p: expected a number >= 0 and <= 1, got nan (file {} li", "--help"),
        ('stop = "a"', "stop: expected a list, each text, got 'a' (file {} line 1)", "brackets"),
        ("out = 3", "out: expected a path or none, got 3 (file {} line 1)", "--help"),
        ("shape = [1]", "shape: expected 2 values: an integer, an integer, got [1]", "--help"),
        ("optim.kind = 'adam'", "expected 'adamw' or 'sgd', got 'adam'", "did you mean 'adamw'?"),
        ("workers = 'all'", "workers: expected 'auto' or an integer, got 'all'", "--help"),
        ("top_p = ", "{} line 1, column 9: invalid value", "quotes"),
        ("json = true\njson = true", "{} line 2, column 12: cannot overwrite a value", "already"),
        ("stop = [", "{} line 1, column 9: ", "quotes"),
    ],
)
def test_a_mistake_in_the_file(toml, text, message, hint):
    path = toml(text)
    error = failure(file=path)
    assert isinstance(error, ConfigError)
    assert message.format(path) in error.message
    assert hint in error.hint


@contextmanager
def without_privileges():
    """Root reads every file; for the length of the block this process is nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "recipe.toml").touch(mode=0o000)
    (tmp_path / "binary.toml").write_bytes(b"a = \xff\n")
    missing = failure(file=tmp_path / "recipes.toml")
    assert missing.message == f"no such file: {tmp_path}/recipes.toml"
    assert missing.hint == "did you mean 'recipe.toml'?"
    assert "is a folder, not a TOML file" in failure(file=tmp_path).message
    assert "not UTF-8 text (byte 4)" in failure(file=tmp_path / "binary.toml").message
    assert "not a directory" in failure(file=tmp_path / "binary.toml" / "x").message
    with without_privileges():
        assert "permission denied" in failure(file=tmp_path / "recipe.toml").message


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        ("TOPP", "1", "unknown environment variable CAIRN_TRAIN_TOPP='1'", "'CAIRN_TRAIN_TOP_P'?"),
        ("OPTIM_LR", "1", "CAIRN_TRAIN_OPTIM_LR='1'", "did you mean 'CAIRN_TRAIN_OPTIM__LR'?"),
        ("ZZZ", "1", "unknown environment variable", "remove it: unset CAIRN_TRAIN_ZZZ"),
        ("TOP_P", "abc", "got 'abc' (environment CAIRN_TRAIN_TOP_P)", "--help"),
        ("TOP_P", "", "got '' (environment CAIRN_TRAIN_TOP_P)", "--help"),
        ("JSON", "yes", "json: expected true or false, got 'yes'", "--help"),
        ("SHAPE", "1,2,3", "shape: expected 2 values: an integer, an integer, got ['1',", "--help"),
    ],
)
def test_a_mistake_in_the_environment(name, value, message, hint):
    error = failure(env={PREFIX + name: value})
    assert isinstance(error, ConfigError)
    assert message in error.message
    assert hint in error.hint


def test_a_mistake_is_found_even_where_a_flag_would_hide_it(toml):
    assert "line 1" in failure("--top-p", "0.1", file=toml("top_p = 2")).message


def test_a_long_value_is_not_printed_in_full():
    error = failure(env={"CAIRN_TRAIN_TOP_P": "x" * 5000})
    assert len(error.message) < 200
    assert "5002 characters" in error.message


def test_a_required_value_that_no_layer_gives():
    class Serve(msgspec.Struct, frozen=True):
        model: tyro.conf.Positional[str]
        port: int

    with pytest.raises(UsageError) as caught:
        load(Serve, args=["--port", "1"], env_prefix="CAIRN_SERVE_", env={})
    assert caught.value.message == "MODEL is missing"
    assert caught.value.hint == "write `cairn serve MODEL ...`, or set CAIRN_SERVE_MODEL"
    with pytest.raises(UsageError, match="--port is missing"):
        load(Serve, args=["m"], env_prefix="CAIRN_SERVE_", env={})
    assert load(
        Serve, args=["m"], env_prefix="CAIRN_SERVE_", env={"CAIRN_SERVE_PORT": "80"}
    ).value == Serve("m", 80)


def test_what_the_struct_itself_refuses_goes_through():
    class Split(msgspec.Struct, frozen=True):
        parts: int = 2

        def __post_init__(self) -> None:
            if self.parts < 1:
                raise ConfigError(f"cannot split into {self.parts} parts", hint="use 1 or more")

    with pytest.raises(ConfigError, match="cannot split into 0 parts"):
        load(Split, args=["--parts", "0"], env_prefix="X_", env={})


@pytest.mark.parametrize("type_", [dict[str, int], list[list[int]], Optim | None, bytes])
def test_a_schema_that_has_no_form_on_the_command_line_is_a_bug(type_):
    schema = msgspec.defstruct("Schema", [("field", type_)])
    with pytest.raises(TypeError, match=r"field: .* has no form on the command line"):
        load(schema, args=[], env_prefix="X_", env={})


def test_explain_shows_each_value_beside_its_origin():
    text = explain(load_train("--top-p", "0.9", "--stop", "x"))
    lines = text.splitlines()
    assert 'model = "tiny"           default' in lines
    assert "top_p = 0.9              flag --top-p" in lines
    assert "max_tokens = none        default" in lines
    assert 'stop = ["x"]             flag --stop' in lines
    assert len(lines) == 12


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    st.builds(
        Train,
        model=TEXT,
        top_p=st.floats(0, 1),
        max_tokens=st.none() | st.integers(-(2**70), 2**70),
        stop=st.lists(TEXT, max_size=3),
        out=st.none() | TEXT.map(Path),
        workers=st.just("auto") | st.integers(),
        json=st.booleans(),
        optim=st.builds(
            Optim, lr=st.floats(allow_nan=False), kind=st.sampled_from(["adamw", "sgd"])
        ),
    )
)
def test_a_configuration_survives_the_way_through_a_file(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_bytes(to_toml(config).encode())
    loaded = load_train(file=path)
    assert loaded.value == config
    assert loaded.origins["optim.lr"].layer == "file"


def test_none_over_another_default_has_no_form_in_a_file():
    class Limit(msgspec.Struct, frozen=True):
        steps: int | None = 10

    assert to_toml(Limit(3)) == "steps = 3\n"
    with pytest.raises(ConfigError, match="steps is none"):
        to_toml(Limit(None))


def test_help_is_printed_without_torch_and_leaves_with_zero(tmp_path):
    script = tmp_path / "helpful.py"
    script.write_text(
        "import sys, msgspec, tyro\n"
        "from cairn.core.config import load\n"
        "class Run(msgspec.Struct):\n"
        "    '''Run it.'''\n"
        "    model: tyro.conf.Positional[str]\n"
        "    top_p: float = 0.25  # the nucleus\n"
        "try:\n"
        "    load(Run, args=['--bad', '--help'], env_prefix='CAIRN_RUN_')\n"
        "finally:\n"
        "    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == "False\n"
    for expected in ("usage: cairn run", "Run it.", "--top-p FLOAT", "the nucleus (default: 0.25)"):
        assert expected in done.stdout


def test_loaded_is_typed_by_its_schema():
    loaded: Loaded[Train] = load_train()
    assert isinstance(loaded.value, Train)


def test_explain_prints_every_origin_and_stops(capsys, tmp_path):
    class Small(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        top_p: float = 1.0
        seed: int = 0
        json: bool = False

    file = tmp_path / "run.toml"
    file.write_text("seed = 3\n")
    with pytest.raises(SystemExit) as left:
        load(Small, args=["--top-p", "0.5", "--explain"], file=file, env={}, env_prefix="X_")
    assert left.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["top_p", "=", "0.5", "flag", "--top-p"],
        ["seed", "=", "3", "file", str(file), "line", "1"],
        ["json", "=", "false", "default"],
    ]
