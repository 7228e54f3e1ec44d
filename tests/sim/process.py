"""Processes that simulate: how each is set up before it plays, and several side by side."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait

import torch


def prepare() -> None:
    """One thread; and the collector of cycles passes by the quarter of a million objects that PyTorch brings."""
    torch.set_num_threads(1)
    gc.freeze()


def workers(count: int) -> ProcessPoolExecutor:
    """So many processes for the work of this one. They end with it, however it ends: a pool's own would wait for ever
    for work from who was killed."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    prepare()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
