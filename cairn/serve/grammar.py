"""Grammars that hold an answer to a shape: compiled once, followed by each request token by token.

    Guide -compile-> Grammar -start-> GrammarConstraint: mask(), accept(token), mask(), ...       (the engine's part)

llguidance does the work. A mask has one bit for each token of the vocabulary, in the words that the sampling kernels
read. Compiling takes from a millisecond to a second and happens in a thread of its own, once for equal guides; a mask
takes some tens of microseconds. The last token of a constrained answer is an end-of-text token: when the text is
complete, the mask allows nothing else.
"""

import asyncio
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cairn.core.errors import RequestError
from cairn.models.tokenizer import Tokenizer
from cairn.serve.gbnf import lark_of
from cairn.serve.json_schema import check_depth, without_annotations
from cairn.serve.structured_output import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from cairn.models.runnable import OpenModel

REMEMBERED = 128  # compiled grammars
# The compiler recurses: a chain of ten thousand references overflows the 8 MiB of an ordinary thread, which ends the
# process. This much was tried with longer chains than MOST_CHARACTERS can spell.
STACK_BYTES = 256 * 2**20
# A space or two, or a line and its indentation: an end to models that would go on with spaces for ever.
WHITESPACE = r" {0,2}|\r?\n[ \t]{0,20}"
JSON_RULE = re.compile(r"%json\s*(?=\{)")
FOLLOWED = "follow the grammar of this request"  # a part of the reason when an answer cannot go on
_starting = threading.Lock()  # the size of a new thread's stack is a setting of the whole process


class Grammar:
    """A compiled guide. Any number of requests may follow it at once."""

    def __init__(
        self, guide: Guide, matcher: "LLMatcher", words: tuple[int, int], ends: frozenset[int]
    ) -> None:
        self.guide = guide
        self._matcher, self._words, self._ends = matcher, words, ends

    def start(self) -> "GrammarConstraint":
        """Create the constraint of an answer at its beginning."""
        return GrammarConstraint(self._matcher.deep_copy(), self._words, self._ends)


