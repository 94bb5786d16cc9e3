"""The chat itself: read, answer, print, until the person leaves.

    read --parse--> Say     -> ask: stream the answer, keep it, say how fast it came
                    Command -> do it
    Ctrl-C in an answer stops it and keeps what came; at the prompt it forgets the line. Ctrl-D leaves.

An error is printed, and the chat goes on; the question stays for /retry.
"""

import time
from contextlib import closing
from pathlib import Path

import msgspec

from cairn.cli.chat import chat_state
from cairn.cli.chat.chat_client import Ending, Talker
from cairn.cli.chat.chat_commands import Command, Say, complete, help_lines, parse
from cairn.cli.chat.chat_state import KNOBS, Conversation, Sampling, Turn, readable, with_setting
from cairn.cli.chat.chat_terminal import Terminal
from cairn.core.errors import CairnError, UsageError
from cairn.core.units import format_duration


class Answered(msgspec.Struct, kw_only=True):
    """An answer in figures. `output_tokens` are the server's count, or the pieces that came."""

    model: str
    text: str
    reasoning: str
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int
    first_token_seconds: float | None
    seconds: float
    tokens_per_s: float | None  # after the first

    def in_words(self) -> str:
        first = self.first_token_seconds
        read = "" if self.prompt_tokens is None else f"{self.prompt_tokens} tokens in, "
        parts = [f"{read}{self.output_tokens} tokens out"]
        if first is not None:
            parts.append(f"first token after {format_duration(first)}")
        if self.tokens_per_s is not None:
            parts.append(f"then {self.tokens_per_s:.1f} tokens/s")
        if self.finish_reason not in ("stop", None):
            parts.append({"length": "cut: length"}.get(self.finish_reason, self.finish_reason))
        return ", ".join(parts)


class Totals(msgspec.Struct):
    answers: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    last: Answered | None = None

    def add(self, answered: Answered) -> None:
        self.answers += 1
        self.prompt_tokens += answered.prompt_tokens or 0
        self.output_tokens += answered.output_tokens
        self.seconds += answered.seconds
        self.last = answered


