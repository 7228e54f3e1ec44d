"""A module's trained parameters and their gradients as flat vectors, which the module's tensors are views of.

A task's loss may do anything to these: set gradients to None (`zero_grad`), convert the module, replace a parameter. A
lost view would train nothing, silently. So after each loss and each backward pass, the memory of each parameter and
gradient is compared with that of its view, at about .3 µs a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from node.tasks.name import TaskError
from protocols.base import Layout, Vector

NamedParameters = Iterable[tuple[str, nn.Parameter]]
_EARLIER = "erases gradients of the step's earlier batches (zero_grad() or backward()?)"
_TWICE = "leaves gradients behind, which would count twice: call zero_grad() after your own backward()"


@dataclass(slots=True, eq=False)
class View:
    """One parameter, and the views of it and of its gradient."""

    name: str
    parameter: nn.Parameter
    value: torch.Tensor
    gradient: torch.Tensor | None  # None: the gradient stays where autograd puts it
    is_rounded: bool  # the view is of a rounded copy, which is written anew before each step
    owners: list[tuple[dict[str, nn.Parameter | None], str]] = field(default_factory=list)
    value_at: int = 0
    gradient_at: int = 0

    def __post_init__(self) -> None:
        self.value_at = self.value.data_ptr()
        self.gradient_at = self.gradient.data_ptr() if self.gradient is not None else 0

    def attach(self) -> None:
        """Make the parameter and its gradient the views, whatever they are now."""
        self.parameter.data = self.value
        self.attach_gradient()

    def attach_gradient(self) -> None:
        # not the tensor itself, whose memory `to()` may replace
        self.parameter.grad = None if self.gradient is None else self.gradient.detach()


class Views:
    """The views of all trained parameters. What cannot be mended raises `TaskError`, except in `restore`."""

    def __init__(self, views: Sequence[View], gradients: Sequence[torch.Tensor]) -> None:
        self._views, self._gradients = views, gradients
        self._task, self._version = "", 0
        for view in views:
            view.attach()

    def watch(self, module: nn.Module, task: str = "") -> None:
        """Also refuse the replacement of a parameter in `module`. `task` is the name of the task in messages."""
        self._task = f"task {task}: " if task else ""
        by_id = {id(view.parameter): view for view in self._views}
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if view := by_id.get(id(parameter)):
                    view.owners.append((part._parameters, key))

    def before_loss(self) -> None:
        self._version = self._versions()

    def after_loss(self, is_first: bool) -> None:
        has_changed, is_left = self._versions() != self._version, False
        if has_changed and not is_first:
            raise self._fault(f"loss() {_EARLIER}: leave them alone, or set recipe.batches = 1")
        for view in self._views:
            self._check_value(view)
            gradient = view.parameter.grad
            if gradient is None and view.gradient is not None and has_changed:
                view.gradient.zero_()
            elif gradient is not None and gradient.data_ptr() != view.gradient_at:
                is_left |= is_first and bool(gradient.any())
            elif gradient is not None:
                continue
            view.attach_gradient()
        if is_left or (has_changed and any(bool(gradient.any()) for gradient in self._gradients)):
            raise self._fault(f"loss() {_TWICE}, and leave the last backward pass to Starling")

    def after_backward(self) -> None:
        """Mend the views after a backward pass, in which hooks may have replaced gradients."""
        for view in self._views:
            self._check_value(view)
            gradient = view.parameter.grad
            if view.gradient is None:
                continue
            if gradient is None or gradient.data_ptr() != view.gradient_at:
                if gradient is not None:
                    view.gradient.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                view.attach_gradient()

    def restore(self) -> None:
        """Mend the views after an evaluation, whose changes do not count."""
        for view in self._views:
            self._check_owners(view)
            view.attach()

    def detach(self) -> None:
        for view in self._views:
            view.parameter.data, view.parameter.grad = view.value, None

    def __iter__(self) -> Iterator[View]:
        return iter(self._views)

    def _versions(self) -> int:
        return sum(gradient._version for gradient in self._gradients)

    def _check_value(self, view: View) -> None:
        self._check_owners(view)
        parameter = view.parameter
        if parameter.data_ptr() == view.value_at and parameter.dtype == view.value.dtype:
            return
        now, value = parameter.data, view.value
        if now.dtype != value.dtype or now.shape != value.shape or now.device != value.device:
            what = f"{now.dtype}, {tuple(now.shape)} on {now.device}, from {value.dtype}, {tuple(value.shape)}"
            raise self._fault(
                f"loss() has changed parameter {view.name} to {what} on {value.device}: convert copies, not the module"
            )
        if view.is_rounded and not torch.equal(now, value):
            raise self._fault(
                f"loss() has changed parameter {view.name}, a bfloat16 copy of the trained value: "
                "make it float32 to change it"
            )
        value.copy_(now)
        parameter.data = value

    def _check_owners(self, view: View) -> None:
        for place, key in view.owners:
            if place.get(key) is not view.parameter:
                raise self._fault(
                    f"parameter {view.name} was replaced in the module by another tensor, which would never be "
                    "trained: change it in place (copy_), or build the module in the factory as it is to stay"
                )

    def _fault(self, why: str) -> TaskError:
        return TaskError(f"{self._task}{why}")


@dataclass(frozen=True, slots=True, eq=False)
class FlatParameters:
    """Trained parameters and gradients as flat float32 vectors.

    Writing to one changes the module: at once where a tensor computes in float32, and with the next `refresh`
    where it computes in bfloat16. Such a tensor is a view of `compute`: parameters and gradients in bfloat16.
    """

    layout: Layout
    vector: Vector
    gradient: Vector
    views: Views
    compute: tuple[torch.Tensor, torch.Tensor] | None = None

    def refresh(self) -> None:
        """Round the parameters to the dtype in which the module computes."""
        if self.compute:
            self.compute[0].copy_(self.vector)

    def collect(self) -> None:
        """Add the gradients of the last backward pass in bfloat16 to the float32 ones, and set them to zero."""
        if self.compute and len(self.gradient):
            self.gradient.add_(self.compute[1])
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
    named: NamedParameters,
    allocate: Callable[[int], Vector] | None = None,
    resume: bool = False,
    gradients: bool = True,
) -> FlatParameters:
    """Move parameters into flat vectors, in their order. Their values do not change.

    Gradients are views as well: fill their vector with zeros, never set them to None. Without `gradients` they are
    autograd's own, and their vector is empty.
    `views` mends what a user's code does to them.
    """
    parameters = require_trainable(named)
    device = parameters[0][1].device
    layout = layout_of(parameters)
    (size,) = layout.sizes()
    # the dtype is named, because a user's code may have changed torch's default
    vector = torch.empty(size, dtype=torch.float32, device=device) if allocate is None else allocate(size)
    gradient = torch.zeros(size if gradients else 0, dtype=torch.float32, device=device)
    compute = None
    if any(parameter.dtype == torch.bfloat16 for _, parameter in parameters):
        rounded = torch.zeros(size, dtype=torch.bfloat16, device=device)
        compute = (rounded, torch.zeros_like(rounded[: len(gradient)]))
    views, low = [], 0
    for name, parameter in parameters:
        high = low + parameter.numel()
        if not resume:
            vector[low:high].view(parameter.shape).copy_(parameter.detach())
        is_rounded = compute is not None and parameter.dtype != torch.float32
        values, slopes = compute if compute and is_rounded else (vector, gradient)
        value = values[low:high].view(parameter.shape)
        slope = slopes[low:high].view(parameter.shape) if gradients else None
        views.append(View(name, parameter, value, slope, is_rounded))
        low = high
    held = (gradient, compute[1]) if compute else (gradient,)
    flat = FlatParameters(layout, vector, gradient, Views(views, held), compute)
    flat.refresh()
    return flat
