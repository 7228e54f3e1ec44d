"""The peer's side of a worker that saves: how long a disk may take over it, and what a death in between comes to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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


class Life:
    """A worker that is asked; `dies`: instead of an answer."""

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


def trainer(life: Life | None) -> RemoteTrainer:
    made = RemoteTrainer(cast(WorkerSpec, None), SimCompute())
    parts: dict[str, Any] = {"layout": HUNDRED_MILLION, "_worker": life, "_shared": SimpleNamespace(attention=False)}
    vars(made).update(parts)
    return made


def run(asked: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asked()

    return asyncio.run(main())


def test_save_deadline_allows_for_the_bytes() -> None:
    life = Life()
    assert run(lambda: trainer(life).save(Path("inner"))) is True
    assert life.given_seconds == DISK_SECONDS + 800.0, "eight bytes a parameter, at a megabyte a second"


def test_worker_death_while_saving_raises_worker_error() -> None:
    made = trainer(Life(dies=True))
    with pytest.raises(WorkerError, match="died before it had written the inner state"):
        run(lambda: made.save(Path("inner")))
    assert made.pid is None


def test_save_without_worker_does_nothing() -> None:
    assert run(lambda: trainer(None).save(Path("inner"))) is False


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY"])
def test_spin_setting_defaults_unless_user_sets_it(name: str) -> None:
    assert bounded_spin({"PATH": "/bin", name: ""}) == SPIN, "an empty variable counts as not set"
    assert bounded_spin({name: "1"}) == {}
