"""Fetch the model of a running swarm into a state directory, without taking part in the run.

No peer counts it as live, and none admits it (`node.joining.state_download`).

With stages, each stage has a chain, and a state directory, of its own. A peer that was given by its address tells which
peers it knows in other stages. libp2p's DHT has their addresses. Each of them is asked for its stage again, because
hearsay may be wrong. The founder has signed the first member of each stage, so any peer may tell it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from node.config.manifest import Manifest, ManifestError, unseal
from node.export.fine_tuned import fine_tuned_layout
from node.joining.bootstrap import ask_status
from node.joining.stages import ask_seats
from node.joining.state_download import INCARNATION, StateDownload, built_in_layout
from node.membership.hello import StageSeat
from node.membership.seats import Seats, seat_to_bytes
from node.reporting.status import PeerStatus, parse, short
from node.runtime.identity import verify
from node.storage.statedir import STAGE, write_atomically
from node.tasks.hf.settings import ModelError
from protocols.aio import loop_time, task_group
from protocols.base import (
    BadPayload,
    Head,
    Host,
    Layout,
    Member,
    PeerError,
    PeerId,
)
from protocols.sync.snapshot import Snapshot
from protocols.sync.snapshot_download import StateUnavailable

MOST_ROUNDS_TRIED = 3
SEARCH_SECONDS = 60.0
ANSWER_SECONDS = 10.0  # for one peer: to be found by its id, and to answer
RETRY_SECONDS = 1.0  # Pause before another round of asking. p2pd's DHT may not know the peers yet.
ATTEMPTS = 3
MOST_TRIED = 8  # peers of each stage that are tried at most
AT_ONCE = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FetchableRun:
    """A run whose model can be fetched: its sealed manifest, and the layouts of each stage as this machine has them."""

    sealed: bytes
    manifest: Manifest
    layouts: tuple[Layout, ...]


def fetchable(sealed: bytes, base: str | None = None) -> FetchableRun:
    """Check that the model of a run can be fetched from its peers: they have a common state of tensors known here.

    `base` is this machine's copy of the model that a run of the task hf fine-tunes.
    """
    instead = "give a state directory of one of its peers by --state-dir"
    try:
        manifest = unseal(sealed, verify)
        run, config = f"run {manifest.run_id[:12]}", manifest.config
        if config.protocol != "butterfly":
            raise ModelError(f"{run} averages by {config.protocol}, so each peer has a model of its own: {instead}")
        if config.options is not None:
            raise ModelError(f"{run} trains {config.task}, and only its peers know its tensors: {instead}")
        layouts = tuple(_layout(manifest, stage, base) for stage in range(len(manifest.stages or (None,))))
        for stage, layout in enumerate(layouts):
            manifest.require_layout(layout, stage)
    except ManifestError as error:
        raise ModelError(str(error)) from None
    return FetchableRun(sealed, manifest, layouts)


def _layout(manifest: Manifest, stage: int, base: str | None) -> Layout:
    """Layout of a built-in task's parameters."""
    return fine_tuned_layout(manifest, base) if manifest.config.hf is not None else built_in_layout(manifest, stage)


async def fetch_state(host: Host, run: FetchableRun, peers: Sequence[PeerId], directory: Path) -> list[Path]:
    """Fetch the newest state that these peers serve. With stages, the newest that all stages serve, if there is one.

    Returns the state directories, each with one checkpoint: `directory` itself, or one below it for each stage. A
    `ModelError` if no peer proves a chain and sends a state on it, or a stage has no peer.
    """
    manifest = run.manifest
    if manifest.stages is None:
        downloads = [_Download(host, run, peers=peers, directory=directory)]
    else:
        search = _StageSearch(host, manifest)
        await search.run(peers)
        downloads = [
            _Download(
                host,
                run,
                peers=search.found[stage],
                directory=directory / f"stage-{stage}",
                seat=seat,
            )
            for stage, seat in sorted(search.seats.known.items())
        ]
    await _all(each.prove() for each in downloads)
    snapshots = await _of_one_round(downloads) if manifest.stages else None
    if snapshots is None:
        snapshots = await _all(each.fetch() for each in downloads)
    for download, snapshot in zip(downloads, snapshots, strict=True):
        await host.compute.run(partial(download.publish, snapshot), 0)
    return [each.directory for each in downloads]


