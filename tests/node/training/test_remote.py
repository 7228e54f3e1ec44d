"""The peer's side of a worker that saves, and what follows if the worker dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.runtime.cgroup import SPIN, bounded_spin
from node.tasks.spec import WorkerSpec
from node.training.process import WorkerError, WorkerGone
from node.training.remote import RemoteTrainer
from tests.sim.host import SimCompute


class Worker:
    """A worker that answers; with `dies` it dies instead."""

    def __init__(self, dies: bool = False, hangs: str = "") -> None:
        self.dies, self.hangs, self.asked = dies, hangs, 0
        self.child = SimpleNamespace(send_kill=lambda: None)

    async def ask(self, command: dict[str, Any], memory: Any, on_progress: Callable[..., None]) -> Any:
        self.asked += 1
        if self.dies or self.hangs:
            raise WorkerGone(self.hangs)
        return None


def trainer(worker: Worker | None) -> RemoteTrainer:
    made = RemoteTrainer(cast(WorkerSpec, None), SimCompute())
    parts: dict[str, Any] = {"_worker": worker, "_shared": SimpleNamespace(attention=False)}
    vars(made).update(parts)
    return made


async def test_worker_death_while_saving_raises_worker_error() -> None:
    assert await trainer(Worker()).save(Path("inner")) is True
    made = trainer(Worker(dies=True))
    with pytest.raises(WorkerError, match="died before it had written the inner state"):
        await made.save(Path("inner"))
    assert made.pid is None
    assert await made.save(Path("inner")) is False, "without a worker there is nothing to save"


async def test_command_that_hangs_is_not_repeated() -> None:
    """A worker that is killed by chance is asked again; one that hangs would take as many minutes once more."""
    worker = Worker(hangs="the worker hangs in evaluate")
    made = trainer(worker)

    async def alive() -> bool:
        return True

    vars(made)["_alive"] = alive
    with pytest.raises(WorkerError, match=r"^the worker hangs in evaluate$"):
        await made.evaluate()
    assert worker.asked == 1


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY"])
def test_spin_setting_defaults_unless_user_sets_it(name: str) -> None:
    assert bounded_spin({"PATH": "/bin", name: ""}) == SPIN, "an empty variable counts as not set"
    assert bounded_spin({name: "1"}) == {}
