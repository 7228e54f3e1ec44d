"""What a call over libp2p comes to, given p2pd's answers to its dials; p2pd itself is scripted."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from node.network.daemon_connection import LINK_ERRORS
from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from protocols.base import PeerGone


class Scripted:
    """A link whose dials end with `ends`, one after another: p2pd's error, or nothing when the dial succeeds."""

    def __init__(self, *ends: str) -> None:
        self.ends = list(ends)

    async def connect(self, *_: object) -> None:
        if words := self.ends.pop(0):
            raise LINK_ERRORS[0](words)

    stream = connect


CROSSING = "* [/ip4/10.0.0.2/tcp/4001] failed to negotiate security protocol: noise: message is too short"
REFUSAL = "* [/ip4/10.0.0.2/tcp/4001] connect: connection refused"
WAITING = "* [/ip4/10.0.0.2/tcp/4001] dial backoff"
UNHEARD = "* [/ip4/10.0.0.3/tcp/4001] i/o timeout"


def transport_over(tmp_path: Path, *ends: str) -> LibP2PTransport:
    transport = LibP2PTransport(identity.create(tmp_path / "a"))
    transport._link = cast(Any, Scripted(*ends))
    transport._up.set()
    return transport


async def call(transport: LibP2PTransport, opened: bool, gone: str | None, left: int = 0) -> None:
    link, where = cast(Any, transport._link), "" if opened else "/ip4/10.0.0.2/tcp/4001"
    call = transport._calling(
        "p01",
        asyncio.get_running_loop().time() + 20.0,
        lambda link, seconds: link.connect("p01", where, seconds),
        where,
    )
    with pytest.raises(PeerGone, match=gone) if gone else nullcontext():
        await call
    assert len(link.ends) == left


@pytest.mark.parametrize(
    ("ends", "opened", "gone"),
    [
        ([CROSSING, WAITING, WAITING, ""], True, None),
        ([CROSSING, WAITING, REFUSAL], True, "nothing listens there"),
        ([f"{REFUSAL}\n{CROSSING}", ""], True, None),
        ([f"{CROSSING}\n{UNHEARD}", f"{WAITING}\n{UNHEARD}", ""], True, None),
        ([WAITING], True, "failed a moment ago"),
        ([WAITING, ""], False, None),
        ([REFUSAL], False, "nothing listens there"),
    ],
)
def test_crossed_dials_are_retried(tmp_path: Path, ends: list[str], opened: bool, gone: str | None) -> None:
    asyncio.run(call(transport_over(tmp_path, *ends), opened, gone))


def test_crossed_dials_are_forgotten_after_a_success(tmp_path: Path) -> None:
    async def body() -> None:
        transport = transport_over(tmp_path, CROSSING, "", WAITING)
        await call(transport, False, None, left=1)
        await call(transport, True, "failed a moment ago")

    asyncio.run(body())