async def _of_one_round(downloads: Sequence[_Download]) -> list[Snapshot] | None:
    """The newest state that all stages serve; None if there is none or it does not arrive."""
    served = [each.served() for each in downloads]
    shared = set(served[0]).intersection(*served[1:])
    for trained in sorted(shared, reverse=True)[:MOST_ROUNDS_TRIED]:
        with suppress(ModelError):
            return await _all(each.fetch(heads[trained]) for each, heads in zip(downloads, served, strict=True))
    return None


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all this at the same time. If one fails, the others are cancelled."""
    async with task_group() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]


class _Download(StateDownload):
    """Of a stage, or of a run without stages, into a directory of its own."""

    def __init__(
        self,
        host: Host,
        run: FetchableRun,
        *,
        peers: Sequence[PeerId],
        directory: Path,
        seat: StageSeat | None = None,
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / "manifest.bin", run.sealed)
        if seat:
            write_atomically(directory / STAGE, seat_to_bytes(seat))
        layout = run.layouts[seat.stage if seat else 0]
        super().__init__(host, run.manifest, layout=layout, seat=seat, peers=lambda: peers, directory=directory)

    async def fetch(self, head: Head | None = None) -> Snapshot:
        try:
            return await super().fetch(head)
        except StateUnavailable as error:
            raise ModelError(
                f"{self.name}: {error}: try again in a minute, or give the address of another of its peers"
            ) from None


class _StageSearch:
    """A search for peers of each stage, and for the first members of the stages."""

    def __init__(self, host: Host, manifest: Manifest) -> None:
        assert manifest.stages
        self.seats = Seats(manifest, host.signer)
        self.found: list[list[PeerId]] = [[] for _ in manifest.stages]  # they say that they are in it, and may lie
        self._transport, self._me, self._run = host.transport, Member(host.me, INCARNATION), manifest.run_id[:12]
        self._known: list[list[PeerId]] = [[] for _ in manifest.stages]  # hearsay, those that are live first
        self._why: dict[PeerId, str] = {}
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def run(self, peers: Sequence[PeerId]) -> None:
        """Find peers of each stage. Takes at most `SEARCH_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEARCH_SECONDS):
                await self._ask_all(peers)
                await self._hear(peers)
                for attempt in range(ATTEMPTS if any(self.found) else 0):
                    lacking = [known for known, found in zip(self._known, self.found, strict=True) if not found]
                    if not any(lacking):
                        break
                    await asyncio.sleep(RETRY_SECONDS if attempt else 0)
                    await self._ask_all(peer for known in lacking for peer in known)
        if not any(self.found):
            raise ModelError(f"run {self._run}: {self._causes(peers)}: give the address of another of its peers")
        if missing := [stage for stage, each in enumerate(self.found) if not each]:
            raise ModelError(self._missing(missing))

    async def _ask_all(self, peers: Iterable[PeerId]) -> None:
        async with task_group() as group:
            for peer in peers:
                group.create_task(self._ask(peer))

    async def _ask(self, peer: PeerId) -> None:
        async with self._turn:
            try:
                answer = await ask_seats(self._transport, peer, self._me, loop_time() + ANSWER_SECONDS)
                self.seats.add(answer.seats)
                if answer.stage not in self.seats.known:
                    raise BadPayload("it names a stage without its first member")
            except PeerError as error:
                self._why[peer] = error.why
            except BadPayload as error:
                self._why[peer] = str(error)
            else:
                if peer not in self.found[answer.stage]:
                    self.found[answer.stage].append(peer)

    async def _hear(self, peers: Sequence[PeerId]) -> None:

        async def others(peer: PeerId) -> Sequence[PeerStatus]:
            try:
                return parse(await ask_status(self._transport, peer, loop_time() + ANSWER_SECONDS)).peers
            except (PeerError, BadPayload, ValueError):
                return ()

        heard = [each for some in await asyncio.gather(*map(others, peers)) for each in some]
        for each in sorted(heard, key=lambda each: not each.live):
            if 0 <= each.stage < len(self._known):
                known = self._known[each.stage]
                if each.peer not in known and each.peer not in peers and len(known) < MOST_TRIED:
                    known.append(each.peer)

    def _missing(self, stages: Sequence[int]) -> str:
        *others, last = map(str, stages)
        named = f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
        known = [peer for stage in stages for peer in self._known[stage]]
        instead = "give the address of one by another --bootstrap, or a state directory of each stage by --state-dir"
        if not known:
            return f"run {self._run}: no peer of {named} is known there: wait until one has joined, or {instead}"
        return f"run {self._run}: no peer of {named} can be reached ({self._causes(known)}): {instead}"

    def _causes(self, peers: Sequence[PeerId]) -> str:
        return next((f"{short(peer)}: {self._why[peer]}" for peer in peers if peer in self._why), "no answer in time")
