"""Bootstrap: asks the peers at known addresses which run they are in, and answers joiners that ask this peer.

The client tries all addresses side by side. It logs each unreachable address once, with its cause, and tries it again,
ever more rarely, until one address has led to the run. It does not try an address again that leads into another run. It
reads a file of addresses again and again, and tries the addresses that it names then. One line covers all addresses
that the user did not give one by one.
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
from typing import Any, Self

from node.config.manifest import ManifestError
from node.config.peer_config import FILE_SIGN
from node.joining.addresses_file import AddressLine
from node.membership.hello import ENTRY, MAX_STATUS_BYTES, RunReply, StatusReply, WantRun, WantStatus
from node.reporting.status import to_json
from protocols import wire
from protocols.aio import peer_timeout, task_group
from protocols.base import BadPayload, Deadline, PeerError, PeerId, Stream, Transport

log = logging.getLogger(__name__)

ATTEMPT_SECONDS = 8.0
ASK_SECONDS = 5.0
TRANSFER_SECONDS = 60.0
PAUSE_SECONDS = (1.0, 2.0, 5.0, 10.0)
READ_SECONDS = 1.0
LATER_SECONDS = 10.0
"""Between two looks at a file of addresses: before the run is found, and after that."""

_WAITS = "; this peer waits for others' addresses there, and starts no run of its own"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a joiner is told of a run.

    Attributes:
        sealed: the manifest, in its founder's envelope.
        sample: held-out text that all peers evaluate on; empty if the task has none.
    """

    sealed: bytes
    sample: bytes


class BootstrapServer:
    """Answers peers that ask which run this is, or for this peer's status."""

    def __init__(self, transport: Transport, run: RunInfo, status: Callable[[], dict[str, Any]]) -> None:
        self._run, self._status = run, status
        transport.serve(ENTRY, self._serve)

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        async with peer_timeout(ASK_SECONDS, peer, "it asks"):
            request = await stream.receive(wire.MAX_HEADER_BYTES)
        async with peer_timeout(TRANSFER_SECONDS, peer, "it takes an answer"):
            match request:
                case WantRun():
                    run = self._run
                    await stream.send(RunReply(len(run.sealed), len(run.sample)), run.sealed + run.sample)
                case WantStatus():
                    data = _bounded(self._status())
                    await stream.send(StatusReply(len(data)), data)
                case _:
                    raise BadPayload(f"{type(request).__name__} at the door")


def _bounded(status: dict[str, Any]) -> bytes:
    """A status as JSON, with so few peers that it may be sent."""
    while len(data := to_json(status).encode()) > MAX_STATUS_BYTES and status["peers"]:
        status = status | {"peers": status["peers"][: len(status["peers"]) // 2]}
    return data


async def ask_run(transport: Transport, peer: PeerId, deadline: Deadline) -> RunInfo:
    """Ask a peer which run it is in. The caller has to check the answer.

    Raises:
        PeerError, BadPayload: no answer, or none that can be read.
    """
    async with transport.open(peer, ENTRY, deadline) as stream:
        await stream.send(WantRun())
        answer = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), RunReply)
        data = bytearray(answer.manifest_bytes + answer.sample_bytes)
        await stream.receive_into(memoryview(data))
    return RunInfo(bytes(data[: answer.manifest_bytes]), bytes(data[answer.manifest_bytes :]))


async def ask_status(transport: Transport, peer: PeerId, deadline: Deadline) -> dict[str, Any]:
    """Ask a peer for its status.

    Raises:
        PeerError, BadPayload: no answer, or none that can be read.
    """
    async with transport.open(peer, ENTRY, deadline) as stream:
        await stream.send(WantStatus())
        answer = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), StatusReply)
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
    """Connect to a peer at the first of its addresses that works; if none does, libp2p may still know a way."""
    tries = [asyncio.ensure_future(connect(f"{address}/p2p/{peer}", deadline)) for address in addresses]
    try:
        for each in asyncio.as_completed(tries):
            with suppress(PeerError, ValueError):
                await each
                return
    finally:
        for left in tries:
            left.cancel()


class _Refusals:
    """Addresses of one source, of which one line tells, once each of them has failed."""

    def __init__(self, what: str, addresses: Iterable[str]) -> None:
        self._what, self._left, self._causes = what, set(addresses), Counter[str]()

    def failed(self, address: str, why: str) -> str:
        """Returns the line, if there is one now."""
        if address not in self._left:
            return ""
        self._left.remove(address)
        self._causes[re.split("[:,;]", why.removeprefix("cannot be reached: "))[0]] += 1
        causes = ", ".join(f"{number} × {cause}" for cause, number in self._causes.most_common())
        return "" if self._left else f"{self._what} leads in: {causes} (they are tried again)"


