"""A user's own task: found, made and tried out; each fault in it gives one line that names the task."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from node.tasks import user_task as own
from node.tasks.base import TaskContext
from node.tasks.name import TaskError
from node.tasks.recipe import Recipe
from node.tasks.spec import OwnValues, WorkerSpec
from node.tasks.user_task import OwnTask, make
from node.training.build import build
from tests.support.paths import documented_task

RECIPE = Recipe(10, 4, learning_rate=3e-3, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=4)
NUMBERS = itertools.count()
GOOD = """
import torch
from torch import nn

class Line:
    def __init__(self, given, width):
        self.module = nn.Linear(width, 1)
        self.width = width

    def batch(self, seed, position):
        draw = torch.Generator().manual_seed(seed + position)
        x = torch.randn(8, self.width, generator=draw)
        return x, x.sum(1, keepdim=True)

    def loss(self, x, y):
        return ((self.module(x) - y) ** 2).mean()

    def evaluate(self):
        return self.loss(*self.batch(1 << 40, 0))

def make(given, width=3):
    return Line(given, width)
"""
WATCHED = """
def make(given, **options):
    global received
    received = given, options
    return _line(given)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def module(directory: Path) -> Callable[[str], str]:
    """Writes a module; gives the name of its factory `make`."""

    def write(source: str) -> str:
        name = f"task_of_mine_{next(NUMBERS)}"
        (directory / f"{name}.py").write_text(source)
        return f"{name}:make"

    return write


def refusal(name: str, **options: bool | int | float | str) -> str:
    with pytest.raises(TaskError) as caught, torch.random.fork_rng():
        make(name, TaskContext(0, options=options)).try_out(5)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and line.startswith(f"task {name}: ") and len(line) < 600
    return line.removeprefix(f"task {name}: ")


