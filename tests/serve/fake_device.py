"""A device that computes nothing but remembers everything: what each KV entry was computed from.

An entry is a number made from the entry before it, read through the row's table, and from its token. A page that was
given to somebody else too early, a table with a wrong page, a token fed at the wrong place: each changes the number,
and with it the next token. `reference` makes the same numbers from the tokens alone.
"""

import zlib
from collections.abc import Sequence

from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.step import Chunk, Step

EOS = 0
START = 1


def mix(before: int, token: int) -> int:
    return zlib.crc32(b"%d %d" % (before, token))


def choose(entry: int, vocabulary: int) -> int:
    """The fake model's next token, from the entry of the last one."""
    return (entry >> 7) % vocabulary


def entries(tokens: Sequence[int]) -> list[int]:
    found, entry = [], START
    for token in tokens:
        entry = mix(entry, token)
        found.append(entry)
    return found


def reference(request: Request, limits: Limits) -> list[int]:
    """Everything that this request has to answer, if nothing ends it before its time."""
    params = request.params
    room = limits.context - len(request.prompt)
    most = room if params.max_tokens is None else params.max_tokens
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids))
    entry, outputs = entries(request.prompt)[-1], []
    while len(outputs) < most:
        token = choose(entry, limits.vocabulary)
        outputs.append(token)
        if token in stops and len(outputs) >= params.min_tokens:
            break
        entry = mix(entry, token)
    return outputs


class FakeDevice:
    """Steps run when they are launched: on one stream the order is what counts, not the moment."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.groups = [group for group in limits.groups if group.kind != "state"]
        self.entry: dict[tuple[int, int], int] = {}  # (page, offset)
        self.state: dict[int, int] = {}  # page of a state: the entry of its last token
        self.salt: dict[int, str] = {}  # of whoever wrote to the page last
        self.table: dict[int, list[list[int]]] = {}  # by row, of each group
        self.last: dict[int, int] = {}  # by row
        self.length: dict[int, int] = {}  # by row, behind a step that verified drafts

    def launch(self, step: Step) -> list[int]:
        """Run the step; returns its samples, which the host gets to see when it calls update.

        Whoever was lost with an earlier step is left out; nobody listens to its samples any more.
        """
        chunks = [chunk for chunk in step.chunks if chunk.request.state != "finished"]
        for chunk in chunks:
            self._extend_tables(chunk)
        for (
            source,
            target,
        ) in step.restores:  # of a lost request, perhaps from a snapshot of a lost step
            self.state[target] = self.state.get(source, START)
        for chunk in chunks:
            self._write(chunk)
        for chunk in chunks:
            self._check(chunk)
        for source, target in step.saves:
            self.state[target] = self.state.get(source, START)  # a lost request saves nothing
        starts = {chunk.request: self._start(chunk) for chunk in chunks}
        drawn = []
        for chunk in step.chunks:
            if chunk.request in starts:
                drawn += self._draw(chunk, starts[chunk.request])
            else:
                drawn += [0] * chunk.samples
        return drawn

    def _start(self, chunk: Chunk) -> int:
        return self.length[chunk.request.row] if chunk.ahead else chunk.start

    def _draw(self, chunk: Chunk, start: int) -> list[int]:
        """A token behind each of the last ones; those behind drafts that do not hold are nonsense."""
        row, end = chunk.request.row, start + chunk.count
        entries = [self._read(row, 0, at) for at in range(end - chunk.samples, end)]
        drawn = [choose(entry, self.limits.vocabulary) for entry in entries]
        if drawn:
            held = 0
            while held < len(chunk.drafts) and chunk.drafts[held] == drawn[held]:
                held += 1
            self.last[row] = drawn[held]
            self.length[row] = end - len(chunk.drafts) + held
        return drawn

    def _extend_tables(self, chunk: Chunk) -> None:
        row, groups = chunk.request.row, len(self.groups)
        assert 0 <= row < self.limits.rows
        assert len(chunk.pages) % groups == 0
        if chunk.first_page == 0 and chunk.pages:
            self.table[row] = [[] for _ in self.groups]
            assert chunk.start % self.limits.page_size == 0  # found pages are whole ones
        held = [chunk.request.blocks, *chunk.request.more_blocks]
        places = len(chunk.pages) // groups
        for index, (group, table) in enumerate(zip(self.groups, self.table[row], strict=True)):
            assert chunk.first_page <= len(table)
            table[chunk.first_page : chunk.first_page + places] = chunk.pages[index::groups]
            assert len(table) == len(held[index])
            assert all(ours in (0, page) for ours, page in zip(held[index], table, strict=True))
            assert group.kind == "window" or 0 not in table

    def _write(self, chunk: Chunk) -> None:
        row, request, start = chunk.request.row, chunk.request, self._start(chunk)
        known = request.prompt + request.outputs
        drafted = start + chunk.count - len(chunk.drafts)
        for position in range(start, start + chunk.count):
            if position >= drafted:
                token = chunk.drafts[position - drafted]
            elif position < len(known):
                token = known[position]
            else:
                assert drafted - start == 1  # only a decoding request runs ahead of the host
                token = self.last[row]
            before = self._read(row, 0, position - 1) if position else START
            for index in range(len(self.groups)):
                page, offset = self._slot(row, index, position)
                assert page
                self.entry[page, offset] = mix(before, token)
                self.salt[page] = request.salt
            for page in request.states:
                self.state[page] = mix(self.state[page] if position else START, token)

    def _check(self, chunk: Chunk) -> None:
        """What the chunk attends to is its own prefix, whatever happened to the pages in between."""
        row, start, size = chunk.request.row, self._start(chunk), self.limits.page_size
        end = start + chunk.count - len(chunk.drafts)
        tokens = chunk.request.prompt + reference(chunk.request, self.limits)
        expected = entries(tokens[:end])
        for index, group in enumerate(self.groups):
            first = max(0, start - group.window + 1) if group.window else 0
            seen = [self._read(row, index, position) for position in range(first, end)]
            # Behind a stop that the host has not seen yet there is nothing right to compare with.
            assert seen[: max(0, len(expected) - first)] == expected[first:]
            used = self.table[row][index][first // size : -(-end // size)]
            assert {self.salt[page] for page in used} == {chunk.request.salt}
        if len(expected) == end:
            assert all(self.state[page] == expected[-1] for page in chunk.request.states)

    def _slot(self, row: int, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.limits.page_size)
        return self.table[row][group][index], offset

    def _read(self, row: int, group: int, position: int) -> int:
        return self.entry[self._slot(row, group, position)]
