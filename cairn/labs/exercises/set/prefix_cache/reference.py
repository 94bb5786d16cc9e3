"""Blocks of tokens whose keys and values are kept."""


class PrefixCache:
    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks  # how many it may keep
        self.block_size = block_size
        self.parent: dict[int, int] = {}  # name of a block -> name of the one before it (0: none)
        self.used: dict[int, int] = {}  # name of a block -> when it was last used
        self.clock = 0

    def names(self, tokens: list[int]) -> list[int]:
        """The names of all full blocks of these tokens, in order."""
        # begin answer
        hashes, parent = [], 0
        for begin in range(0, len(tokens) - self.block_size + 1, self.block_size):
            name = hash((parent, tuple(tokens[begin : begin + self.block_size])))
            hashes.append(name)
            parent = name
        return hashes
        # end answer

    def lookup(self, tokens: list[int]) -> int:
        """How many tokens of the prompt are cached, at least one short of all; counts as use."""
        # begin answer
        self.clock += 1
        usable = (len(tokens) - 1) // self.block_size * self.block_size
        hit = 0
        for name in self.names(tokens[:usable]):
            if name not in self.used:
                break
            self._touch(name)
            hit += self.block_size
        return hit
        # end answer

    def insert(self, tokens: list[int]) -> None:
        """Keeps every full block of these tokens, and evicts where there is no room."""
        # begin answer
        self.clock += 1
        parent = 0
        for name in self.names(tokens):
            if name not in self.used:
                while len(self.used) >= self.blocks:
                    self._evict()
                self.parent[name] = parent
            self._touch(name)
            parent = name
        # end answer

    def _touch(self, name: int) -> None:
        # begin answer
        self.used[name] = self.clock
        # end answer

    def _evict(self) -> None:
        """Forgets the least recently used block from which nothing hangs."""
        # begin answer
        parents = set(self.parent.values())
        leaves = [name for name in self.used if name not in parents]
        oldest = min(leaves, key=lambda name: self.used[name])
        del self.used[oldest], self.parent[oldest]
        # end answer
