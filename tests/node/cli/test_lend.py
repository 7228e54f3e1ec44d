"""What the user of a machine that lends its devices reads when its ranks have ended."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from node.cli import lend
from node.cli.remote import CommandError
from node.config.peer_config import PeerConfig
from node.ranks import lent
from node.tasks.recipe import Recipe
from node.tasks.spec import OwnValues, WorkerSpec


def test_each_end_of_the_ranks_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    codes = iter((0, 1, -9, lent.DECLINED, lent.OVER))

    async def reach(_: PeerConfig) -> socket.socket:
        return socket.socket()

    async def ranks(*_: Any) -> int:
        return next(codes)

    monkeypatch.setattr(lend, "_reach", reach)
    monkeypatch.setattr(lend, "_ranks", ranks)
    config = replace(PeerConfig(), nodes=2, node=1, rendezvous="10.0.0.5:29400")
    with pytest.raises(CommandError, match="machine 1 of 2 does not take part in this run"):
        asyncio.run(lend._lend(config, "", ("cpu",)))
    assert asyncio.run(lend._lend(config, "", ("cpu",))) == 0
    said = [each.removeprefix("starling: machine 1 of 2: ") for each in capsys.readouterr().err.splitlines()[2:5]]
    assert [each.partition(";")[0] for each in said] == [
        "machine 0's worker has ended",
        "its ranks have failed",
        "its first rank was killed by signal 9",
    ]


def test_own_task_without_consent_is_declined(capfd: pytest.CaptureFixture[str]) -> None:
    spec = WorkerSpec(OwnValues("theirs.task"), Recipe(1, 1, 1e-3, 0.9, 0.5), 0)
    own = {"devices": ["cpu"], "data": "", "threads": 1, "nice": 0, "task": ""}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(json.dumps({"begin": {"machines": {}, "spec": spec.to_json()}}).encode() + b"\n")
        assert lent._serve(theirs, own) == lent.DECLINED
        assert "agree to its code by --task theirs.task" in json.loads(ours.recv(1 << 16))["refused"]
    assert "agree to its code by --task theirs.task" in capfd.readouterr().err
