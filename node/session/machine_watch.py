"""Lets a peer follow its user's pauses and its machine's rules while it takes part in a run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from node.config.derived import machine_rules
from node.config.peer_config import PeerConfig
from node.machine.monitor import MachineMonitor, TrafficQuota
from node.machine.sleep import SleepGuard
from node.session.pausing import PauseController
from protocols.aio import task_group
from protocols.base import Compute


async def watch_machine(
    config: PeerConfig,
    pauses: PauseController,
    quota: TrafficQuota | None,
    files: Compute,
    save: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Pause, resume and save the work as the user and the machine wish, until cancelled.

    Args:
        files: runs what blocks.
        save: writes a checkpoint; called before the machine sleeps.
    """
    monitor = MachineMonitor(machine_rules(config), files, pauses.wish, quota)
    async with task_group() as group:
        for each in (pauses.run(), monitor.run(), SleepGuard(save).run()):
            group.create_task(each)