class BootstrapClient:
    """Tries addresses until one leads to the run, each at least once. Use as an async context manager.

    Attributes:
        met: peers that answered, and the address that led to them.
        named: file of addresses -> what it named when it was read last.
    """

    def __init__(
        self,
        connect: Callable[[str, Deadline], Awaitable[PeerId]],
        ask: Callable[[PeerId, Deadline], Awaitable[RunInfo]],
        judge: Callable[[RunInfo], None],
        say: Callable[[str], None],
        read: Callable[[Path], Awaitable[AddressLine | str]],
    ) -> None:
        """
        Args:
            judge: raises a ValueError of one line for a run that is not the one to join.
            say: called with one line for the user.
            read: returns what a file of addresses says, or why it cannot be read.
        """
        self.met: dict[PeerId, str] = {}
        self.named: dict[str, tuple[str, ...]] = {}
        self._on_named: Callable[[Sequence[str]], None] = lambda addresses: None
        self._read = read
        self._connect, self._ask, self._judge, self._say = connect, ask, judge, say
        self._exit = AsyncExitStack()
        self._tries: dict[str, asyncio.Task[None]] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._useless, self._stopped = 0, False

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
        """The run, as soon as one address has led to it.

        Args:
            addresses: multiaddrs, or @ and the path of a file that holds some, sooner or later.
            remembered: those of them where peers were met before; nobody gave them.

        Raises:
            ManifestError: all lead into others, and no file can name more.
        """
        for each in dict.fromkeys(addresses):
            if each.startswith(FILE_SIGN):
                self._readers.append(self._group.create_task(self._follow(each)))
        self._begin([each for each in addresses if each not in remembered and not each.startswith(FILE_SIGN)])
        self._begin(remembered, f"none of the {len(remembered)} addresses where peers were met before")
        return await asyncio.shield(self._found)

    def set_listener(self, on_named: Callable[[Sequence[str]], None]) -> None:
        """From now on, call this with the addresses that a file names, after each reading; it replaces the last one."""
        self._on_named = on_named

    def stop(self) -> None:
        """Stop trying: the caller goes on without an answer."""
        self._stopped = True
        for each in self._tries.values():
            each.cancel()

    async def _follow(self, source: str) -> None:
        """Try what a file names, as long as it names it and no way in is found; tell what it names for ever."""
        mine: set[str] = set()
        told = ""
        while True:
            said = await self._read(Path(source.removeprefix(FILE_SIGN)))
            if isinstance(said, AddressLine):
                self.named[source] = said.addresses
            named = self.named.get(source, ())
            if seeks := not (self._found.done() or self._stopped):
                self._turn_to(source, named, mine)
            if seeks and (why := said if isinstance(said, str) else said.complaint) != told:
                told = why
                if why:
                    self._say(f"{source}: {why}{'' if self._tries else _WAITS} (it is read again)")
            self._on_named(named)
            await asyncio.sleep(READ_SECONDS if seeks else LATER_SECONDS)

    def _begin(self, addresses: Iterable[str], together: str = "") -> list[str]:
        """Try those that are not tried yet; returns them.

        Args:
            together: who they are, if one line is to tell of all.
        """
        new = [each for each in dict.fromkeys(addresses) if each not in self._tries]
        crowd = _Refusals(together, new) if together and len(new) > 1 else None
        self._tries |= {each: self._group.create_task(self._try(each, crowd)) for each in new}
        return new

    def _turn_to(self, source: str, addresses: Sequence[str], mine: set[str]) -> None:
        """Have a file's addresses tried, and no others of that file's (`mine`) any more."""
        for address in mine.difference(addresses):
            self._tries.pop(address).cancel()
            mine.remove(address)
        mine.update(self._begin(addresses, f"{source}: none of its {len(addresses)} addresses"))

    async def _try(self, address: str, crowd: _Refusals | None) -> None:
        told, attempt = "", 0
        while True:
            try:
                why = await self._attempt(address)
            except ValueError as error:
                return self._give_up(address, str(error), crowd)
            if why and why != told:
                again = "" if self._found.done() else " (it is tried again)"
                self._tell(address, why, again, crowd)
                told = why
            if self._found.done():
                return
            await asyncio.sleep(PAUSE_SECONDS[min(attempt, len(PAUSE_SECONDS) - 1)])
            attempt += 1

    def _tell(self, address: str, why: str, again: str, crowd: _Refusals | None) -> None:
        line = crowd.failed(address, why) if crowd else f"{address}: {why}{again}"
        if crowd:
            log.debug("%s: %s", address, why)
        if line and not (crowd and self._found.done()):
            self._say(line)

    def _give_up(self, address: str, why: str, crowd: _Refusals | None) -> None:
        """It does not lead where we want to go, and never will; once that is so of all, there is no way in."""
        self._useless += 1
        if self._useless == len(self._tries) and not self._readers and not self._found.done():
            self._found.set_exception(ManifestError(f"{address}: {why}"))
        else:
            self._tell(address, why, "", crowd)

    async def _attempt(self, address: str) -> str:
        """Try an address; returns why it does not lead in, or nothing.

        Raises:
            ValueError: it leads into a run that is not the one to join.
        """
        deadline = asyncio.get_running_loop().time() + ATTEMPT_SECONDS
        try:
            peer = await self._connect(address, deadline)
            run = await self._ask(peer, deadline)
            self._judge(run)
        except PeerError as error:
            return error.why
        except BadPayload as error:
            return str(error)
        self.met[peer] = address
        if not self._found.done():
            self._found.set_result(run)
        return ""
