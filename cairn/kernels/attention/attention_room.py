"""Scratch memory of the backward pass of attention. Pure arithmetic; no torch.

    slopes    2 bytes for each pair of query and key that see each other, in blocks (see attention_gluon_slopes)

The kernels ask here before they allocate, and the prediction of a run's memory asks the same.
"""

TILE, BLOCK = 128, 64  # rows of a tile and of a block, as the kernels have them
SLOPES_MOST = 9 << 28  # bytes that slopes may take: 2.25 GiB


def slopes_bytes(tokens: int, length: int, heads: int, causal: bool = True) -> int:
    """Bytes of stored score gradients for equal lengths; 0 (not stored) for partial tiles or above the limit."""
    if length % TILE or tokens % length:
        return 0
    n = length // BLOCK
    blocks = tokens // length * heads * (n * (n + 1) // 2 if causal else n * n)
    room = blocks * BLOCK * BLOCK * 2
    return room if room <= SLOPES_MOST else 0
