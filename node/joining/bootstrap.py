"""Bootstrap client and server: a joiner asks peers at known addresses which run they are in.

The client tries all addresses in parallel. If an address fails, it prints the cause once and retries with increasing
delays until another address has led to the run. It does not retry an address that leads into another run. It reads a
file of addresses again and again, and tries those that the file holds then. For addresses from a file, and for those
of peers met before, one line counts the causes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from node.config.manifest import ManifestError
from node.config.multiaddrs import FILE_SIGN
from node.joining.addresses_file import AddressLine
from node.membership.hello import (
    BOOTSTRAP_METHOD,
    MAX_STATUS_BYTES,
    MAX_SUMMARY_BYTES,
    PortsProbed,
    ProbePorts,
    RunReply,
    StageRejected,
    StageReply,
    StatusReply,
    WantRun,
    WantStage,
    WantStageBefore,
    WantStatus,
    WantSummary,
)
from node.membership.membership import Membership
from node.membership.pass_exchange import NotAdmitted
from node.reporting.status import Status, brief, parse, to_json
from protocols import wire
from protocols.aio import peer_timeout, task_group
from protocols.base import BadPayload, Deadline, Header, PeerError, PeerId, Stream, Transport

log = logging.getLogger(__name__)

ATTEMPT_SECONDS = 8.0
ASK_SECONDS = 5.0
TRANSFER_SECONDS = 60.0
PAUSE_SECONDS = (1.0, 2.0, 5.0, 10.0)
READ_SECONDS = 1.0
LATER_SECONDS = 10.0
"""Pause between two reads of a file of addresses, once the run is found; until then it is `READ_SECONDS`."""

_WAITS = "; waiting for addresses in it"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a joiner gets of a run: the manifest in its founder's envelope, and held-out text to evaluate on, if any."""

    sealed: bytes
    sample: bytes


AssignStage: TypeAlias = Callable[[PeerId, WantStage | WantStageBefore], Awaitable[StageReply | StageRejected]]
"""(peer that sent the request, request) -> answer."""
ProbeForPeer: TypeAlias = Callable[[PeerId, ProbePorts], Awaitable[PortsProbed]]
"""The same."""


class BootstrapServer:
    def __init__(
        self,
        transport: Transport,
        run: RunInfo,
        status: Callable[[], dict[str, Any]],
        assign: AssignStage | None = None,
        probe: ProbeForPeer | None = None,
    ) -> None:
        self._run, self._status, self._assign, self._probe = run, status, assign, probe
        transport.serve(BOOTSTRAP_METHOD, self._serve)

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        async with peer_timeout(ASK_SECONDS, peer, "it asks"):
            request = await stream.receive(wire.MAX_HEADER_BYTES)
        async with peer_timeout(TRANSFER_SECONDS, peer, "it receives an answer"):
            match request:
                case WantRun():
                    run = self._run
                    await stream.send(RunReply(len(run.sealed), len(run.sample)), run.sealed + run.sample)
                case WantStatus() | WantSummary():
                    status = self._status()
                    data = _bounded(brief(status) if isinstance(request, WantSummary) else status)
                    await stream.send(StatusReply(len(data)), data)
                case WantStage() | WantStageBefore() if self._assign:
                    await stream.send(await self._assign(peer, request))
                case ProbePorts() if self._probe:
                    await stream.send(await self._probe(peer, request))
                case _:
                    raise BadPayload(f"{type(request).__name__} is not a bootstrap request")


def _bounded(status: dict[str, Any]) -> bytes:
    """A status in JSON, short enough to be sent: peers are left out if there are too many."""
    while len(data := to_json(status).encode()) > MAX_STATUS_BYTES and status["peers"]:
        status = status | {"peers": status["peers"][: len(status["peers"]) // 2]}
    return data


async def ask_run(transport: Transport, peer: PeerId, deadline: Deadline) -> RunInfo:
    """Ask a peer which run it is in. The answer is not verified here."""
    async with transport.open(peer, BOOTSTRAP_METHOD, deadline) as stream:
        await stream.send(WantRun())
        answer = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), RunReply)
        data = bytearray(answer.manifest_bytes + answer.sample_bytes)
        await stream.receive_into(memoryview(data))
    return RunInfo(bytes(data[: answer.manifest_bytes]), bytes(data[answer.manifest_bytes :]))


