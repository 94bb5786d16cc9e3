"""`cairn replay`: a request of `cairn serve --capture DIR`, run again on the fast and on the plain path."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.report.progress import Activity

if TYPE_CHECKING:
    from cairn.verify.replay import Replayed


class Replay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run a captured request again, alone, and say at which token and in which layer the paths part.

    REQUEST is a file that `cairn serve --capture DIR` wrote. Exit status 1: the tokens are not those that were
    captured, or a layer computes something else than the plain path.
    """

    request: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[REQUEST]")] = ""
    """a captured file; or, with --folder, the id of a request, as its answer, x-request-id or the page has it"""
    folder: Path | None = None
    """the folder that the server was given with --capture"""
    model: str | None = None
    """the files of the model, if they are elsewhere than where the server had them"""
    device: str | None = None
    """cpu, cuda, cuda:N; by default as the server"""
    batch_invariant: bool | None = None
    """compute as the batch-invariant mode does; by default as the server"""
    json: bool = False
    """print what was found as JSON"""


def run(args: list[str]) -> int:
    options = load(Replay, args=args, env_prefix="CAIRN_REPLAY_").value
    if not options.request:
        raise UsageError("no request is named", hint="give a file of `cairn serve --capture DIR`")
    from cairn.serve.capture import not_replayed, read_captured

    file = Path(options.request)
    if not file.exists() and options.folder is not None:
        file = _of_id(options.folder, options.request)
    elif not file.exists() and not file.suffix:
        raise UsageError(
            f"there is no file {file}, and no folder is named to find a request of that id in",
            hint=f"give the folder of `cairn serve --capture`: cairn replay {options.request} --folder DIR",
        )
    captured = read_captured(file)
    changes = {
        "model": options.model,
        "device": options.device,
        "batch_invariant": options.batch_invariant,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    config = msgspec.structs.replace(captured.engine, **given)
    for said in not_replayed(captured):
        print(said, file=sys.stderr)
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    from cairn.verify.replay import replay

    activity = Activity(shown=not options.json)
    found = replay(captured, config, watch=activity)
    activity.clear()
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(f"request {captured.id}: {captured.engine.model} on {captured.device}")
        for number, one in enumerate(found):
            _show(number, one)
    return int(not all(one.same for one in found))


def _of_id(folder: Path, request: str) -> Path:
    """The file of a request by its id, which answers have behind a prefix of their kind: chatcmpl-6b07e984."""
    from cairn.serve.capture import file_of

    whole, bare = file_of(folder, request), file_of(folder, request.partition("-")[2] or request)
    return bare if bare.exists() and not whole.exists() else whole


def _show(number: int, one: "Replayed") -> None:
    print(f"answer {number}: {one.tokens} tokens, digest {one.digest}")
    if one.differs_at is None:
        print("  fast path: the same tokens")
    else:
        print(f"  fast path: differs at token {one.differs_at}, digest {one.fast_digest}")
    if one.plain_differs_at is None:
        print("  plain path: the same tokens")
    else:
        print(f"  plain path: differs at token {one.plain_differs_at}, digest {one.plain_digest}")
    largest = max(one.errors, default=0.0)
    if one.departure is None:
        print(f"  layers: rounding only, hidden states differ by {largest:.1e} at most")
    else:
        found = one.departure
        print(
            f"  layers: layer {found.layer} differs by more than rounding: "
            f"{found.error:.1e} behind it, {found.before:.1e} before it"
        )
