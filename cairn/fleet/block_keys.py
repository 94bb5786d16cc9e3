"""Prompt keys of a server that reports blocks of tokens instead of keys.

    BlockStored      root --[1 2]--> a --[3 4]--> b        a block is found if all before it are stored, too
    bind             key 7 ends in b: the prompt's tokens lead there
    outbox           key 7 is stored, until a or b is removed

The router compares keys of texts and never tokenizes, so a prompt is bound once its tokens are known (`prompt_tokens`).
The hashes are the server's own and mean nothing here: blocks and prompts meet in a digest of their tokens. Pure.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from cairn.serve.pulse import Outbox

BlockHash = int | bytes
ROOT = b""
MOST_KEYS = 1_000_000  # of prompts; the oldest are forgotten
MOST_EARLY = 256  # prompts before the first block


class BlockKeys:
    def __init__(self) -> None:
        self.block_size = 0  # tokens; 0 until a block was told
        self.outbox = Outbox()  # keys that are stored or gone, and not yet taken
        self._digest_of: dict[BlockHash, bytes] = {}  # blocks that are stored
        self._parent_of: dict[bytes, bytes] = {}
        # Blocks that are stored, also of parents that are not.
        self._children: dict[bytes, set[bytes]] = {}
        self._found = {ROOT}  # blocks that are stored with all before them
        self._keys_at: dict[bytes, dict[int, int]] = {}  # digest -> key -> cached tokens
        self._block_of: dict[int, bytes] = {}
        self._early: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = []

    def snapshot(self) -> list[tuple[int, int]]:
        """Every key that the server has, with its cached tokens. The outbox goes on from there."""
        self.outbox = Outbox()
        cached = (keys for digest, keys in self._keys_at.items() if digest in self._found)
        return [pair for keys in cached for pair in keys.items()]

    def knows(self, key: int) -> bool:
        """Has its prompt been bound?"""
        return key in self._block_of

    # -- blocks ----------------------------------------------------------------------------------

    def store(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        tokens: Sequence[int],
        size: int,
    ) -> None:
        """Blocks of `size` tokens that follow each other. Those that cannot be placed are left out: their parent was
        never told, or they are of another size than the others."""
        digest = ROOT if parent is None else self._digest_of.get(parent)
        if digest is None or size < 1 or len(tokens) != len(hashes) * size:
            return
        if size != self.block_size and not self._digest_of:
            self._resize(size)
        if size != self.block_size:
            return
        for hash, next_digest in zip(hashes, _digests(tokens, size, digest), strict=True):
            self._digest_of[hash], self._parent_of[next_digest] = next_digest, digest
            self._children.setdefault(digest, set()).add(next_digest)
            if digest in self._found:
                self._find(next_digest)
            digest = next_digest

    def _resize(self, size: int) -> None:
        """The first block since the start or since all were cleared. Keys of blocks of another size end elsewhere."""
        self.block_size = size
        self._keys_at.clear()
        self._block_of.clear()
        early, self._early = self._early, []
        for prompt in early:
            self.bind(*prompt)

    def remove(self, hashes: Iterable[BlockHash]) -> None:
        for hash in hashes:
            digest = self._digest_of.pop(hash, None)
            if digest is None or digest not in self._parent_of:
                continue
            siblings = self._children[parent := self._parent_of.pop(digest)]
            siblings.discard(digest)
            if not siblings:
                del self._children[parent]
            self._lose(digest)

    def clear(self) -> None:
        """No block is left; what prompts consist of stays known."""
        self._digest_of.clear()
        self._parent_of.clear()
        self._children.clear()
        self._found = {ROOT}
        self.outbox.remove([], cleared=True)

    def _find(self, digest: bytes) -> None:
        """Mark a block and all reachable successors as found."""
        reached = [digest]
        while reached:
            digest = reached.pop()
            if digest not in self._found:
                self._found.add(digest)
                self.outbox.store(self._keys_at.get(digest, {}).items())
                reached += self._children.get(digest, ())

    def _lose(self, digest: bytes) -> None:
        lost = [digest]
        while lost:
            digest = lost.pop()
            if digest in self._found:
                self._found.discard(digest)
                self.outbox.remove(list(self._keys_at.get(digest, ())))
                lost += self._children.get(digest, ())

    # -- keys ------------------------------------------------------------------------------------

    def bind(self, keys: Sequence[int], counts: Sequence[int], ids: Sequence[int]) -> None:
        """A prompt of these tokens: `counts[i]` of them lie before key i."""
        if not self.block_size:
            self._early = [*self._early[1 - MOST_EARLY :], (keys, counts, ids)]
            return
        digests = _digests(ids, self.block_size, ROOT)
        for key, count in zip(keys, counts, strict=True):
            blocks = min(count // self.block_size, len(digests))
            if blocks and self._block_of.get(key) != digests[blocks - 1]:
                self._unbind(key)
                self._place(key, digests[blocks - 1], blocks * self.block_size)
        while len(self._block_of) > MOST_KEYS:
            self._unbind(next(iter(self._block_of)))

    def _place(self, key: int, digest: bytes, tokens: int) -> None:
        self._block_of[key] = digest
        self._keys_at.setdefault(digest, {})[key] = tokens
        if digest in self._found:
            self.outbox.store([(key, tokens)])

    def _unbind(self, key: int) -> None:
        digest = self._block_of.pop(key, None)
        if digest is None:
            return
        del self._keys_at[digest][key]
        if not self._keys_at[digest]:
            del self._keys_at[digest]
        if digest in self._found:
            self.outbox.remove([key])


def _digests(ids: Sequence[int], size: int, before: bytes) -> list[bytes]:
    """Chained digest of each full block: of its tokens and all tokens before them."""
    digests: list[bytes] = []
    tokens = array("q", ids)
    for end in range(size, len(ids) + 1, size):
        before = blake2b(before + tokens[end - size : end].tobytes(), digest_size=16).digest()
        digests.append(before)
    return digests
