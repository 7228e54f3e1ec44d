"""The peer's side of a worker that saves: how long the disk may take, and what follows if the worker dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.tasks.spec import WorkerSpec
from node.training.process import SPIN, WorkerError, WorkerGone, bounded_spin
from node.training.remote import DISK_SECONDS, RemoteTrainer
from protocols.base import Layout
from tests.sim.host import SimCompute

HUNDRED_MILLION = Layout(((("weight", (10_000, 10_000)),),))


class Worker:
    """A worker that answers; with `dies` it dies instead."""

    def __init__(self, dies: bool = False) -> None:
        self.dies, self.given_seconds = dies, 0.0
        self.child = SimpleNamespace(send_kill=lambda: None)

    async def ask(
        self, command: dict[str, Any], memory: Any, extra_seconds: float, on_progress: Callable[..., None]
    ) -> Any:
        self.given_seconds = extra_seconds
        if self.dies:
            raise WorkerGone
        return None


def trainer(worker: Worker | None) -> RemoteTrainer:
    made = RemoteTrainer(cast(WorkerSpec, None), SimCompute())
    parts: dict[str, Any] = {"layout": HUNDRED_MILLION, "_worker": worker, "_shared": SimpleNamespace(attention=False)}
    vars(made).update(parts)
    return made


async def test_save_deadline_allows_for_the_bytes() -> None:
    worker = Worker()
    assert await trainer(worker).save(Path("inner")) is True
    assert worker.given_seconds == DISK_SECONDS + 800.0, "eight bytes a parameter, at a megabyte a second"


async def test_worker_death_while_saving_raises_worker_error() -> None:
    made = trainer(Worker(dies=True))
    with pytest.raises(WorkerError, match="died before it had written the inner state"):
        await made.save(Path("inner"))
    assert made.pid is None
    assert await made.save(Path("inner")) is False, "without a worker there is nothing to save"


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY"])
def test_spin_setting_defaults_unless_user_sets_it(name: str) -> None:
    assert bounded_spin({"PATH": "/bin", name: ""}) == SPIN, "an empty variable counts as not set"
    assert bounded_spin({name: "1"}) == {}
