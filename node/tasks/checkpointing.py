"""Activation checkpointing: a block's activations are computed again in the backward pass instead of being kept.

A block becomes an instance of a subclass of its class, so that names, hooks and copies of the module stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_USUAL = dict[type, type]()  # the class of a block before it was checkpointed
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules of which a list, dictionary or sequence has several of one class, if these have parts."""
    return list(dict.fromkeys(_repeated(module)))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    kinds = Counter(type(child) for child in children if isinstance(module, _CONTAINERS) and _has_parts(child))
    for child in children:
        yield from [child] if kinds[type(child)] > 1 else _repeated(child)


def _has_parts(module: nn.Module) -> bool:
    counts = (sum(1 for _ in each) for each in (module.children(), module.parameters()))
    return all(counts) and not isinstance(module, _CONTAINERS)


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Checkpoint each block where gradients are recorded. Random numbers (dropout) are drawn again as they were."""
    for block in blocks:
        block.__class__ = _checkpointed(type(block))  # type: ignore[arg-type]


@contextmanager
def first_kept(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """The first block keeps its activations, as each does for a moment while they are computed again."""
    first = next((each for each in blocks if type(each) in _USUAL), None)
    kind = type(first)
    if first is not None:
        first.__class__ = _USUAL[kind]
    try:
        yield
    finally:
        if first is not None:
            first.__class__ = kind  # type: ignore[assignment]


@cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        compute: Callable[..., Any] = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return compute(*given, **named)
        contexts = partial(_contexts, self)
        return checkpoint(compute, *given, use_reentrant=False, context_fn=contexts, **named)

    made = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    _USUAL[made] = kind
    return made


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _keeping_buffers(block)


@contextmanager
def _keeping_buffers(block: nn.Module) -> Iterator[None]:
    """The second forward pass must not count in the statistics of normalisation layers, as the first one did."""
    held = [(part._buffers, name, each) for part in block.modules() for name, each in part._buffers.items()]
    copies = [each if each is None else each.clone() for _, _, each in held]
    try:
        yield
    finally:
        for (buffers, name, each), copy in zip(held, copies, strict=True):
            buffers[name] = each
            if each is not None and copy is not None:
                each.data.copy_(copy)  # not noticed by autograd, which may have kept the buffer
