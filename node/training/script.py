"""The peer's side of a user's own loop: a script takes the worker's place, by the worker's protocol.

    ScriptEntrance   the socket at which scripts attach, one at a time; the source of a trainer's workers
    ScriptLink       one attached script: commands and answers, as of a worker
    ScriptTrainer    the trainer of a peer whose worker is a script

A script (`node.library`) cannot be killed, and may stand in a debugger for an hour. Where a worker would be killed, a
script loses its link: it attaches again by itself, to a new link with a memory of its own, and starts from the anchor.
While a script is silent or away, its peer rests: the others do not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import struct
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch

from node.network.sockets import socket_directory
from node.runtime.json_file import replace_private
from node.tasks.spec import WorkerSpec
from node.training import shared
from node.training.failure import FaultDump
from node.training.liveness import TIMEOUT_SECONDS
from node.training.process import OnProgress, WorkerError, WorkerGone, WorkerProcess
from node.training.remote import NOTHING, RemoteTrainer
from node.training.shared import Shared
from node.training.trainer import distance
from node.training.worker import MAX_LINE_BYTES
from protocols.base import ALL, Compute, Layout, LocalProgress, RoundKey, Vector
from protocols.vectors.views import fragment

log = logging.getLogger(__name__)

FILE = "own-loop.json"
"""In the state directory: where the socket is."""
LEASH = "STARLING_LEASH"
"""Variable with the descriptor of a socket to the script that has started this peer, and that it ends with."""
PATIENCE_SECONDS = 10.0
"""A script that takes no step for this time, or for three of its longest steps, is silent."""
_PATIENCE_STEPS = 3
_LOOK_SECONDS = 1.0
_HELLO_SECONDS = 60.0  # it may have to write a large model
_MAX_QUEUE = 64
BUSY = "not now"  # how the refusal of a script begins that may try again
NO_SCRIPT = "no script is attached"
_WITHOUT_SCRIPT = replace(NOTHING, resting=True)


class ScriptProcess:
    """What a trainer asks of a worker's process. To kill it is to end its link."""

    is_killed = False

    def __init__(self, sock: socket.socket, hang_up: Callable[[], None]) -> None:
        credentials = b""
        if hasattr(socket, "SO_PEERCRED"):
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = struct.unpack("3i", credentials)[0] if credentials else 0
        self._hang_up, self.gone = hang_up, asyncio.Event()

    @property
    def code(self) -> int | None:
        return 0 if self.gone.is_set() else None

    async def ended(self) -> str:
        await self.gone.wait()
        return "the script has ended, or was silent"

    def send_kill(self) -> None:
        self._hang_up()

    async def kill(self) -> None:
        self._hang_up()

    def ask_where(self) -> None: ...


