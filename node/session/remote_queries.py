"""What a process asks running peers without taking part in their run: a status, or the model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from node.export.fetching import fetch_state, fetchable
from node.joining.bootstrap import RunInfo, ask_run, ask_status
from node.joining.run_selector import run_id
from node.joining.state_download import INCARNATION
from node.membership.pass_exchange import NotAdmitted, PassExchange
from node.network.dht import DhtDirectory
from node.network.libp2p import LibP2PTransport
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from node.runtime.identity import create
from node.runtime.proxies import dialled_directly
from node.session.fatal import FatalPeerError, NotInvited
from node.session.private_run import visitors_access
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, Host, Member, PeerError, PeerId, StaticMembers

T = TypeVar("T")

ANSWER_SECONDS = 10.0


def _show_pass(transport: LibP2PTransport, member: Path | None) -> PassExchange:
    """Visit a private run, with passes that the key of the state directory `member` signs; None: only open runs."""
    clock = WallClock()
    access = visitors_access(member, transport.me, clock) if member else PassExchange(transport.me, clock.wall)
    access.serve(transport)
    transport.restrict(access)
    return access


async def remote_status(address: str, member: Path | None = None) -> dict[str, Any]:
    """Ask the peer at a multiaddr for its status, under an identity that exists only for this request.

    `member`: the state directory of a member of its private run.
    """
    with tempfile.TemporaryDirectory() as directory:
        identity = create(Path(directory) / "identity.key")
        async with LibP2PTransport(identity) as transport:
            _show_pass(transport, member)
            return (await _ask_at(transport, address, ask_status))[1]


async def fetch_model(
    addresses: Sequence[str],
    directory: Path,
    say: Callable[[str], None],
    base: str | None = None,
    member: Path | None = None,
) -> list[Path]:
    """Fetch the newest state that the peers at these multiaddrs serve; `say` is told of those that do not answer.

    `member` is as for `remote_status`.
    """
    identity, clock = create(directory / "identity.key"), WallClock()
    async with ThreadCompute() as compute, LibP2PTransport(identity) as transport:
        access = _show_pass(transport, member)
        answers = await _ask_each(transport, addresses, say)
        run = await compute.run(partial(fetchable, next(iter(answers.values())).sealed, base), 0)
        if any(run_id(each.sealed) != run.manifest.run_id for each in answers.values()):
            raise FatalPeerError("these addresses lead into different runs: give addresses of one run only")
        members = StaticMembers([Member(identity.peer_id, INCARNATION)])
        directory_of_run = DhtDirectory(transport, identity, clock, bytes.fromhex(run.manifest.run_id))  # not entered
        seed, removed = run.manifest.config.seed, access.has_removed
        host = Host(transport, directory_of_run, members, compute, clock, identity, seed, removed)
        return await fetch_state(host, run, list(answers), directory)


async def _ask_each(
    transport: LibP2PTransport, addresses: Sequence[str], say: Callable[[str], None]
) -> dict[PeerId, RunInfo]:
    """Ask the peers at these multiaddrs which run they are in: peer -> its answer."""

    async def one(address: str) -> tuple[PeerId, RunInfo] | FatalPeerError:
        try:
            return await _ask_at(transport, address, ask_run)
        except FatalPeerError as error:
            return error

    results = await asyncio.gather(*map(one, dict.fromkeys(addresses)))
    failed = [each for each in results if isinstance(each, FatalPeerError)]
    answers = dict(each for each in results if not isinstance(each, FatalPeerError))
    if not answers:
        raise failed[0]
    for each in failed:
        say(str(each))
    return answers


async def _ask_at(
    transport: LibP2PTransport, address: str, ask: Callable[[LibP2PTransport, PeerId, Deadline], Awaitable[T]]
) -> tuple[PeerId, T]:
    """Ask the peer at a multiaddr, and return its id and its answer."""
    deadline = loop_time() + ANSWER_SECONDS
    try:
        peer = await transport.connect(address, deadline)
        return peer, await ask(transport, peer, deadline)
    except NotAdmitted as error:
        raise NotInvited(f"{address}: {error.why}") from None
    except PeerError as error:
        raise FatalPeerError("; ".join(filter(None, (f"{address}: {error.why}", dialled_directly())))) from None
    except (BadPayload, ValueError) as error:
        raise FatalPeerError(f"{address}: {error}") from None
