"""Layout of a token's row of latent attention in a cache: in the model's dtype, or with its latent in float8.

    float8 row    [latent, e4m3: rank bytes] [a float32 scale for each 128 of them] [rotated key, 16 bits]

Scales are powers of 2, so that latents are exact in 16 bits. The rotated key stays as it is: its columns are few. With
512 + 64 columns a row takes 656 bytes, where bfloat16 takes 1,152. A cache of such rows has type float8, and one
column for each byte. Arithmetic without torch.
"""

from typing import Any, NamedTuple

MOST_PER_SCALE = 128


class RowLayout(NamedTuple):
    """Offsets of the parts of a row; those of scales and key are in elements of their own dtypes."""

    rank: int
    rotated: int
    float8: bool

    @property
    def group(self) -> int:
        """Columns that share a scale: the largest power of 2 that divides the rank."""
        return min(self.rank & -self.rank, MOST_PER_SCALE)

    @property
    def scales(self) -> int:
        return self.rank // self.group if self.float8 else 0

    @property
    def columns(self) -> int:
        """Columns of the cache."""
        return self.rank + 4 * self.scales + self.rotated * (2 if self.float8 else 1)

    @property
    def scales_at(self) -> int:
        return self.rank // 4

    @property
    def key_at(self) -> int:
        return (self.rank + 4 * self.scales) // 2 if self.float8 else self.rank

    def obstacle(self) -> str | None:
        """Why rows of these sizes cannot lie so, or None."""
        if self.float8 and (self.rank % 4 or self.rotated % 2):
            return f"latents of {self.rank} and keys of {self.rotated} columns: not whole words"
        return None

    def constants(self) -> dict[str, Any]:
        return dict(
            RANK=self.rank, R=_tile(self.rank), ROTATED=self.rotated,
            P=_tile(self.rotated), FLOAT8=self.float8, GROUP=self.group,
            SCALES_AT=self.scales_at, KEY_AT=self.key_at,
        )  # fmt: skip


def _tile(columns: int) -> int:
    """Columns that a kernel loads: a power of 2."""
    return max(16, 1 << (columns - 1).bit_length())