class GrammarConstraint:
    """Position of an answer in its grammar."""

    def __init__(self, matcher: "LLMatcher", words: tuple[int, int], ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._own, self._wanted = words  # of the tokenizer, of the model
        self.finished = False

    def mask(self) -> np.ndarray:
        """int32 [W]; all bits are set when the grammar has failed, and `accept` says how."""
        words_W = np.zeros(self._own, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self._matcher.is_error():
            words_W.fill(-1)
        return words_W[: self._wanted]

    def dead_end(self) -> str | None:
        """Why nothing can come next; None: something can."""
        words_W = self.mask()
        if self._matcher.is_error():
            return _in_short(self._matcher.get_error())
        return None if words_W.any() else "no token is allowed"

    def accept(self, token: int) -> str | None:
        if self.finished:
            return f"token {token} comes behind the end of the text"
        if not self._matcher.consume_token(token):
            why = _in_short(self._matcher.get_error())
            return f"token {token} does not {FOLLOWED}: {why}"
        self.finished = token in self._ends
        return None

    def forced(self) -> list[int]:
        return [] if self.finished else self._matcher.compute_ff_tokens()

    def followed(self, tokens: Sequence[int]) -> int:
        return 0 if self.finished else self._matcher.validate_tokens(list(tokens))

    def copy(self) -> "GrammarConstraint":
        twin = GrammarConstraint(self._matcher.deep_copy(), (self._own, self._wanted), self._ends)
        twin.finished = self.finished
        return twin


class Grammars:
    """Compiles guides for one model, and remembers the last ones. Safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: int,
        eos_ids: Sequence[int] = (),
        most: int = REMEMBERED,
    ) -> None:
        self.tokenizer, self.vocabulary, self.most = tokenizer, vocabulary, most
        self.eos_ids = list(eos_ids or tokenizer.eos_ids)
        self._known: OrderedDict[Guide, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cairn grammar")
        self._table: LLTokenizer | None = None

    def compile(self, guide: Guide) -> Grammar:
        """Waits for it. RequestError: the guide is no grammar, or one that cannot be followed."""
        return self.compile_later(guide).result()

    async def compiled(self, guide: Guide) -> Grammar:
        """`compile` for an event loop, which goes on meanwhile."""
        # Shielded: others may wait for the same one, and outlive the one who gave up.
        future = asyncio.wrap_future(self.compile_later(guide))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # was looked at
        return await asyncio.shield(future)

    def warm_up(self) -> Future[Grammar]:
        """Read the vocabulary now, which takes seconds for a large one, and not with the first request."""
        return self.compile_later(Guide("json_schema", "{}", "warm_up"))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def compile_later(self, guide: Guide) -> Future[Grammar]:
        """`compile` for a loop that must not wait; equal guides share one compilation."""
        with self._lock:
            future = self._known.get(guide)
            if future is None or (future.done() and (future.cancelled() or future.exception())):
                future = self._known[guide] = _submit(self._thread, self._build, guide)
            self._known.move_to_end(guide)
            while len(self._known) > self.most:
                self._known.popitem(last=False)
            return future

    # -- in the thread -------------------------------------------------------------------------

    def _build(self, guide: Guide) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        table = self._table = self._table or self._read_vocabulary()
        limits = LLParserLimits(verbose_errors=False)
        try:
            matcher = LLMatcher(table, _spelled(guide), log_level=0, limits=limits)
        except ValueError as problem:  # the compiler's reader of JSON
            raise _not_followed(guide, str(problem)) from None
        if matcher.is_error():
            raise _not_followed(guide, matcher.get_error())
        words = (-(-table.vocab_size // 32), -(-self.vocabulary // 32))
        grammar = Grammar(guide, matcher, words, frozenset(table.eos_tokens))
        if (why := grammar.start().dead_end()) is not None:
            raise RequestError(
                f"{guide.field} cannot be followed: no answer can begin ({why})",
                hint="a rule or a schema that needs itself has no end, and one that forbids everything no beginning",
            )
        return grammar

    def _read_vocabulary(self) -> "LLTokenizer":
        # With RUST_BACKTRACE set, the compiler draws a stack for each level of a mistake that lies deep: minutes.
        os.environ.setdefault("RUST_LIB_BACKTRACE", "0")
        from llguidance import LLTokenizer

        backend = self.tokenizer.backend
        # A model's rows beyond its vocabulary are never allowed, and a mask has bits for them.
        size = max(self.vocabulary, 1 + max(backend.get_vocab().values()))
        try:
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self.eos_ids or None)
        except ValueError as error:
            raise RequestError(
                f"{self.tokenizer.source} cannot be used for structured output: {_in_short(str(error))}",
                hint="send the request without response_format, guided_* and a required tool",
            ) from error


def grammars_for(opened: "OpenModel", vocabulary: int) -> Grammars | None:
    """Grammars of a model; None without a tokenizer."""
    if opened.tokenizer is None:
        return None
    return Grammars(opened.tokenizer, vocabulary, opened.eos_ids)


_HINTS = {
    "json_schema": "JSON Schema keywords that cannot be enforced are refused, not ignored",
    "regex": "the syntax is that of Rust's regex crate: no look-around and no back-references",
    "gbnf": "the syntax is that of llama.cpp's GBNF grammars; the first rule is named root",
    "lark": "the syntax is that of llguidance's Lark grammars; the first rule is named start",
}


def _spelled(guide: Guide) -> str:
    from llguidance import LLMatcher

    match guide.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                guide.text, defaults={"whitespace_pattern": WHITESPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(guide.text)
        case "gbnf":
            return LLMatcher.grammar_from_lark(lark_of(guide.text, guide.field))
        case _:
            return LLMatcher.grammar_from_lark(bounded_rules(guide.text))


def bounded_rules(grammar: str) -> str:
    """A Lark grammar whose `%json` rules have bounded whitespace, as schemas that stand alone have."""
    parts, at = [], 0
    for rule in JSON_RULE.finditer(grammar):
        if rule.start() < at:  # text inside a schema
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, rule.end())
        except (ValueError, RecursionError):  # the compiler says what is wrong with it
            continue
        parts += [grammar[at : rule.start()], json_rule(schema)]
        at = end
    return "".join([*parts, grammar[at:]])


def json_rule(schema: object) -> str:
    """A JSON value within a Lark grammar, with the same whitespace as one that stands alone."""
    check_depth(schema, "a schema of the grammar")
    schema = without_annotations(schema)
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    return f"%json {msgspec.json.encode(schema).decode()}"


def _not_followed(guide: Guide, error: str) -> RequestError:
    message = f"{guide.field} cannot be followed: {_in_short(error)}"
    return RequestError(message, hint=_HINTS[guide.kind])


def _submit(
    pool: ThreadPoolExecutor, build: Callable[[Guide], Grammar], guide: Guide
) -> Future[Grammar]:
    """The pool starts its thread with the first task."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            return pool.submit(build, guide)
        finally:
            threading.stack_size(before)


def _in_short(error: str) -> str:
    """The compiler's message in a line: of a regular expression the reason, of others the beginning."""
    text = error.partition("<state>")[0].replace("<non-verbose/>", "")
    if "regex parse error" in text and "\nerror: " in text:
        text = text.rpartition("\nerror: ")[2].partition("\n")[0]
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."
