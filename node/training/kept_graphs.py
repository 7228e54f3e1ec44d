"""Forwards of a stage whose backwards have not come yet, with what autograd keeps for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import nn

from node.tasks.saved_tensors import saved_tensors

LEAST_BYTES, BYTES_OF_PARAMETER = 64 << 20, 8
"""All graphs together may take the larger of the two: the bytes, or the bytes of a parameter times their number."""

Graph = tuple[torch.Tensor, torch.Tensor]
"""Input and output of a forward."""


class KeptGraphs:
    """Graphs by the key that names their microbatch. The oldest go if all would take more than `most_bytes`.

    They hold only as long as the parameters stay as they are: `clear` before these change.
    """

    def __init__(self, module: nn.Module, most_bytes: int | None = None) -> None:
        parameters = list(module.parameters())
        usual_bytes = max(LEAST_BYTES, BYTES_OF_PARAMETER * sum(each.numel() for each in parameters))
        self._module, self._parameters = module, parameters
        self._most_bytes = usual_bytes if most_bytes is None else most_bytes
        self._most: int | None = None  # graphs; all have the same size, which the first forward shows
        self._kept: dict[Hashable, Graph] = {}

    def forward(self, key: Hashable, taken: torch.Tensor) -> torch.Tensor:
        """The module's output. The graph is kept if there is room, and autograd makes one."""
        if self._most is None and torch.is_grad_enabled():
            self._most = self._most_bytes // max(1, self._measured(taken))
        with torch.set_grad_enabled(bool(self._most) and torch.is_grad_enabled()):
            output: torch.Tensor = self._module(taken)
        if not output.requires_grad:
            return output
        self._kept[key] = taken, output
        if len(self._kept) > (self._most or 0):
            del self._kept[next(iter(self._kept))]
        return output.detach()

    def pop(self, key: Hashable, taken: Callable[[], torch.Tensor]) -> Graph:
        """The graph of this key, or that of a forward that is computed anew."""
        if key in self._kept:
            return self._kept.pop(key)
        again = taken()
        return again, self._module(again)

    def clear(self) -> None:
        self._kept.clear()

    def _measured(self, taken: torch.Tensor) -> int:
        sizes = list[int]()
        with saved_tensors(self._parameters, sizes.append):
            self._module(taken)
        return sum(sizes)
