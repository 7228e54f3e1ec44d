"""Counts what autograd keeps of a forward pass for the backward pass: the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def saved_tensors(others: Iterable[torch.Tensor], found: Callable[[int], None]) -> Iterator[None]:
    """Call `found` with the bytes of each storage that is kept, once, except those of `others`.

    Beside such hooks autograd does not notice that a tensor was changed: do not take the gradient.
    """
    seen = {each.untyped_storage()._cdata for each in others}
    alive = list[torch.UntypedStorage]()  # else its number could be used again; a tensor would hold the graph

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
        if storage is not None and storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(storage)
            found(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