async def ask_status(transport: Transport, peer: PeerId, deadline: Deadline) -> dict[str, Any]:
    return await _ask_status(transport, peer, WantStatus(), MAX_STATUS_BYTES, deadline)


async def ask_summary(transport: Transport, peer: PeerId, deadline: Deadline) -> Status:
    """Ask a peer for its status without other peers. Raises `PeerError`, and `BadPayload` for one that is not valid."""
    data = await _ask_status(transport, peer, WantSummary(), MAX_SUMMARY_BYTES, deadline)
    try:
        return parse(data)
    except ValueError as error:
        raise BadPayload(str(error)) from None


async def _ask_status(
    transport: Transport, peer: PeerId, request: Header, most_bytes: int, deadline: Deadline
) -> dict[str, Any]:
    async with transport.open(peer, BOOTSTRAP_METHOD, deadline) as stream:
        await stream.send(request)
        answer = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), StatusReply)
        if answer.size > most_bytes:
            raise BadPayload(f"a status of {answer.size} bytes, where at most {most_bytes} are allowed")
        data = bytearray(answer.size)
        await stream.receive_into(memoryview(data))
    try:
        status = json.loads(data)
    except (ValueError, RecursionError):
        raise BadPayload("a status that is not JSON") from None
    if not isinstance(status, dict):
        raise BadPayload("a status that is not an object")
    return status


async def reach(
    connect: Callable[[str, Deadline], Awaitable[PeerId]], peer: PeerId, addresses: Sequence[str], deadline: Deadline
) -> None:
    """Connect to a peer at the first of its addresses that works. If none does, libp2p may still find a route."""
    tries = [asyncio.ensure_future(connect(f"{address}/p2p/{peer}", deadline)) for address in addresses]
    try:
        for each in asyncio.as_completed(tries):
            with suppress(PeerError, ValueError):
                await each
                return
    finally:
        for left in tries:
            left.cancel()


def add_candidates(membership: Membership) -> Callable[[Sequence[str]], None]:
    """A callback for the multiaddrs in a file of addresses: it has them tried while no other peer is live."""

    def add(addresses: Sequence[str]) -> None:
        if len(membership.live()) > 1:
            return
        for where, _, peer in (each.rpartition("/p2p/") for each in addresses):
            membership.add_candidate(peer, (where,))

    return add


class _Refusals:
    """Addresses of one source, reported in one line once all of them have failed."""

    def __init__(self, what: str, addresses: Iterable[str]) -> None:
        self._what, self._left, self._causes = what, set(addresses), Counter[str]()

    def failed(self, address: str, why: str) -> str:
        """Returns the line if this was the last address to fail."""
        if address not in self._left:
            return ""
        self._left.remove(address)
        self._causes[re.split("[:,;]", why.removeprefix("cannot be reached: "))[0]] += 1
        causes = ", ".join(f"{number} × {cause}" for cause, number in self._causes.most_common())
        return "" if self._left else f"{self._what} could be used: {causes} (retrying)"


