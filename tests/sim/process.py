"""A process that simulates: how it is set up before it plays."""

from __future__ import annotations

import gc

import torch


def prepare() -> None:
    """One thread; and the collector of cycles passes by the quarter of a million objects that PyTorch brings."""
    torch.set_num_threads(1)
    gc.freeze()
