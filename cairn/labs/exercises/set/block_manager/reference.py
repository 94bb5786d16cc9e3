"""Which pages of the KV cache belong to which sequence."""


class OutOfBlocks(Exception):
    """No page is free."""


class BlockManager:
    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(blocks))
        self.references = [0] * blocks
        self.tables: dict[str, list[int]] = {}  # pages of each sequence, in order
        self.lengths: dict[str, int] = {}  # tokens of each sequence

    def append(self, sequence: str) -> tuple[int, int] | None:
        """Makes room for one more token; returns (old, new) when a shared page must be copied first.

        Raises OutOfBlocks, and changes nothing, when a page is needed and none is free.
        """
        # begin answer
        table = self.tables.get(sequence, [])
        count = self.lengths.get(sequence, 0)
        copy = None
        if count % self.block_size == 0:
            table = [*table, self._take()]
        else:
            last = table[-1]
            if self.references[last] > 1:
                copy = (last, self._take())
                self.references[last] -= 1
                table = [*table[:-1], copy[1]]
        self.tables[sequence] = table
        self.lengths[sequence] = count + 1
        return copy
        # end answer

    def fork(self, sequence: str, child: str) -> None:
        """A second sequence with the same tokens; no page is copied yet."""
        # begin answer
        self.tables[child] = list(self.tables[sequence])
        self.lengths[child] = self.lengths[sequence]
        for page in self.tables[child]:
            self.references[page] += 1
        # end answer

    def release(self, sequence: str) -> None:
        # begin answer
        for page in self.tables.pop(sequence):
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)
        del self.lengths[sequence]
        # end answer

    def _take(self) -> int:
        """A free page with one reference."""
        if not self.free:
            raise OutOfBlocks
        page = self.free.pop()
        self.references[page] = 1
        return page