class ScriptLink(WorkerProcess):
    """One attached script. `memory` has counters and local parameters of its own: what an earlier script still writes
    goes nowhere.
    """

    child: ScriptProcess  # type: ignore[assignment]

    def __init__(self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process = ScriptProcess(sock, self._hang_up)
        super().__init__(process, FaultDump(), reader, writer)  # type: ignore[arg-type]
        self.evaluates, self.memory = False, cast(Shared, None)  # until it has introduced itself
        self.has_left, self._longest_step_seconds = False, 0.0
        self._messages = asyncio.Queue[bytes](_MAX_QUEUE)
        self._reading = asyncio.create_task(self._read(), name="script")

    async def _read(self) -> None:
        """Read ahead, since only a reader notices the end of the connection."""
        try:
            with suppress(OSError, ValueError):
                while line := await self._reader.readline():
                    await self._messages.put(line)
        finally:
            self.child.gone.set()
            self._writer.close()

    def _hang_up(self) -> None:
        if self.memory:
            self.memory.revoke()
        self._reading.cancel()
        self.child.gone.set()
        self._writer.close()

    async def introduce(self, spec: WorkerSpec, layout: Layout | None, anchor: int, sock: socket.socket) -> None:
        """Send the specification and the layout that is known, with the descriptors of both memories.

        The answer is the script's layout. The script writes only to the first memory; there are its parameters, if no
        layout was known.
        """
        page = shared.create()
        known = {"layout": layout.fragments if layout else None}
        try:
            socket.send_fds(sock, [json.dumps(json.loads(spec.to_json()) | known).encode() + b"\n"], [page, anchor])
            async with asyncio.timeout(_HELLO_SECONDS):
                answer = (await self._next())["done"]
            fragments = answer["layout"]
            self.layout = Layout(tuple(tuple((name, tuple(shape)) for name, shape in each) for each in fragments))
            self.evaluates, self.device = bool(answer["evaluates"]), str(answer["device"])
            self.memory = Shared(page, sum(self.layout.sizes()), torch.empty(0))
        finally:
            os.close(page)

    async def _next(self) -> dict[str, Any]:
        """The next message; `WorkerGone` at the end of the link."""
        waiting = asyncio.create_task(self._messages.get())
        gone = asyncio.create_task(self.child.gone.wait())
        try:
            await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise WorkerGone
            answer: dict[str, Any] = json.loads(waiting.result())
        except ValueError:
            raise WorkerGone from None
        finally:
            waiting.cancel()
            gone.cancel()
        if "refused" in answer:
            raise WorkerError(answer["refused"])
        return answer

    async def ask(self, command: dict[str, Any], memory: Shared, on_progress: OnProgress) -> Any:
        """As of a worker. A script that is silent when it is to stop loses its link; one that leaves ends its turn."""
        self.command = command["do"]
        self._send(command)
        now = asyncio.get_running_loop().time()
        watch = _Watch(now, self._longest_step_seconds, evaluates=self.command == "evaluate")
        while True:
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    answer = await self._next()
            except TimeoutError:
                now = asyncio.get_running_loop().time()
                if (rests := watch.look(now, memory.heartbeats, memory.attention)) is not None:
                    on_progress({**watch.progress, "resting": rests})
                if watch.gone:
                    self._said = f"the script took no step for {now - watch.beaten:.0f} s"
                    raise WorkerGone from None
                continue
            if "done" in answer:
                return answer["done"]
            if "leaves" in answer:
                self.has_left = True
                return answer["leaves"]
            watch.progress = answer["progress"]
            self._longest_step_seconds = max(self._longest_step_seconds, watch.progress["step_seconds"])
            on_progress(answer["progress"])

    async def end(self) -> None:
        self._hang_up()

    def refuse(self, why: str) -> None:
        with suppress(WorkerGone):
            self._send({"do": "refuse", "why": why})
        self._hang_up()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
        except (OSError, RuntimeError):  # uvloop's way to say that it is closed
            raise WorkerGone from None


class _Watch:
    """Whether a script that was given a command is silent. It knows no clock."""

    def __init__(self, now: float, longest_step_seconds: float, evaluates: bool) -> None:
        self.progress: dict[str, Any] = {name: getattr(NOTHING, name) for name in _PROGRESS}
        self.beaten, self.gone = now, False
        self._beats, self._longest, self._resting, self._evaluates = -1, longest_step_seconds, False, evaluates
        self._called: float | None = None  # since when it is to stop

    def look(self, now: float, beats: int, attention: bool) -> bool | None:
        """Whether it rests from now on; None: as before. After `gone`, it has not stopped in time."""
        if beats != self._beats:
            self._beats, self.beaten = beats, now
        self._longest = max(self._longest, self.progress["step_seconds"])
        patience = TIMEOUT_SECONDS if self._evaluates else max(PATIENCE_SECONDS, _PATIENCE_STEPS * self._longest)
        self._called = (self._called or now) if attention else None
        silent = now - self.beaten > patience
        self.gone = silent and self._called is not None and now - self._called > patience / 2
        if silent == self._resting:
            return None
        self._resting = silent
        return silent


_PROGRESS = ("tokens", "loss", "seconds", "norm", "step_seconds", "complete", "carried")


class ScriptEntrance:
    """Where scripts attach: a socket that only this user can reach. An async context manager.

    One script at a time: another is refused in one line, and so is one with another model than the first had.
    """

    def __init__(self, state_dir: Path, on_end: Callable[[str], None]) -> None:
        """`on_end` is called when the script that has started this peer is gone."""
        self.state_dir, self._on_end = state_dir.absolute(), on_end
        self._file, self.has_owner = self.state_dir / FILE, False  # a script that has started this peer
        self._exit = AsyncExitStack()
        self._wanted: asyncio.Future[WorkerProcess] | None = None
        self._layout: Layout | None = None
        self._anchor: Vector | None = None
        self._spec: WorkerSpec | None = None

    async def __aenter__(self) -> Self:
        self._file.unlink(missing_ok=True)
        path = self._exit.enter_context(socket_directory()) / "own-loop"
        self._listener = self._exit.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(1)
        replace_private(self._file, json.dumps({"pid": os.getpid(), "socket": str(path)}) + "\n")
        self._exit.callback(self._file.unlink, missing_ok=True)
        accepting = asyncio.create_task(self._accept(), name="own loop")
        self._exit.callback(accepting.cancel)
        if leash := os.environ.pop(LEASH, ""):
            self.has_owner = True
            await self._hold(socket.socket(fileno=int(leash)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def _hold(self, leash: socket.socket) -> None:
        """Tell the script where this peer's state is, and watch for its end."""
        leash.set_inheritable(False)
        reader, writer = await asyncio.open_unix_connection(sock=leash)
        writer.write(json.dumps({"state_dir": str(self.state_dir)}).encode() + b"\n")

        async def watch() -> None:
            with suppress(OSError):
                await reader.read(1)
            self._on_end("the script has ended")

        task = asyncio.create_task(watch(), name="leash")
        self._exit.callback(task.cancel)
        self._exit.callback(writer.close)

    def supervise(self, spec: WorkerSpec, anchor: int) -> ScriptEntrance:
        """From now on, scripts get this specification and the descriptor of the anchor. Returns itself."""
        self._spec, self._descriptor = spec, anchor
        return self

    async def start(self) -> WorkerProcess:
        """Wait for a script, without a limit: its user starts it, or ends this peer."""
        self._wanted = asyncio.get_running_loop().create_future()
        return await self._wanted

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
                reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE_BYTES)
            except OSError as error:  # out of descriptors, or the script is gone already
                log.warning("a script cannot attach now: %s", error)
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            link = ScriptLink(sock, reader, writer)
            if why := await self._judge(link, sock):
                link.refuse(why)
            elif self._wanted and not self._wanted.done():
                self._wanted.set_result(link)

    async def restart(self, worker: WorkerProcess, how: str) -> WorkerProcess:
        return await self.start()

    async def resume(self, worker: WorkerProcess, how: str) -> WorkerProcess:
        return await self.start()

    def explained(self, how: str, is_killed: bool) -> str:
        return how

    async def _judge(self, link: ScriptLink, sock: socket.socket) -> str:
        """Introduce a script that attaches; why it may not, in one line."""
        if self._spec is None:
            return f"{BUSY}: the peer has not found its run yet"
        if self._wanted is None or self._wanted.done():
            return f"{BUSY}: another script is attached"
        try:
            await link.introduce(self._spec, self._layout, self._descriptor, sock)
        except WorkerError as error:
            return str(error)
        except (WorkerGone, TimeoutError, OSError, KeyError, TypeError, ValueError) as error:
            return f"the script did not introduce itself ({type(error).__name__})"
        if self._layout not in (None, link.layout):
            return "the model has other parameters than that of the script that attached first: use the same model"
        if self._anchor is None:  # only this process writes to it
            self._anchor = shared.shared_vector(self._descriptor, sum(link.layout.sizes()))
            self._anchor.copy_(link.memory.local)
        link.memory.anchor = self._anchor
        self._layout = link.layout
        return ""


class ScriptTrainer(RemoteTrainer):
    """A `RemoteTrainer` whose worker is a user's script. The optimiser's state stays the script's."""

    def __init__(
        self,
        spec: WorkerSpec,
        compute: Compute,
        entrance: ScriptEntrance,
        on_waiting: Callable[[str], None] = lambda why: None,
    ) -> None:
        super().__init__(spec, compute)
        self._entrance, self._on_waiting = entrance, on_waiting
        self._without_worker = _WITHOUT_SCRIPT

    async def __aenter__(self) -> Self:
        self._on_waiting("for a script that attaches")
        return await super().__aenter__()

    async def __aexit__(self, *details: object) -> None:
        with suppress(WorkerError, WorkerGone, TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS), self._boundary():
                await self._ask({"do": "end", "failed": details[0] is not None})
        await super().__aexit__(*details)

    def _supervisor_of(self, descriptor: int) -> ScriptEntrance:
        return self._entrance.supervise(self._spec, descriptor)

    def _memory(self, worker: WorkerProcess) -> Shared:
        assert isinstance(worker, ScriptLink)
        self._anchor: Vector = worker.memory.anchor
        return worker.memory

    def _mending_seconds(self) -> float:
        return math.inf

    async def _ask(self, command: dict[str, Any], on_progress: OnProgress = lambda _: None) -> Any:
        """What a script has handed over stays, until the round ends or another script goes on from it."""
        worker = self._worker
        if isinstance(worker, ScriptLink) and worker.has_left:
            self._lose(worker)
        answer = await super()._ask(command, on_progress)
        if command["do"] == "train":
            self._without_worker = replace(LocalProgress(**answer), resting=True)
        return answer

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        if self._spec.recipe.fragment_count > 1 and self._without_worker.tokens:  # its norm is that of another fragment
            part = fragment(len(self._anchor), self._spec.recipe.fragment_count, key.fragment)
            local, cost_bytes = self._shared.local, 8 * (part.stop - part.start)
            norm = await self._compute.run(lambda: distance(self._anchor[part], local[part]), cost_bytes)
            self._without_worker = replace(self._without_worker, norm=norm)
        return await super().train(key, cut, progress, surplus)

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        left = self._without_worker
        stays = tokens and left.tokens
        self._without_worker = _WITHOUT_SCRIPT
        if stays:
            self._without_worker = replace(left, tokens=tokens, carried=tokens, seconds=0.0)
        await super().write(source, anchor, tokens, part)

    async def _reset_local(self, worker: WorkerProcess) -> None:
        """A script that was to stop and did not may still write: the local parameters are in other memory from now."""
        page = shared.create()
        try:
            memory = Shared(page, len(self._anchor), self._anchor)
        finally:
            os.close(page)
        memory.attention = self._shared.attention
        self._shared, self._without_worker = memory, _WITHOUT_SCRIPT
        await super()._reset_local(worker)

    async def _gain(self, worker: WorkerProcess) -> None:
        assert isinstance(worker, ScriptLink)
        async with self._boundary():
            before, memory = self._shared.local, worker.memory
            await self._compute.run(lambda: memory.local.copy_(before), 4 * len(before))
            memory.attention = self._shared.attention
            self._shared = memory
        self.restarts = 0  # a script that attaches again is no failure of a worker
        await super()._gain(worker)

    @property
    def resting_reason(self) -> str:
        return f"{NO_SCRIPT if self._worker is None else 'the script takes no step'}, so it rests"

    @property
    def evaluates(self) -> bool:
        return isinstance(self._worker, ScriptLink) and self._worker.evaluates

    async def save(self, path: Path) -> bool:
        return False

    async def load(self, path: Path | None, position: int, threads: int = 0) -> None: ...

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        raise WorkerError("a training loop of one's own writes none")

    async def held_out(self) -> bytes:
        return b""

    async def _order(self, command: dict[str, Any]) -> Any:
        if self._worker is None:
            raise WorkerError(NO_SCRIPT)
        if command["do"] not in ("evaluate", "end"):
            raise WorkerError(f"a script of one's own carries out no {command['do']!r}")
        try:
            async with self._boundary():
                return await self._ask(command)
        except WorkerGone:
            raise WorkerError("the script ended, or was silent, while it evaluated") from None