def test_documented_example_is_short_and_learns(directory: Path) -> None:
    source = documented_task()
    assert len(source.splitlines()) <= 40
    (directory / "shapes.py").write_text(source)
    spec = WorkerSpec(OwnValues("shapes:shapes", {"width": 16}), RECIPE, 3, 9, device="cpu")
    assert WorkerSpec.from_json(spec.to_json()) == spec
    with torch.random.fork_rng():
        learner, other = build(spec, torch.empty, False).learner, build(spec, torch.empty, False).learner
    assert learner.layout.sizes() == (64 * 16 + 16 + 16 * 10 + 10,)
    assert torch.equal(learner.vector, other.vector), "torch's generator was seeded"
    before = learner.evaluate()
    tokens = sum(learner.step(step // 10, step % 10).tokens for step in range(60))
    assert tokens == 60 * 32 and before > 2 and learner.evaluate() < 0.8 * before


def test_task_of_the_readme_learns(directory: Path) -> None:
    source = documented_task("README.md")
    assert len(source.strip().splitlines()) <= 20
    (directory / "adder.py").write_text(source)
    with torch.random.fork_rng():
        learner = build(WorkerSpec(OwnValues("adder:Adder"), RECIPE, 3, 9, device="cpu"), torch.empty, False).learner
    before = learner.evaluate()
    for step in range(40):
        learner.step(step // 10, step % 10)
    assert learner.evaluate() < before


def test_options_and_context_reach_the_factory(module: Callable[[str], str], directory: Path) -> None:
    name = module(f"{GOOD}\n_line = make\n{WATCHED}")
    given = TaskContext(7, "cpu", directory / "data", {"a": True, "b": "x"})
    with torch.random.fork_rng():
        task = make(name, given)
    assert sys.modules[name.partition(":")[0]].received == (given, {"a": True, "b": "x"})
    task.try_out(1)
    assert math.isfinite(task.evaluate()) and not torch.is_inference(task.module.get_parameter("weight"))


def test_file_in_current_directory_does_not_shadow_libraries(directory: Path) -> None:
    (directory / "random.py").write_text(GOOD)
    assert "has no function make" in refusal("random:make") and sys.path[-1] == str(directory)


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "absent_module:make",
            "there is no module absent_module on this machine, and code never comes from peers: put",
        ),
        ("os.absent:make", "there is no module os.absent on this machine"),
        ("xml.absent:make", "there is no module xml.absent on this machine"),
        ("math:absent", "has no function absent"),
        ("math:pi", "has no function pi"),
        ("math:floor", "the factory does not accept the run's options: "),
    ],
)
def test_missing_task_or_factory_gives_one_line_error(name: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(name, x=1)


@pytest.mark.parametrize(
    "change, words",
    [
        (("import torch\n", "import torch, no_such_library\n"), "importing MODULE: ModuleNotFoundError: No module"),
        (("import torch\n", "1 / 0\n"), "importing MODULE: ZeroDivisionError: division by zero"),
        (("import torch\n", "import torch torch\n"), "importing MODULE: SyntaxError: "),
        (("import torch\n", "import sys; sys.exit(3)\n"), "importing MODULE: SystemExit: 3"),
        (("    return Line", "    raise KeyError('a\\nb')\n    return Line"), "the factory: KeyError: 'a\\nb'"),
        (("    return Line", "    raise ValueError('x' * 9999)\n    return Line"), "the factory: ValueError: xxx"),
        (("nn.Linear(width, 1)", "nn.Linear(width, 1).double()"), "parameter weight is torch.float64 on cpu: float32"),
        (("nn.Linear(width, 1)", "nn.Linear(width, 1, device='meta')"), "the module is on meta, not on the device"),
        (("nn.Linear(width, 1)", "nn.Linear(width, 1).requires_grad_(False)"), "the module has no parameters to train"),
        (("    def eval", "    def trained(self): return [('w', torch.ones(1).int())]\n    def eval"), "parameter w"),
        (("    def eval", "    def targets(self, batch): return -1\n    def eval"), "targets() must return"),
        (("    def eval", "    independent_rows = 99\n    def eval"), "independent_rows is 99, and the"),
        (("    def eval", "    independent_rows = 0\n    def eval"), "independent_rows must be a whole number"),
        (("nn.Linear(width, 1)", "3"), "the factory's result, a Line, lacks module, a torch module"),
        (("def evaluate", "def assess"), "the factory's result, a Line, lacks evaluate"),
        (("return Line(given, width)", "return None"), "a NoneType, lacks batch, loss, evaluate"),
        (("return x, x.sum(1, keepdim=True)", "1 / 0"), "batch(): ZeroDivisionError"),
        (("return x, x.sum(1, keepdim=True)", "return x"), "batch() must return a tuple of tensors"),
        (("return x, x.sum(1, keepdim=True)", "return x, 3"), "batch() must return a tuple of tensors"),
        (("return x, x.sum(1, keepdim=True)", "return x, x[:0]"), "batch() must return a tuple of tensors"),
        (("generator=draw", ""), "batch() gave different batches for the same seed and position"),
        (("** 2).mean()", "** 2)"), "loss() must return a tensor without dimensions that depends"),
        (("** 2).mean()", "** 2).mean().item()"), "loss() must return a tensor without dimensions that depends"),
        (("** 2).mean()", "** 2).mean().detach()"), "loss() must return a tensor without dimensions that depends"),
        (("self.module(x) - y", "self.module(x[:, 1:]) - y"), "loss(): RuntimeError: mat1 and mat2"),
    ],
)  # fmt: skip
def test_faulty_task_gives_one_line_error(
    change: tuple[str, str], words: str, module: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    source = GOOD.replace(*change, 1)
    assert source != GOOD
    name = module(source)
    assert words.replace("MODULE", name.partition(":")[0]) in refusal(name)
    raised = "Error" in words or "SystemExit" in words
    assert ("Traceback" in capfd.readouterr().err) == raised, "in the log there is the traceback of what was raised"


def test_device_may_have_a_number(module: Callable[[str], str]) -> None:
    on_given = module(GOOD.replace("nn.Linear(width, 1)", "nn.Linear(width, 1, device=given.device)"))
    elsewhere = module(GOOD.replace("nn.Linear(width, 1)", "nn.Linear(width, 1, device='meta')"))
    for name in ("cpu", "cpu:0", "meta"):
        make(on_given, TaskContext(0, name))
    with pytest.raises(TaskError, match="the module is on meta, not on the device that was given: meta:1"):
        make(elsewhere, TaskContext(0, "meta:1"))


def test_too_large_layout_is_rejected(module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "MAX_ELEMENTS", 3)
    assert "the module has 4 parameters, more than 3" in refusal(module(GOOD))
    monkeypatch.setattr(own, "MAX_ELEMENTS", 4)
    monkeypatch.setattr(own, "MAX_TENSORS", 1)
    assert "2 parameter tensors, names of 6: at most 1" in refusal(module(GOOD))


def test_later_failure_names_the_task(module: Callable[[str], str]) -> None:
    name = module(GOOD.replace("draw = ", "assert position < 3, 'no more'; draw = "))
    learner = build(WorkerSpec(OwnValues(name), RECIPE, 3, device="cpu"), torch.empty, False).learner
    for step in range(3):
        learner.step(0, step)
    with pytest.raises(TaskError, match=rf"^task {name}: batch\(\): AssertionError: no more$"):
        learner.step(0, 3)


def test_try_out_accepts_nan_inputs(module: Callable[[str], str]) -> None:
    task = make(module(GOOD.replace("return x, x.sum", "x[0] = float('nan'); return x, x.sum")), TaskContext(0))
    assert isinstance(task, OwnTask)
    task.try_out(1)


LOSS = "return ((self.module(x) - y) ** 2).mean()"
QUIET = GOOD.replace("return self.loss(*", "torch.set_grad_enabled(False); return len(")
"""Its evaluation takes no loss, and leaves gradients switched off."""


def trained(name: str, batches: int) -> torch.Tensor:
    """The parameters after three steps and an evaluation between them."""
    recipe = replace(RECIPE, batches=batches, mean="token")
    with torch.random.fork_rng():
        learner = build(WorkerSpec(OwnValues(name), recipe, 3, device="cpu"), torch.empty, False).learner
    for step in range(3):
        assert learner.step(0, step).tokens
        assert math.isfinite(learner.evaluate())
    return learner.vector


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(
    "before",
    [
        "self.module.zero_grad()",
        "self.module.weight.grad = torch.zeros(1, 3)",
        "self.module.bias.data = self.module.bias.data.clone()",
        "self.module.double().float()",
        "self.module.load_state_dict({**self.module.state_dict()})",
        "torch.autograd.grad(self.module(x).sum(), self.module.weight)",
        "torch.set_grad_enabled(True)",
        "self.module.weight.register_hook(lambda slope: slope.clone())",
        "self.module.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', p.grad.clone()))",
        "self.module.eval()",
    ],
)
def test_mended_loss_trains_like_a_plain_one(before: str, batches: int, module: Callable[[str], str]) -> None:
    changed = QUIET.replace(LOSS, f"{before}; {LOSS}")
    assert torch.equal(trained(module(changed), batches), trained(module(GOOD), batches))


@pytest.mark.parametrize(
    "moved, in_place",
    [
        (
            "self.module.weight.data = self.module.weight.data.clamp(-0.1, 0.1)",
            "self.module.weight.data.clamp_(-0.1, 0.1)",
        ),
        (
            "self.module.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', p.grad.sign()))",
            "self.module.weight.register_post_accumulate_grad_hook(lambda p: [p.grad.sign_()] and None)",
        ),
    ],
)
def test_moved_values_and_gradients_count(moved: str, in_place: str, module: Callable[[str], str]) -> None:
    one, other = (module(QUIET.replace(LOSS, f"{before}; {LOSS}")) for before in (moved, in_place))
    assert torch.equal(trained(one, 1), trained(other, 1))
    assert not torch.equal(trained(one, 1), trained(module(GOOD), 1))


def test_task_may_change_torchs_default_dtype(module: Callable[[str], str]) -> None:
    change = "torch.set_default_dtype(torch.float64); self.module = nn.Linear(width, 1, dtype=torch.float32)"
    name = module(
        GOOD.replace("self.module = nn.Linear(width, 1)", change).replace(LOSS, f"x, y = x.float(), y.float(); {LOSS}")
    )
    allocate = partial(torch.empty, dtype=torch.float32)
    try:
        with torch.random.fork_rng():
            learner = build(WorkerSpec(OwnValues(name), RECIPE, 3, device="cpu"), allocate, False).learner
        assert learner.step(0, 0).tokens and learner.vector.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_backward_in_loss_may_be_cleared(module: Callable[[str], str]) -> None:
    """As in sharpness-aware minimisation, which differentiates twice."""
    for clear in ("self.module.zero_grad()", "self.module.zero_grad(set_to_none=False)"):
        name = module(QUIET.replace(LOSS, f"self.module(x).sum().backward(); {clear}; {LOSS}"))
        assert torch.equal(trained(name, 1), trained(module(GOOD), 1))
        with pytest.raises(TaskError, match=rf"^task {name}: loss\(\) erases gradients of the step's earlier batches"):
            trained(name, 2)


@pytest.mark.parametrize(
    "before, words",
    [
        ("self.module.weight = nn.Parameter(self.module.weight.detach().clone())", "parameter weight was replaced"),
        ("self.module.load_state_dict(nn.Linear(3, 1).state_dict(), assign=True)", "parameter weight was replaced"),
        ("self.module(x).sum().backward()", "loss() leaves gradients behind, which would count twice"),
        ("self.module.bias.grad = torch.ones(1)", "loss() leaves gradients behind, which would count twice"),
        ("self.module.half(); x = x.half()", "loss() has changed parameter weight to torch.float16, (1, 3) on cpu"),
        ("self.module.bias.data = torch.ones(8, 1)", "loss() has changed parameter bias to torch.float32, (8, 1)"),
        ("x.requires_grad_(); return x.sum()", "loss() must return a tensor without dimensions that depends on"),
    ],
)
def test_views_that_cannot_be_mended_refuse_the_task(
    before: str, words: str, module: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(module(GOOD.replace(LOSS, f"{before}; {LOSS}")))
