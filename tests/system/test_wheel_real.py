"""The wheel in an empty environment: it trains beside foreign packages of our names, and leaves only its state."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.installed import JOINS, SECONDS, Installed, make_wheel

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(240)]
TASK = """
import torch
from node.tasks.base import TaskContext

class Adder:
    def __init__(self, context: TaskContext):
        self.module = torch.nn.Linear(8, 1).to(context.device)

    def batch(self, seed, position):
        numbers = torch.randn(8, 8, generator=torch.Generator().manual_seed(position % 2**62))
        return numbers, numbers.sum(1, keepdim=True)

    def loss(self, numbers, sums):
        return torch.nn.functional.mse_loss(self.module(numbers), sums)

    def evaluate(self):
        return float(self.loss(*self.batch(-1, 0)))
"""
RUN = "[recipe]\nrounds = 1\ninner_steps = 3\n"
SCRIPT = """
import pathlib
import torch
from starling_node import Swarm

model, home = torch.nn.Linear(8, 1), pathlib.Path.home() / ".local/state/starling/script"
options = ["--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat"]
with Swarm.start(model, rounds=1, inner_steps=3, state_dir=home, options=options) as swarm:
    while not swarm.step(tokens=1).over:
        pass
print("over")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    sockets = tempfile.mkdtemp(prefix="st-", dir="/tmp")
    yield Installed(tmp_path, sockets)
    assert [*Path(sockets).glob("starling-*")] == []
    shutil.rmtree(sockets)


def test_wheel_trains_beside_foreign_packages_and_leaves_only_its_state(wheel: Path, installed: Installed) -> None:
    assert {name.split("/")[0].partition("-")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"starling_node"}
    before = installed.files()
    installed.pip("install", "--no-index", "--no-deps", str(wheel))
    (installed.work / "node").mkdir()
    for foreign in ("node/__init__.py", "node/__main__.py", "protocols.py"):
        (installed.work / foreign).write_text("raise SystemExit('this is another program')")
    (installed.work / "adder.py").write_text(TASK)
    (installed.work / "script.py").write_text(SCRIPT)
    (installed.work / "run.toml").write_text(RUN)
    assert installed.run("starling", "--version") == f"starling {wheel.name.split('-')[1].replace('_', '.')}\n"

    foreign_first = "import sys, types; sys.modules['node'] = types.ModuleType('node'); import starling_node"
    clash = installed.start("python", "-c", foreign_first).communicate(timeout=SECONDS)[0]
    assert "another module `node` is imported already" in clash

    local = ("--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat")
    founder = installed.start("starling", "join", "--task", "paced", "--rounds", "4", "--wait-for", "2", *local)
    assert founder.stdout
    found = next(filter(None, map(JOINS.search, founder.stdout)), None)
    assert found, f"the founder has ended: {founder.wait(SECONDS)}"
    joiner = installed.run("starling", *found[1].split(), *local)
    said, _ = founder.communicate(timeout=SECONDS)
    assert founder.returncode == 0 and "mean of 2" in said and "mean of 2" in joiner, said + joiner

    own = installed.run("starling", "join", "--run", "run.toml", "--task", "adder:Adder", "--new", *local)
    assert "round 1/1" in own
    assert installed.run("python", "script.py").endswith("over\n")

    installed.pip("uninstall", "--yes", "starling-node")
    assert installed.files() == before
    left = {each.relative_to(installed.home).parts for each in installed.home.rglob("*")}
    assert {parts[:3] for parts in left if len(parts) > 2} == {(".local", "state", "starling")}
