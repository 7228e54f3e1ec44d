"""Peers with complete sessions in virtual time.

Network, clocks, signatures and model are simulated. Rounds, votes, membership and state directories are real.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from node.config.peer_sources import load_peer
from node.membership.handshake import LocalPeer
from node.membership.membership import Membership
from node.membership.watching import roster_role
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory, RoundHistory
from node.outer.state import OuterSGD, OuterState
from node.reporting.event_feed import EventFeed
from node.reporting.report import RoundEvaluation, RoundReport
from node.runtime.clock import WallClock
from node.session.discovery import discover
from node.session.peer_session import PeerSession
from node.session.status_tracker import StatusTracker
from node.session.traffic_limits import TrafficLimits
from node.storage.journal import Journal
from node.storage.statedir import StateDir
from node.tasks.paced import Paced
from node.training.remote import RemoteTrainer
from protocols.aio import run_with_helper
from protocols.base import Deadline, Host, Member, PeerId, RoundKey, Settings
from protocols.blobs.parts import PartCache
from protocols.history.chain import Chain
from protocols.registry import load_averager
from protocols.sync.chain_sync import ChainSync
from protocols.sync.independent_sync import IndependentStateSync
from protocols.sync.snapshot import Snapshots
from tests.sim.host import DirectoryFaults, SimClock, SimCompute, SimDirectory, SimSigner
from tests.sim.swarm import SimSwarm
from tests.support.fake_rounds import RUN
from tests.support.inline_trainer import InlineTrainer

ELEMENTS = 2000
STEPS = 10
EVALUATE_SECONDS = 0.1
SPREAD_LIMIT = 1.0


class Trainer(InlineTrainer, RemoteTrainer):
    """A trainer whose evaluation and text generation may fail."""

    broken: Exception | None = None
    sample_prompt = b"def "
    evaluated = 0
    threads = 3
    evaluates = True

    async def evaluate(self) -> float:
        await asyncio.sleep(EVALUATE_SECONDS)
        self.evaluated += 1
        if self.broken:
            raise self.broken
        return await super().evaluate()

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        if self.broken:
            raise self.broken
        return b"something"


class Directory(SimDirectory):
    async def meet(self, peer: PeerId, deadline: Deadline) -> bool:
        return True


class View:
    """A terminal; no page asks for a text."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.reports: list[RoundReport] = []
        self.on_report: Callable[[RoundReport], None] = lambda report: None

    def say(self, line: str) -> None:
        self.said.append(line)

    def report(self, report: RoundReport) -> None:
        self.reports.append(report)
        self.on_report(report)

    def evaluated(self, evaluation: RoundEvaluation) -> None:
        """Nothing: its line is in `rounds.jsonl`."""


def status_tracker(me: Member) -> StatusTracker:
    """That of a peer without limits on its traffic."""
    limits = TrafficLimits(load_peer({}, {}, None), lambda: 1e9, Path(), SimCompute())
    return StatusTracker(me.peer, me, limits, WallClock())


