"""Torch on one thread: tiny tensors gain nothing from two, and on a busy machine two wait for the one that is held up.

with one_thread(): ...        or, around a whole lab:  @one_thread()
"""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Generator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
