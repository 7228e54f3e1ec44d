"""Set-up of a process that simulates, and pools of such processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait

import torch


def prepare() -> None:
    """Use one thread, and exempt PyTorch's quarter of a million objects from garbage collection, which comes seldom."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(10_000)


def workers(count: int) -> ProcessPoolExecutor:
    """A pool of `count` processes that end with this one, even if this one is killed.

    The processes of an ordinary pool would then wait for ever.
    """
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    prepare()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
