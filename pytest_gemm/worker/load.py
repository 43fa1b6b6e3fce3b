"""Load beside a kernel: a race that a kernel hardly ever loses alone on an idle machine shows more often under it."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch

# Numbers that a turn of work reads and writes: more than the second cache of a core holds, and than the L2 of a GPU.
_ON_CPU: Final = 1 << 19
_ON_CUDA: Final = 1 << 25
# The most threads, and seconds that one of them pauses between two turns, so that the kernel is not merely slow.
_THREADS: Final = 16
_PAUSE: Final = 5e-4


@contextlib.contextmanager
def loaded(device: str) -> Iterator[None]:
    """A block beside which other work runs in turns: one thread for each of PyTorch's, on CUDA another stream."""
    done, count = threading.Event(), 1 if device == "cuda" else min(_THREADS, torch.get_num_threads())
    turns = [_turn_on_cuda() if device == "cuda" else _turn_on_cpu() for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        for turn in turns:
            threads.submit(_repeat, turn, done)  # an exception ends the load alone: the kernel meets a lost device too
        try:
            yield
        finally:
            done.set()


def _repeat(turn: Callable[[], object], done: threading.Event) -> None:
    chance = random.Random(threading.get_ident())
    while not done.wait(chance.uniform(0.0, _PAUSE)):
        turn()


def _turn_on_cpu() -> Callable[[], object]:
    """numpy lets other threads run meanwhile, and no record of PyTorch's operators sees it."""
    x = np.ones(_ON_CPU, dtype=np.float32)
    return lambda: np.sqrt(x, out=x)


def _turn_on_cuda() -> Callable[[], object]:
    x, stream = torch.ones(_ON_CUDA, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()

    def turn() -> None:
        with torch.cuda.stream(stream):
            torch.sqrt(x, out=x)
        stream.synchronize()

    return turn