class Chat:
    def __init__(
        self, talker: Talker, terminal: Terminal, conversation: Conversation, sampling: Sampling
    ) -> None:
        self.talker, self.terminal = talker, terminal
        self.conversation, self.sampling = conversation, sampling
        self.totals = Totals()

    def run(self) -> int:
        terminal = self.terminal
        if (problem := terminal.start_editing(complete)) is not None:
            terminal.note(problem)
        terminal.note(f"{self.talker.model}; /help lists the commands, Ctrl-D leaves")
        while True:
            try:
                text = terminal.read()
            except KeyboardInterrupt:
                terminal.note("\n(Ctrl-D or /quit leaves)")
                continue
            if text is None:
                return 0
            if text.strip() and not self.take(text):
                return 0

    def take(self, text: str) -> bool:
        """Do what a typed text means. False: leave."""
        try:
            match parse(readable(text)):
                case Say(said):
                    self.ask(said)
                case Command("quit", _):
                    return False
                case Command(name, argument):
                    self._do(name, argument)
        except CairnError as error:
            self.terminal.error(error.message, error.hint)
        except KeyboardInterrupt:  # while a command worked
            self.terminal.note("(stopped)")
        return True

    # -- asking ----------------------------------------------------------------------------------

    def ask(self, question: str) -> Answered:
        """Streams the answer to the terminal and keeps it, also when it is stopped."""
        messages = self.conversation.messages(question)
        turn = Turn(question=question)
        self.conversation.turns.append(turn)
        began = time.perf_counter()
        ending, moments = Ending(), []
        try:
            with closing(self.talker.answer(messages, self.sampling)) as pieces:
                for piece in pieces:
                    if isinstance(piece, Ending):
                        ending = piece
                        continue
                    moments.append(time.perf_counter())
                    self._show(turn, piece.text, piece.kind == "reasoning")
        except KeyboardInterrupt:
            ending = Ending("stopped")
        turn.finish = ending.finish
        answered = _figures(self.talker.model, turn, ending, began, moments)
        self.totals.add(answered)
        self.terminal.note(f"({answered.in_words()})")
        return answered

    def _show(self, turn: Turn, text: str, thought: bool) -> None:
        if thought:
            turn.reasoning += text
        else:
            turn.answer += text
        self.terminal.say(text, dim=thought)

    # -- commands --------------------------------------------------------------------------------

    def _do(self, name: str, argument: str) -> None:
        match name:
            case "help":
                self._list(help_lines())
            case "set":
                self._list([f"  {knob:<20} {self._shown(knob)}" for knob in KNOBS])
            case "system":
                self._system(argument)
            case "retry":
                self.ask(self.conversation.take_last().question)
            case "undo":
                forgotten = self.conversation.take_last().question
                self.terminal.note(f"forgotten: {forgotten.splitlines()[0][:60]}")
            case "clear":
                self.conversation.turns.clear()
                self.terminal.note("a new chat")
            case "save":
                self._save(Path(argument).expanduser())
            case "load":
                self._load(Path(argument).expanduser())
            case "stats":
                self._stats()
            case "model":
                self._model(argument)
            case _:
                self._turn(name, argument)

    def _list(self, lines: list[str]) -> None:
        self.terminal.note("\n".join(lines))

    def _shown(self, knob: str) -> str:
        value = getattr(self.sampling, knob)
        return (
            "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        )

    def _turn(self, knob: str, argument: str) -> None:
        if argument:
            self.sampling = with_setting(self.sampling, knob, argument)
        self.terminal.note(f"{knob} is {self._shown(knob)}")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text.lower() == "none" else text
        self.terminal.note(f"system: {self.conversation.system or 'nothing'}")

    def _model(self, name: str) -> None:
        if name:
            self.talker.use(name)
        names = [name] if name else self.talker.models()
        self._list([f"{'*' if one == self.talker.model else ' '} {one}" for one in names])

    def _stats(self) -> None:
        totals = self.totals
        lines = [
            f"{len(self.conversation.turns)} questions in this chat, {totals.answers} answers since the start",
            f"{totals.prompt_tokens} tokens in, {totals.output_tokens} out,"
            f" {format_duration(totals.seconds)} of answering",
        ]
        if totals.last is not None:
            lines.append(f"the last: {totals.last.in_words()}")
        self._list(lines)

    def _save(self, path: Path) -> None:
        data = chat_state.dump(self.conversation, self.sampling, self.talker.model)
        try:
            if path.exists() and not chat_state.is_chat(path.read_bytes()):
                raise UsageError(f"{path} is there, and is no chat", hint="choose another name")
            fresh = path.with_name(f"{path.name}.new")
            fresh.write_bytes(data)
            fresh.replace(path)  # whole or not at all
        except OSError as error:
            raise CairnError(f"cannot write {path}: {error.strerror}") from None
        self.terminal.note(f"{len(self.conversation.turns)} questions saved to {path}")

    def _load(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CairnError(f"cannot read {path}: {error.strerror}") from None
        self.conversation, self.sampling = chat_state.parse(data, str(path))
        turns = self.conversation.turns
        self.terminal.note(f"{len(turns)} questions loaded from {path}")
        if turns:
            self.terminal.note(f"the last: {turns[-1].question}")
            self.terminal.say(turns[-1].answer)
            self.terminal.end_line()


def _figures(
    model: str, turn: Turn, ending: Ending, began: float, moments: list[float]
) -> Answered:
    ended = time.perf_counter()
    tokens = len(moments) if ending.output_tokens is None else ending.output_tokens
    speed = None
    if len(moments) > 1 and tokens > 1:
        speed = (tokens - 1) / max(moments[-1] - moments[0], 1e-9)
    return Answered(
        model=model, text=turn.answer, reasoning=turn.reasoning, finish_reason=ending.finish,
        prompt_tokens=ending.prompt_tokens, output_tokens=tokens,
        first_token_seconds=moments[0] - began if moments else None, seconds=ended - began, tokens_per_s=speed,
    )  # fmt: skip