class BootstrapClient:
    """Tries addresses until one has led to the run, and each address at least once. An async context manager."""

    def __init__(
        self,
        connect: Callable[[str, Deadline], Awaitable[PeerId]],
        ask: Callable[[PeerId, Deadline], Awaitable[RunInfo]],
        judge: Callable[[RunInfo], None],
        say: Callable[[str], None],
        read: Callable[[Path], Awaitable[AddressLine | str]],
        hint: str = "",
    ) -> None:
        """`judge` raises a ValueError for a run that is not the one to join; `read` returns a file's content, or a
        reason.
        """
        self.met: dict[PeerId, str] = {}  # peer that answered -> address that led to it
        self.named: dict[str, tuple[str, ...]] = {}  # file of addresses -> those that it held when it was read last
        self.on_named: Callable[[Sequence[str]], None] = lambda addresses: None  # called after each reading of a file
        self._read = read
        self._connect, self._ask, self._judge, self._say = connect, ask, judge, say
        self._exit = AsyncExitStack()
        self._tries: dict[str, asyncio.Task[None]] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._given_up, self._stopped = 0, False
        self._hint = hint

    async def __aenter__(self) -> Self:
        self._found: asyncio.Future[RunInfo] = asyncio.get_running_loop().create_future()
        self._group = await self._exit.enter_async_context(task_group())
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        self.stop()
        for each in self._readers:
            each.cancel()
        return await self._exit.__aexit__(*error)

    async def find(self, addresses: Sequence[str], remembered: Collection[str] = ()) -> RunInfo:
        """Return the run as soon as one address, or one in a file (@ and its path), has led to it.

        `remembered` are those of the addresses that the user did not give. Raises `ManifestError` if all addresses are
        of other runs, and there is no file that could add more.
        """
        for each in dict.fromkeys(addresses):
            if each.startswith(FILE_SIGN):
                self._readers.append(self._group.create_task(self._follow(each)))
        self._begin([each for each in addresses if each not in remembered and not each.startswith(FILE_SIGN)])
        self._begin(remembered, f"none of the {len(remembered)} addresses of peers met before")
        return await asyncio.shield(self._found)

    def stop(self) -> None:
        self._stopped = True
        for each in self._tries.values():
            each.cancel()

    async def _follow(self, source: str) -> None:
        """Read a file again and again. Try its addresses until the run is found."""
        mine: set[str] = set()
        reported = ""
        while True:
            content = await self._read(Path(source.removeprefix(FILE_SIGN)))
            if isinstance(content, AddressLine):
                self.named[source] = content.addresses
            named = self.named.get(source, ())
            if seeks := not (self._found.done() or self._stopped):
                for address in mine.difference(named):  # the file no longer holds it
                    self._tries.pop(address).cancel()
                    mine.remove(address)
                mine.update(self._begin(named, f"{source}: none of its {len(named)} addresses"))
            if seeks and (why := content if isinstance(content, str) else content.complaint) != reported:
                reported = why
                if why:
                    self._say(f"{source}: {why}{'' if self._tries else _WAITS} (reading it again)")
            self.on_named(named)
            await asyncio.sleep(READ_SECONDS if seeks else LATER_SECONDS)

    def _begin(self, addresses: Iterable[str], together: str = "") -> list[str]:
        """Start to try those that are not being tried yet; `together` is the subject of one line for all of them."""
        new = [each for each in dict.fromkeys(addresses) if each not in self._tries]
        group = _Refusals(together, new) if together and len(new) > 1 else None
        self._tries |= {each: self._group.create_task(self._try(each, group)) for each in new}
        return new

    async def _try(self, address: str, group: _Refusals | None) -> None:
        reported, attempt = "", 0
        while True:
            try:
                why = await self._attempt(address)
            except ValueError as error:
                return self._give_up(address, str(error), group)
            if why and why != reported:
                again = "" if self._found.done() else " (retrying)"
                self._report(address, why, again, group)
                reported = why
                if hint := self._hint:
                    self._hint = ""
                    self._say(hint)
            if self._found.done():
                return
            await asyncio.sleep(PAUSE_SECONDS[min(attempt, len(PAUSE_SECONDS) - 1)])
            attempt += 1

    def _report(self, address: str, why: str, again: str, group: _Refusals | None) -> None:
        line = group.failed(address, why) if group else f"{address}: {why}{again}"
        if group:
            log.debug("%s: %s", address, why)
        if line and not (group and self._found.done()):
            self._say(line)

    def _give_up(self, address: str, why: str, group: _Refusals | None) -> None:
        """Give up an address that leads into another run. `find` fails once this was the last address."""
        self._given_up += 1
        if self._given_up == len(self._tries) and not self._readers and not self._found.done():
            self._found.set_exception(ManifestError(f"{address}: {why}"))
        else:
            self._report(address, why, "", group)

    async def _attempt(self, address: str) -> str:
        """Returns why the attempt failed; empty if it led to the run. ValueError: it leads into another run."""
        deadline = asyncio.get_running_loop().time() + ATTEMPT_SECONDS
        try:
            peer = await self._connect(address, deadline)
            run = await self._ask(peer, deadline)
            self._judge(run)
        except NotAdmitted as error:
            raise ManifestError(error.why) from None
        except PeerError as error:
            return error.why
        except BadPayload as error:
            return str(error)
        self.met[peer] = address
        if not self._found.done():
            self._found.set_result(run)
        return ""
