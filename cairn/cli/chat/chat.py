"""`cairn chat`: talk to a model in the terminal, one that runs here or one behind any OpenAI-compatible server.

`echo question | cairn chat` answers once: the answer to stdout, how fast it came to stderr.
"""

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.main import EXIT_INTERRUPTED
from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.models.hub import AUTO, BETTER, TINY, check_name, default_model

if TYPE_CHECKING:
    from cairn.cli.chat.chat_client import Talker
    from cairn.cli.chat.chat_loop import Chat
    from cairn.cli.chat.chat_state import Sampling

KEYS = ("CAIRN_API_KEY", "OPENAI_API_KEY")
# How a model that runs here is sampled unless a flag says otherwise. The small ones are right only while they take the
# likeliest token: asked for the capital of France, SmolLM2-135M says Paris in 48% of the answers at 0.6, always at 0.
CALM = {"temperature": 0.6, "top_p": 0.95}
CALMEST = {"temperature": 0.0}
LOCAL_ONLY = ("device", "dtype", "max_model_len", "weights", "chat_template")


class ChatOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Talk to a model in the terminal. /help lists what can be done there.

    MODEL is a folder, a .gguf file, owner/name on the hub or the name of a packaged model; it runs in this process.
    Without it, smollm2-135m-instruct where its package is installed, else cairn-tiny, which comes with Cairn. With
    --url it is the name of a model of that server, by default its first. The key of a server is read from
    CAIRN_API_KEY, else from OPENAI_API_KEY. When stdin is no terminal, it is one question.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """a path or a name, see above"""
    url: str | None = None
    """talk to this server, such as http://127.0.0.1:8000"""
    prompt: str | None = None
    """answer this one question, and leave"""
    system: str | None = None
    """the system prompt"""
    temperature: float | None = None
    """0 always takes the most likely token; by default 0.6 (0 for the small models), or as the server has it"""
    top_p: float | None = None
    """keep the most likely tokens whose probabilities add up to this; by default 0.95, or as the server has it"""
    top_k: int | None = None
    """keep this many of the most likely tokens"""
    max_tokens: int | None = None
    """longest answer"""
    seed: int | None = None
    """the same seed gives the same answer"""
    device: str = "auto"
    """of a model that runs here: cpu, cuda, cuda:N"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of a model that runs here: type to compute in"""
    weights: Literal["auto", "float", "int8", "int4", "packed"] = "auto"
    """of a model that runs here on a CPU: how weights are multiplied with"""
    chat_template: Path | None = None
    """of a model that runs here: a file with the template to use instead of its own"""
    max_model_len: int | None = None
    """of a model that runs here: longest chat, in tokens"""
    timeout: float = 600.0
    """seconds without an answer of the server, after which a request fails"""
    api_key_env: str | None = None
    """name of another environment variable that holds the key"""
    json: bool = False
    """print the answer to one question as a JSON document"""


def run(args: list[str]) -> int:
    options = load(ChatOptions, args=args, env_prefix="CAIRN_CHAT_").value
    from cairn.cli.chat.chat_loop import Chat
    from cairn.cli.chat.chat_state import Conversation, readable
    from cairn.cli.chat.chat_terminal import Terminal

    _check(options)
    if options.url is None and options.model in (None, AUTO):
        default = default_model()
        options = msgspec.structs.replace(options, model=default.name)
        print(default.why, file=sys.stderr)
    sampling = _sampling(options)
    question = _question(options)
    talker = _talker(options)
    try:
        nowhere = io.StringIO() if options.json else None
        terminal = Terminal(out=nowhere, once=question is not None)
        system = readable(options.system) if options.system else None
        chat = Chat(talker, terminal, Conversation(system=system), sampling)
        if question is None:
            for note in talker.notes:
                chat.terminal.note(note)
            return chat.run()
        return _answer_once(chat, question, options.json)
    finally:
        talker.close()


def _answer_once(chat: "Chat", question: str, as_json: bool) -> int:
    """A question is taken as it is, also when it begins with a slash."""
    answered = chat.ask(question)
    if as_json:
        print(msgspec.json.encode(answered).decode())
    return EXIT_INTERRUPTED if answered.finish_reason == "stopped" else 0


def _sampling(options: ChatOptions) -> "Sampling":
    from cairn.cli.chat.chat_state import KNOBS, Sampling

    given = {name: getattr(options, name) for name in KNOBS if hasattr(options, name)}
    if options.url is None:  # a server has its own defaults
        defaults = CALMEST if options.model in (TINY, BETTER) else CALM
        given |= {name: value for name, value in defaults.items() if given[name] is None}
    return Sampling(**given)


def _check(options: ChatOptions) -> None:
    if not 0 < options.timeout < float("inf"):
        raise UsageError(f"--timeout is {options.timeout}", hint="seconds, above 0")
    if options.url is not None:
        given = [name for name in LOCAL_ONLY if getattr(options, name) not in ("auto", None)]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UsageError(f"{flags} beside --url", hint="the server decides that")
    if options.json and options.prompt is None and sys.stdin.isatty():
        raise UsageError(
            "--json without a question", hint="it answers one: --prompt TEXT, or through a pipe"
        )


def _question(options: ChatOptions) -> str | None:
    """A single question to answer; None for an interactive chat."""
    from cairn.cli.chat.chat_state import readable

    if options.prompt is not None:
        text = readable(options.prompt)
    elif sys.stdin.isatty():
        return None
    else:
        text = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not text.strip():
        where = "--prompt is" if options.prompt is not None else "stdin is"
        raise UsageError(f"{where} empty", hint='echo "What is a cairn?" | cairn chat')
    return text


def _talker(options: ChatOptions) -> "Talker":
    if options.url is not None:
        from cairn.cli.chat.chat_client import ServerTalker
        from cairn.cli.chat.chat_state import readable

        model = readable(options.model or "")
        return ServerTalker(options.url, model, _key(options), options.timeout)
    from cairn.cli.chat.chat_local import LocalTalker

    model = TINY if options.model is None else options.model
    check_name(model)
    return LocalTalker(
        model,
        options.chat_template,
        weights=options.weights,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=1,
    )


def _key(options: ChatOptions) -> str | None:
    if options.api_key_env is not None and not os.environ.get(options.api_key_env):
        raise UsageError(
            f"the environment variable {options.api_key_env} is not set", hint="export it first"
        )
    names = KEYS if options.api_key_env is None else (options.api_key_env,)
    return next((found for name in names if (found := os.environ.get(name, "").strip())), None)