class SessionPeer:
    def __init__(self, cluster: SessionCluster, name: PeerId, step_seconds: float, **limits: Any) -> None:
        self.cluster, self.name, self.view, self.status_tracker = cluster, name, View(), status_tracker(Member(name))
        transport = cluster.network.join(name)
        me, clock, state = Member(name), SimClock(), StateDir.open(cluster.path / name)
        libp2p: Any = SimpleNamespace(addresses=(f"/ip4/10.0.0.1/tcp/1/p2p/{name}",), routes={}, daemon_pid=None)
        self.status_tracker.transport = libp2p
        history = self.history(me)
        self.ties: Callable[[], Collection[PeerId]] = tuple  # as of `Butterfly`
        self.followers: Callable[[], Collection[PeerId]] = tuple
        local = LocalPeer(me, RUN, len(cluster.peers), f"nick-{name}", tuple, lambda: history.head.key.round)
        members = self.members = Membership(
            transport,
            local,
            clock=clock,
            signer=SimSigner(name, 1),
            wanted=lambda: [
                *(member.peer for member in history.head.roster if member != me),
                *self.ties(),
                *self.followers(),
            ],
            role=lambda known: roster_role(name, [member.peer for member in history.head.roster], self.ties()),
        )
        members.add_candidate(cluster.founders[0].peer)
        directory = Directory(cluster.entries, name, clock, DirectoryFaults())
        host = Host(transport, directory, members, SimCompute(), clock, SimSigner(name, 1), 1)
        settings = replace(Settings("fp32", (ELEMENTS,), 512), **cluster.settings)
        self.trainer = Trainer(Paced(ELEMENTS, seed=len(cluster.peers), tokens_per_step=256), STEPS, step_seconds)
        self.outer_loop, sync = self.stack(host, settings)
        self.outer_loop.on_progress = self.status_tracker.on_progress
        journal = Journal(state.rounds)
        worker: Any = SimpleNamespace(pid=None, restarts=0, device="cpu")
        checkpoints: Any = SimpleNamespace(age_seconds=lambda wall: None, problem="")
        self.status_tracker.enter_session(
            history=history,
            membership=members,
            loop=self.outer_loop,
            sync=sync,
            worker=worker,
            pipeline=None,
            checkpoints=checkpoints,
            journal=journal,
        )
        self.state, self.directory = state, directory

        def on_report(report: RoundReport) -> None:
            journal.write(report)
            self.status_tracker.reported(report)
            self.view.report(report)

        def on_evaluated(evaluation: RoundEvaluation) -> None:
            journal.evaluated(evaluation)
            self.status_tracker.evaluated(evaluation)

        self.session = PeerSession(
            self.outer_loop,
            sync,
            trainer=self.trainer,
            membership=members,
            state=state,
            disk=SimCompute(),
            status_tracker=self.status_tracker,
            view=EventFeed(self.view, clock.wall),
            on_report=on_report,
            on_evaluated=on_evaluated,
            **limits,
        )
        self.ended: float | None = None

    def history(self, me: Member) -> RoundHistory:
        self.chain = Chain(RUN, "run", self.cluster.founders, bytes(32))
        return self.chain

    def outer_state(self, host: Host) -> OuterState:
        return OuterState(self.trainer.local_training.learner.vector.clone(), OuterSGD(0.9, 0.5), host.compute)

    def stack(self, host: Host, settings: Settings) -> tuple[Any, Any]:
        snapshots, part_cache = Snapshots(), PartCache(host)
        sync = ChainSync(
            host,
            settings,
            chain=self.chain,
            snapshots=snapshots,
            part_cache=part_cache,
            hints=self.members.peers,
            on_better=lambda branch: averager.supersede(),
        )
        averager = load_averager("butterfly")(host, settings, part_cache, sync.hear, self.chain.lineage_of)
        self.ties, self.followers = averager.ties, averager.followers
        outer_loop = ReplicatedOuterLoop(
            self.chain,
            averager,
            state=self.outer_state(host),
            trainer=self.trainer,
            wall=host.clock.wall,
            snapshots=snapshots,
        )
        return outer_loop, sync

    async def live(self) -> None:
        await self.trainer.read(self.outer_loop.anchor)
        discovery = discover(self.members, self.directory, self.name, self.status_tracker.addresses)
        await run_with_helper(self.session.run(), discovery)
        self.ended = self.cluster.now
        asyncio.get_running_loop().call_soon(self.cluster.network.kill, self.name)  # its process ends

    @property
    def outcomes(self) -> list[str]:
        return [report.outcome for report in self.view.reports]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.state.rounds.read_text().splitlines()]


class IndependentSessionPeer(SessionPeer):
    """A peer with its own state. A peer that is not a founder is a newcomer."""

    outer_loop: IndependentOuterLoop

    def history(self, me: Member) -> RoundHistory:
        newcomer = me not in self.cluster.founders
        self.own = LocalHistory(me, RoundKey(RUN, "run", bytes(32), 0), lacks_state=newcomer)
        return self.own

    def stack(self, host: Host, settings: Settings) -> tuple[Any, Any]:
        averager, snapshots = load_averager("gossip")(host, settings), Snapshots(every_rounds=1)
        outer_loop = IndependentOuterLoop(
            self.own,
            averager,
            state=self.outer_state(host),
            trainer=self.trainer,
            wall=host.clock.wall,
            snapshots=snapshots,
            compare=self.members.compare,
            spread_limit=SPREAD_LIMIT,
        )
        peers, whole = self.members.peers, lambda: not outer_loop.seeks_state
        state_sync = IndependentStateSync(
            host, settings, snapshots=snapshots, key=lambda: self.own.key, hints=peers, has_state=whole
        )
        return outer_loop, state_sync


class SessionCluster(SimSwarm):
    """A network, and the peers on it. The founders are in the first roster."""

    def __init__(self, path: Path, founders: str = "abc", kind: type[SessionPeer] = SessionPeer) -> None:
        super().__init__()
        self.kind, self.settings = kind, dict[str, Any]()  # what differs from the usual `Settings`
        self.path, self.founders = path, tuple(Member(name) for name in founders)
        self.peers: dict[PeerId, SessionPeer] = {}
        self.tasks: dict[PeerId, asyncio.Task[None]] = {}

    def add(
        self, name: PeerId, run_rounds: int = 4, rounds: int | None = None, wait: int = 1, step_seconds: float = 0.2
    ) -> SessionPeer:
        peer = self.peers[name] = self.kind(
            self, name, step_seconds, run_rounds=run_rounds, rounds=rounds, wait_for_peers=wait
        )
        self.tasks[name] = self.spawn(name, peer.live())
        return peer

    def all(self, names: Iterable[str] = "abc", **limits: Any) -> list[SessionPeer]:
        return [self.add(name, **limits) for name in names]

    async def end(self, names: Iterable[str] | None = None, seconds: float = 300.0) -> None:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(self.tasks[name] for name in (names or list(self.tasks))))
