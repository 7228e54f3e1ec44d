"""A module's trained parameters and their gradients as flat vectors, which the module's tensors are views of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from node.tasks.views import View, Views
from protocols.base import Layout, Vector

NamedParameters = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True, eq=False)
class FlatParameters:
    """Trained parameters and gradients as flat float32 vectors, one of each for a fragment of the layout.

    Writing to a vector changes the module: at once where a tensor computes in float32, and with the next `refresh`
    where it computes in bfloat16. Such a tensor is a view of `compute`: parameters and gradients in bfloat16.
    """

    layout: Layout
    vectors: tuple[Vector, ...]
    gradients: tuple[Vector, ...]
    views: Views
    compute: tuple[torch.Tensor, torch.Tensor] | None = None

    def refresh(self) -> None:
        """Round the parameters to the dtype in which the module computes."""
        if self.compute:
            self.compute[0].copy_(self.vectors[0])

    def collect(self) -> None:
        """Add the gradients of the last backward pass in bfloat16 to the float32 ones, and set them to zero."""
        if self.compute:
            self.gradients[0].add_(self.compute[1])
            self.compute[1].zero_()


def unfrozen(module: nn.Module) -> NamedParameters:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def layout_of(named: NamedParameters) -> Layout:
    """The layout of these parameters in one flat vector, which they need not be in."""
    return Layout((tuple((name, tuple(parameter.shape)) for name, parameter in named),))


def require_trainable(named: NamedParameters) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters, after checking that they can be trained and averaged."""
    parameters = list(named)
    if not sum(parameter.numel() for _, parameter in parameters):
        raise ValueError("the module has no parameters to train")
    device = parameters[0][1].device
    for name, parameter in parameters:
        if parameter.dtype not in (torch.float32, torch.bfloat16) or parameter.device != device:
            what = f"parameter {name} is {parameter.dtype} on {parameter.device}"
            raise ValueError(f"{what}: float32 or bfloat16 on {device} is needed")
        if not parameter.requires_grad:
            raise ValueError(f"parameter {name} takes no gradient: trained() must leave out what is not trained")
    return parameters


def flatten(module: nn.Module, allocate: Callable[[int], Vector] | None = None, resume: bool = False) -> FlatParameters:
    """Move a module's parameters into flat vectors; see `flatten_parameters`. Frozen ones are left as they are."""
    return flatten_parameters(unfrozen(module), allocate, resume)


def flatten_parameters(
    named: NamedParameters, allocate: Callable[[int], Vector] | None = None, resume: bool = False
) -> FlatParameters:
    """Move parameters into flat vectors, in their order. Their values do not change.

    Today there is one fragment. Gradients are views as well: fill their vectors with zeros, never set them to None.
    `views` mends what a user's code does to them.
    """
    parameters = require_trainable(named)
    device = parameters[0][1].device
    layout = layout_of(parameters)
    (size,) = layout.sizes()
    # the dtype is named, because a user's code may have changed torch's default
    vector = torch.empty(size, dtype=torch.float32, device=device) if allocate is None else allocate(size)
    gradient = torch.zeros(size, dtype=torch.float32, device=device)
    compute = None
    if any(parameter.dtype == torch.bfloat16 for _, parameter in parameters):
        rounded = torch.zeros(size, dtype=torch.bfloat16, device=device)
        compute = (rounded, torch.zeros_like(rounded))
    views, low = [], 0
    for name, parameter in parameters:
        high = low + parameter.numel()
        if not resume:
            vector[low:high].view(parameter.shape).copy_(parameter.detach())
        is_rounded = compute is not None and parameter.dtype != torch.float32
        values, slopes = compute if compute and is_rounded else (vector, gradient)
        value, slope = (each[low:high].view(parameter.shape) for each in (values, slopes))
        views.append(View(name, parameter, value, slope, is_rounded))
        low = high
    gradients = (gradient, compute[1]) if compute else (gradient,)
    flat = FlatParameters(layout, (vector,), (gradient,), Views(views, gradients), compute)
    flat.refresh()
    return flat
