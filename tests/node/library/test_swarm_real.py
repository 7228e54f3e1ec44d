"""Scripts with a loop of their own beside a peer that trains the same model as a task: real processes, and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPOSITORY
from tests.support.real_swarm import LISTEN, START_SECONDS, RealPeer, RealSwarm, wait

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(400)]
MODEL = """
import time
import torch
from torch import nn

TARGET = torch.randn(8, 1, generator=torch.Generator().manual_seed(7))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(generator):
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, torch.tanh(inputs @ TARGET)


class Task:
    def __init__(self):
        self.module = model()

    def batch(self, seed, position):
        return batch(torch.Generator().manual_seed(seed * 1000003 % 2**62 + position))

    def loss(self, inputs, targets):
        time.sleep(0.03)
        return (self.module(inputs) - targets).square().mean()

    def evaluate(self):
        with torch.no_grad():
            inputs, targets = batch(torch.Generator().manual_seed(1))
            return float((self.module(inputs) - targets).square().mean())


def make(given):
    return Task()
"""
SCRIPT = """
import mlp, torch
from node.library import Swarm

task = mlp.Task()
optimizer = torch.optim.AdamW(task.module.parameters(), lr=3e-3)
with Swarm.join(task.module, optimizer, evaluate=task.evaluate) as swarm:
    for step in range(1_000_000):
        loss = task.loss(*task.batch(torch.initial_seed() % 1000, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if swarm.step(tokens=16, loss=loss).over:
            break
"""
RUN = """
task = "mlp:make"
fork = "never"
[recipe]
inner_steps = 20
rounds = 10000
learning_rate = 3e-3
"""


class Script:
    """A process that runs a user's script, and the peer in `directory` that it starts or attaches to."""

    def __init__(self, swarm: RealSwarm, name: str, variables: dict[str, str]) -> None:
        self.peer: RealPeer = swarm.peer(name)
        self._log = swarm.home / f"{name}.script.log"
        self._environment = {**os.environ, **self.peer.mark, **variables, "PYTHONPATH": f"{REPOSITORY}:{swarm.home}"}
        self._script = swarm.home / "train.py"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, str(self._script)]
            # in the background of a shell the tests ignore SIGINT, and so would the script
            listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            self.process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, cwd="/", preexec_fn=listen
            )

    def strike(self, number: int) -> float:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
        return time.time()

    def said(self) -> str:
        return self._log.read_text(errors="replace")


def rounds(peer: RealPeer, since: float) -> list[Any]:
    return [each for each in peer.reports() if each["time"] > since]


def test_scripts_and_a_task_agree_through_kills_and_stops(tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)

    def prepare(peer: RealPeer) -> None:
        peer.environment["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), str(tmp_path)))

    with RealSwarm(tmp_path, RUN, prepare) as swarm:
        a = swarm.found("a")
        own = {"NODE_LISTEN": LISTEN, "NODE_NAT": "false", "NODE_BOOTSTRAP": a.address}
        b = Script(swarm, "b", {**own, "NODE_STATE_DIR": str(tmp_path / "b")})
        wait("the script is in a mean with the task", lambda: b.peer.meet() and two(swarm, a, b), START_SECONDS)

        # Killed, and started again: it goes on from the swarm's state, and the other has lost no round.
        killed = b.strike(signal.SIGKILL)
        wait("its peer leaves", lambda: not b.peer.left(), 20)
        assert all(each["outcome"] != "undecided" for each in rounds(a, killed)), "the other loses no round"
        b.start()
        started = time.time()
        wait("it is in a mean again", lambda: b.peer.meet() and two(swarm, a, b, started), START_SECONDS)
        assert "a peer runs in" not in b.said().splitlines()[-1]

        # Stopped as in a debugger: the others do not wait, and it comes back by itself.
        stopped = b.strike(signal.SIGSTOP)
        wait("the other's rounds go on", lambda: len(rounds(a, stopped + 15)) > 2, 60)
        longest = max(each["seconds_train"] for each in rounds(a, stopped))
        assert longest < 40, f"the other waited {longest} s"
        back = b.strike(signal.SIGCONT)
        wait("it is in a mean again", lambda: two(swarm, a, b, back), START_SECONDS)

        # A peer that a script attaches to: it stays without the script.
        c = swarm.peer("c").start("--bootstrap", a.address, "--own-loop", threads=False)
        wait("it says how", lambda: f"attach='{c.directory}'" in c.said(), 20)
        attached = Script(swarm, "c", {"NODE_ATTACH": str(c.directory)})
        wait("three are in one mean", lambda: c.meet() and swarm.all_in_one_mean([a, b.peer, c]), START_SECONDS)
        killed = attached.strike(signal.SIGKILL)
        wait("two go on, and the third has their means", lambda: len(rounds(c, killed + 1)) > 2, 60)
        assert c.running
        attached.start()
        started = time.time()
        wait("three are in one mean again", lambda: swarm.all_in_one_mean([a, b.peer, c], started), START_SECONDS)
        for each in (b, attached):
            each.strike(signal.SIGINT)
            assert each.process.wait(30) != 0
            assert "KeyboardInterrupt" in each.said()
        wait("the peer that the script started has left", lambda: not b.peer.left(), 5)


def two(swarm: RealSwarm, a: RealPeer, b: Script, since: float = 0.0) -> Any:
    return swarm.all_in_one_mean([a, b.peer], since)
