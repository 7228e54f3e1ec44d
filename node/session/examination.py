"""Composes the doctor's examination: of a running peer, which is asked by its control socket, or without one."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from node.config.peer_config import PeerConfig
from node.doctor.findings import CheckStep, Finding, Level, examine
from node.doctor.helpers import LivePeer, NetworkExamination
from node.doctor.machine import (
    check_at_boot,
    check_clock,
    check_hardware,
    check_identity,
    check_pauses,
    check_programs,
    check_storage,
)
from node.doctor.machine_probes import (
    TorchDevices,
    at_boot,
    hardware,
    holder,
    pauses,
    programs,
    storage,
    system_clock,
    torch_devices,
)
from node.doctor.network import Listening, check_listening
from node.doctor.run import check_run, saved_run
from node.membership.peer_record import PeerRecord
from node.network.daemon import DaemonError, PortTaken
from node.network.libp2p import LibP2PTransport
from node.reporting.status import printable
from node.runtime.clock import WallClock
from node.runtime.identity import IdentityError, create
from node.session.fatal import FatalPeerError
from node.session.private_run import is_private, visitors_access
from node.session.transport import make_transport
from node.storage.statedir import StateDir
from protocols.aio import loop_time

SECONDS = 30.0
CHECK_SECONDS = 3.0
PROGRAM_SECONDS = 8.0
DEVICE_SECONDS = 10.0  # to open GPUs takes seconds
REACH_SECONDS = 5.0
DIAL_BACK_SECONDS = 9.0  # a dial takes up to five, and the way to the helper

Tell = Callable[[Finding], None]


class Examination:
    """The checks of one peer in order: the machine, then the network, then the run."""

    network: NetworkExamination | None = None
    port_problem = ""  # why p2pd does not listen
    in_use: str | None = None  # what a running peer trains on
    sealed = b""  # the manifest of the run that the directory holds

    def __init__(self, config: PeerConfig, directory: Path, *, is_running: bool = False, is_held: bool = False) -> None:
        """`is_running`: the peer of the directory; `is_held`: another process that does not answer holds it."""
        self._config, self._directory = config, directory
        self._is_running, self._is_held = is_running, is_held

    async def run(self, tell: Tell) -> bool:
        """Tell each finding at once. Returns whether all checks have ended in time."""
        deadline = loop_time() + SECONDS
        async with AsyncExitStack() as self._stack:
            return await examine(self._steps(), tell, deadline)

    def _steps(self) -> Sequence[CheckStep]:
        return (
            CheckStep("programs", PROGRAM_SECONDS, self._programs),
            CheckStep("storage", CHECK_SECONDS, self._storage),
            CheckStep("identity", CHECK_SECONDS, self._identity),
            CheckStep("hardware", DEVICE_SECONDS, self._hardware),
            CheckStep("clock and pauses", CHECK_SECONDS, self._pauses),
            CheckStep("listen", CHECK_SECONDS, self._listening),
            CheckStep("reach", REACH_SECONDS, self._reach),
            CheckStep("outside", DIAL_BACK_SECONDS, self._outside),
            CheckStep("upload", CHECK_SECONDS, self._upload),
            CheckStep("others", CHECK_SECONDS, self._others),
            CheckStep("run", CHECK_SECONDS, self._run),
        )

    # -- the machine --------------------------------------------------------------------------------------------------

    async def _programs(self) -> list[Finding]:
        began = loop_time()
        problem = await self._start()
        seconds = math.nan if self._is_running or self._is_held else loop_time() - began
        return check_programs(programs(seconds, problem))

    async def _start(self) -> str:
        """Make ready what the later checks need. Returns why p2pd does not start; empty if it runs."""
        return ""

    async def _storage(self) -> list[Finding]:
        return check_storage(await storage(self._config, self._directory))

    async def _identity(self) -> list[Finding]:
        facts = await asyncio.to_thread(holder, self._directory, self._is_running, self._is_held)
        return check_identity(facts)

    async def _hardware(self) -> list[Finding]:
        devices = await self._devices()
        facts = await asyncio.to_thread(hardware, self._config, self._directory, devices, self.in_use)
        return check_hardware(facts)

    async def _devices(self) -> TorchDevices:
        return await asyncio.to_thread(torch_devices)

    async def _pauses(self) -> list[Finding]:
        clock, boots = await asyncio.to_thread(lambda: (system_clock(), at_boot(self._directory)))
        facts = await pauses(self._config)
        return [*check_clock(clock), *check_pauses(facts), *check_at_boot(boots)]

    # -- the network --------------------------------------------------------------------------------------------------

    async def _listening(self) -> list[Finding]:
        if self.port_problem:
            return check_listening(Listening(problem=self.port_problem))
        if self.network is None:
            why = "that process may use its ports" if self._is_held else "p2pd does not run"
            return [Finding("network", Level.UNKNOWN, f"the network was not examined, because {why}")]
        return await self.network.listening()

    async def _reach(self) -> list[Finding]:
        return await self.network.reach() if self.network else []

    async def _outside(self) -> list[Finding]:
        return await self.network.outside() if self.network else []

    async def _upload(self) -> list[Finding]:
        return await self.network.upload() if self.network else []

    async def _others(self) -> list[Finding]:
        return await self.network.others() if self.network else []

    # -- the run ------------------------------------------------------------------------------------------------------

    async def _run(self) -> list[Finding]:
        return check_run(await asyncio.to_thread(saved_run, self._directory, self.sealed, self._is_running))


async def _ended(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


class ExaminationAlone(Examination):
    """While no peer runs in the directory. p2pd runs meanwhile, at the ports that the peer would have.

    Its identity exists only for this time: members of the run that know the peer would dial it, get no answer to their
    greeting, and close the connection over which they are asked for help.
    """

    def __init__(self, config: PeerConfig, directory: Path, given: str, is_held: bool) -> None:
        """`given` is the multiaddr of a peer that may help; empty: those that this peer met before."""
        super().__init__(config, directory, is_held=is_held)
        self._given = given

    async def _start(self) -> str:
        state = await asyncio.to_thread(self._state)
        self.sealed = await asyncio.to_thread(state.manifest)
        if self._is_held:  # by a process that may use the same ports
            return ""
        known = [self._given] if self._given else []
        try:
            transport = make_transport(self._config, state, known)
            if is_private(self._directory):
                access = visitors_access(self._directory, transport.me, WallClock())
                access.serve(transport)
                transport.restrict(access)
            await self._stack.enter_async_context(transport)
        except PortTaken as error:
            self.port_problem = str(error)
        except (DaemonError, IdentityError, FatalPeerError) as error:
            return str(error)
        else:
            own = await asyncio.to_thread(holder, self._directory, False, False)
            self.network = NetworkExamination(
                transport, self._config, given=self._given, met=state.peers(), itself=own.peer
            )
        return ""

    def _state(self) -> StateDir:
        """The state directory as it is, but for the identity."""
        temporary = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return StateDir(self._directory, create(temporary / "identity.key"), 0)


class ExaminationBeside(Examination):
    """Of a peer that runs, by the peer itself."""

    def __init__(
        self,
        config: PeerConfig,
        state: StateDir,
        transport: LibP2PTransport,
        contacts: Iterable[PeerRecord],
        device: str,
        given: str,
    ) -> None:
        """`device` is what its worker trains on, in words; empty if it has none yet."""
        super().__init__(config, state.path, is_running=True)
        self.in_use = device
        self._state, self._transport, self._given = state, transport, given
        self._live = [
            LivePeer(each.peer, printable(each.hello.nickname) if each.hello else "", each.offset_seconds)
            for each in contacts
            if each.live
        ]

    async def _devices(self) -> TorchDevices:
        return TorchDevices()  # a process that opens the GPU would take memory that training needs

    async def _start(self) -> str:
        self.sealed = await asyncio.to_thread(self._state.manifest)
        met = await asyncio.to_thread(self._state.peers)
        self.network = NetworkExamination(
            self._transport, self._config, given=self._given, met=met, live=self._live, is_running=True
        )
        self._stack.push_async_callback(self.network.forget_helpers)
        return ""


class DoctorService:
    """Examines a running peer when the control socket asks: one examination at a time, whose findings are polled."""

    def __init__(self, begin: Callable[[str], Examination]) -> None:
        """`begin` is given the multiaddr of another peer that may help, or an empty text. ValueError: not now."""
        self._begin = begin
        self._number = 0
        self._given, self._ends = "", 0.0
        self._findings: list[Finding] = []
        self._task: asyncio.Task[bool] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task:
            await _ended(self._task)

    def ask(self, number: int | None, given: str) -> Mapping[str, object]:
        """Begin an examination, or join the one that runs if it asks the same; with its `number` tell how far it is."""
        is_over = self._task is None or self._task.done()
        if number is None and is_over:
            work, self._given, self._ends = self._begin(given), given, loop_time() + SECONDS
            self._number, self._findings = self._number + 1, []
            self._task = asyncio.create_task(work.run(self._findings.append), name="doctor")
            is_over = False
        elif number is None and given != self._given:
            whose = self._given or "the peers of the run"
            left = max(1, math.ceil(self._ends - loop_time()))
            raise ValueError(f"an examination with {whose} runs: ask again in {left} s")
        elif number not in (None, self._number):
            raise ValueError("that examination is over: ask again")
        return {"ok": True, "number": self._number, "over": is_over, "findings": [*map(asdict, self._findings)]}
