"""A simulated swarm: real protocol and outer loop code, many peers in one thread, on virtual time, from one seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from node.outer.activity import Activity
from node.outer.error_feedback import feedback
from node.outer.outer_loop import OuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.state import OuterSGD, OuterState
from node.tasks.paced import Paced
from node.training.trainer import Learner
from protocols.aio import task_group
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import Host, Member, PeerId, Settings, Trainer, Vector
from protocols.blobs.parts import PartCache
from protocols.butterfly.averager import Butterfly
from protocols.history.chain import Chain
from protocols.registry import load_averager
from protocols.sync.chain_sync import ChainSync
from protocols.sync.snapshot import Snapshots
from protocols.vectors.codec import codec
from protocols.vectors.views import fragment_sizes
from protocols.wire import MAX_ROSTER
from tests.sim import loop as simloop
from tests.sim.account import Account, Head
from tests.sim.host import DirectoryFaults, sim_host
from tests.sim.injection import Injector
from tests.sim.neighbours import Neighbours
from tests.sim.scenario import OUTER_MOMENTUM, OUTER_RATE, Scenario, resolve
from tests.sim.swarm import SimSwarm
from tests.sim.trace import Trace
from tests.sim.transport import SimTransport
from tests.support import checkers
from tests.support.disguises import lying
from tests.support.inline_trainer import InlineTrainer

RUN = bytes(range(32))
GRACE_SECONDS = 120.0
"""After the last round, until messages in transit have arrived and deadlines have passed."""
HEALED_SECONDS = 600.0
"""Within this time after the healing, all peers must be in the roster and commit `HEALED_ROUNDS` further rounds."""
HEALED_ROUNDS = 2
CONTRIBUTE_ROUNDS = 3
"""With clusters, the mean of one of the first so many rounds that begin after the healing holds work of all peers. In a
run without such faults, so do all means after the first so many rounds."""
LEVEL_ROUNDS, LEVEL_TASKS = 5, 4
"""In its last `LEVEL_ROUNDS` rounds a peer may have `World.level_tasks` tasks more than in its first ones."""


@dataclass(slots=True)
class Outcome:
    scenario: Scenario
    histories: dict[PeerId, list[checkers.Report]]
    violations: list[checkers.Violation]
    virtual_seconds: float
    trace: Trace
    sent_bytes: dict[PeerId, int]
    liars: tuple[PeerId, ...] = ()
    anchors: dict[PeerId, torch.Tensor] = field(default_factory=dict)
    rounds_could: int = 0
    rounds_did: int = 0

    def reports(self, outcome: str) -> list[checkers.Report]:
        return [
            r for peer, history in self.histories.items() if peer not in self.liars
            for r in history if r["outcome"] == outcome
        ]  # fmt: skip


class World(SimSwarm):
    FORKS = True
    """Whether peers fork when most of their roster is gone."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario = resolve(scenario)
        assert scenario.uplinks and scenario.step_seconds and scenario.faults
        self.rng = random.Random(f"faults/{scenario.seed}")
        jitter = random.Random(f"jitter/{scenario.seed}") if scenario.jitter else None
        super().__init__(latency_seconds=self.rng.uniform(0.005, 0.08), jitter=jitter)
        self.trace = self.network.trace
        self.directory_faults = DirectoryFaults(random.Random(f"hearsay/{scenario.seed}"))
        self.injector = Injector(scenario.faults, self.network, self.directory_faults, self._revive, self.pause)
        self.paused: dict[PeerId, Activity] = {}
        self.activities: dict[PeerId, Activity] = {}
        self.populate(scenario.names())
        self.liars = tuple(scenario.faults.lies())
        self.account = Account(self.network.contacts.outages, self.liars, scenario.clusters)
        self.replicas: dict[PeerId, ReplicatedOuterLoop] = {}
        self.healed_at: float | None = None
        self._done = asyncio.Event()
        self._left: list[checkers.Violation] = []
        self._early: list[checkers.Violation] = []
        self._tasks: dict[Member, list[int]] = {}  # of each incarnation, at the start of each of its rounds

    def populate(self, peers: tuple[PeerId, ...]) -> None:
        """The first of these peers are the first roster; the others observe until a record admits them."""
        self.peers, voters = peers, self.scenario.voters or MAX_ROSTER
        self.histories: dict[PeerId, list[checkers.Report]] = {peer: [] for peer in peers}
        self.roster, self.observers = tuple(map(Member, peers[:voters])), peers[voters:]
        self.neighbours = Neighbours(peers, peers[:voters])
        self.neighbours.limit(self.network.contacts)

    def learner(self, index: int) -> Learner:
        assert self.scenario.elements
        return Paced(self.scenario.elements, seed=self.scenario.seed * 1000 + index, tokens_per_step=256)

    def trainer(self, index: int) -> InlineTrainer:
        assert self.scenario.step_seconds
        steps, seconds = self.scenario.inner_steps, self.scenario.step_seconds[index]
        return InlineTrainer(self.learner(index), steps, seconds, self.scenario.fragments)

    def trainer_on(self, index: int, host: Host) -> Trainer:
        return self.trainer(index)

    def averaging_host(self, index: int, host: Host) -> Host:
        return host

    def scope(self, index: int) -> str:
        return "run"

    def founders_of(self, index: int) -> tuple[Member, ...]:
        return self.roster

    def sharing(self, index: int) -> tuple[PeerId, ...]:
        return self.peers

    def groups(self) -> tuple[tuple[PeerId, ...], ...]:
        return tuple(dict.fromkeys(self.sharing(index) for index in range(len(self.peers))))

    def can_train(self, peer: PeerId) -> bool:
        return True

    def outer(self) -> OuterSGD:
        """It decays, so that members agree only if they agree on the number of the round as well."""
        return OuterSGD(OUTER_RATE, OUTER_MOMENTUM, self.scenario.rounds, decay=0.5)

    async def run(self) -> float:
        for peer, rate in zip(self.peers, self.scenario.uplinks or (), strict=True):
            self.network.join(peer, rate)
        mains = [self._start(peer) for peer in self.peers]
        self.injector.start()
        if self.scenario.breaks:
            await self._break_and_heal()
        else:
            ends = {*self.peers} - {*self.liars, *self.observers}
            await asyncio.gather(*(main for peer, main in zip(self.peers, mains, strict=True) if peer in ends))
            if self.observers:  # they follow the last round
                await asyncio.sleep(GRACE_SECONDS)
        await self._end()
        return self.now

    async def _break_and_heal(self) -> None:
        await self._wait(self.scenario.breaking_seconds or 0.0)
        self.healed_at = self.now
        self.injector.heal()
        await self._wait(HEALED_SECONDS)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._done.wait()

    async def _end(self) -> None:
        for peer, node in self.network.nodes.items():
            if node.process.alive and (self.scenario.breaks or peer in (*self.liars, *self.observers)):
                self.network.kill(peer)
        await asyncio.sleep(GRACE_SECONDS)
        self._left = self._leaks()  # now, because the loop ends the tasks that still run

    def _start(self, peer: PeerId) -> asyncio.Task[None]:
        main = self.spawn(peer, self._peer(self.peers.index(peer), self.network.transports[peer]))
        main.add_done_callback(self._ended)
        return main

    def _revive(self, peer: PeerId) -> None:
        self.network.restart(peer)
        self._start(peer)

    # -- pauses -------------------------------------------------------------------------------------------------------

    def pause(self, peer: PeerId, wanted: Activity) -> None:
        """Ask a peer to rest, to be away or to work again; its later incarnations begin so."""
        if wanted is not self.paused.get(peer, Activity.WORK):
            self.paused[peer] = wanted
            if self.network.nodes[peer].process.alive and peer in self.replicas:
                with self.network.nodes[peer].process.entered():  # what it sends dies with it
                    self.replicas[peer].pause(wanted)

    def restart_paused(self, outer_loop: OuterLoop) -> None:
        outer_loop.pause(self.paused.get(outer_loop.me.peer, Activity.WORK))

    def tell_activity(self, me: PeerId, activity: Activity) -> None:
        self.activities[me] = activity
        self.network.contacts.tell(me, activity is Activity.AWAY)

    def _ended(self, main: asyncio.Task[None]) -> None:
        error = None if main.cancelled() else main.exception()
        if isinstance(error, Exception):
            self.network.bugs.append(error)
            self._done.set()

    async def _peer(self, index: int, transport: SimTransport) -> None:
        me, whole_host = transport.me, self._host(transport)
        trainer = self.trainer_on(index, whole_host)
        host = self.averaging_host(index, whole_host)
        anchor = torch.empty(trainer.layout.sizes()[0])
        await trainer.read(anchor)
        outer_loop, sync = self.stack(index, host, self._settings(index, trainer, transport), trainer, anchor)
        outer_loop.activity.announce = partial(self.tell_activity, me)
        self.replicas[me] = outer_loop
        await self.restored(outer_loop)
        self.restart_paused(outer_loop)
        await outer_loop.settle()
        async with task_group() as group:
            background = group.create_task(sync.run())
            self.entering(me, outer_loop.chain.head)
            async for report in outer_loop.rounds(sync, lambda: self.goes_on(me)):
                await self.after_round(index, trainer)
                self.reported(asdict(report))
                self.entering(me, outer_loop.chain.head)
            background.cancel()

    def stack(
        self, index: int, host: Host, settings: Settings, trainer: Trainer, anchor: Vector
    ) -> tuple[ReplicatedOuterLoop, Any]:
        part_cache, snapshots = PartCache(host), Snapshots()
        founders, count = self.founders_of(index), self.scenario.fragments
        chain = Chain(RUN, self.scope(index), founders, bytes(32), fragments=count)
        sync = ChainSync(
            host,
            settings,
            chain=chain,
            snapshots=snapshots,
            part_cache=part_cache,
            hints=lambda: self.sharing(index),
            on_better=lambda branch: averager.supersede(),
        )
        make = load_averager(self.scenario.protocol)
        averager = make(host, settings, part_cache, sync.hear, chain.lineage_of)
        outer_loop = ReplicatedOuterLoop(
            chain,
            averager,
            state=OuterState(anchor, self.outer(), host.compute),
            trainer=trainer,
            wall=host.clock.wall,
            feedback=feedback(codec(settings.codec), len(anchor), host.compute),
            snapshots=snapshots,
            overlaps=self.scenario.overlaps,
            alone=getattr(trainer, "train_alone", None),
            least_members=settings.least_members,
            lead=lambda: str(averager.lead) if settings.clusters else "",
        )
        return outer_loop, sync

    def _host(self, transport: SimTransport) -> Host:
        me, scenario = transport.me, self.scenario
        assert scenario.faults
        skew_seconds = scenario.faults.skew_seconds(me)
        host = sim_host(self.network, transport, scenario.seed, self.entries, skew_seconds, self.directory_faults)
        if me in self.liars:
            lie, signer = scenario.faults.lies()[me], host.signer
            transport.disguise = lying(lie, signer)
        return host

    def _settings(self, index: int, trainer: Trainer, transport: SimTransport) -> Settings:
        scenario = self.scenario
        assert scenario.codec and scenario.uplinks
        return Settings(
            codec=scenario.codec,
            elements=fragment_sizes(sum(trainer.layout.sizes()), scenario.fragments),
            chunk_elements=scenario.chunk_elements,
            bandwidth=scenario.uplinks[index],
            incarnation=transport.node.incarnation,
            overlaps=scenario.overlaps,
            voters=len(self.roster) if scenario.clusters else MAX_ROSTER,
            clusters=scenario.clusters,
            robust=scenario.robust,
        )

    # -- rounds and their reports -------------------------------------------------------------------------------------

    def goes_on(self, peer: PeerId) -> bool:
        if peer in self.observers and not self.scenario.breaks:  # it may miss a round and fetch the state
            return self.replicas[peer].chain.head.key.round < self.scenario.rounds
        return self.scenario.breaks or len(self.histories[peer]) < self.scenario.rounds

    def entering(self, peer: PeerId, head: Head) -> None:
        self.account.entered(peer, head, self.now)
        for voter in self.neighbours.elect([member.peer for member in head.roster]):
            self.network.contacts.acquaint(voter, self.neighbours.of(voter))
        if peer in self.network.nodes:
            node = self.network.nodes[peer]
            self._tasks.setdefault(node.member, []).append(len(node.process.tasks))

    def reported(self, report: checkers.Report) -> None:
        """Record the report of a peer's round, unless the peer is dead."""
        process = simloop.PROCESS.get()
        if process is None or not process.alive:
            return
        self.histories[report["peer"]].append(report)
        self.account.reported(report, self.now)
        if report["peer"] in self.liars:
            return
        self._early += called_early(self.replicas.get(report["peer"]), report)
        if self.satisfied():
            self._done.set()

    def satisfied(self) -> bool:
        return self.healed_at is not None and self.account.whole(self.peers, self.healed_at) >= HEALED_ROUNDS

    def met_since(self, peer: PeerId, number: int) -> bool:
        """Whether a peer has averaged with others in that round or later; always true where rounds are voted on."""
        return True

    async def restored(self, outer_loop: ReplicatedOuterLoop) -> None:
        """Hook for worlds with disks: restore the state that this incarnation starts from."""

    async def after_round(self, index: int, trainer: Trainer) -> None:
        """Hook for worlds that measure something between rounds."""

    def check(self, histories: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        """The violations in these histories, and rounds that a pause has called early."""
        return checkers.check(histories) + self._early

    @property
    def level_tasks(self) -> int:
        """Tasks by which a peer's number may rise and fall without a leak. An associate that is admitted listens to all
        other voters from then on.
        """
        return LEVEL_TASKS + (self.scenario.voters if self.scenario.clusters else 0)

    def leaks(self) -> list[checkers.Violation]:
        return self._left

    def _leaks(self) -> list[checkers.Violation]:
        found = []
        for node in (*self.network.past, *self.network.nodes.values()):
            if node.process.tasks or node.ends:
                what = f"{len(node.process.tasks)} tasks and {len(node.ends)} streams are left over"
                found.append(checkers.Violation("no-leak", node.peer, self.scenario.rounds, what))
        for member, counts in self._tasks.items():  # a killed peer leaves no tasks, so its growth is judged here
            if len(counts) < 2 * LEVEL_ROUNDS:
                continue  # too few rounds: they are all among faults, where numbers vary
            if (now := min(counts[-LEVEL_ROUNDS:])) > max(counts[:LEVEL_ROUNDS]) + self.level_tasks:
                what = f"{now} tasks at the beginning of its last rounds, {max(counts[:LEVEL_ROUNDS])} of its first"
                found.append(checkers.Violation("no-leak", member.peer, len(counts), what))
        return found

    def progress(self, honest: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        found = self._healed(honest) if self.scenario.breaks else self._undisturbed(honest)
        return found + list(self._accused(honest))

    def _healed(self, honest: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        if not self.satisfied():
            rounds = self.account.whole(self.peers, self.healed_at or 0.0)
            what = f"{rounds} rounds of all peers in {HEALED_SECONDS:g} s after all was healed, not {HEALED_ROUNDS}"
            return [checkers.Violation("progress", "", 0, what)]
        found = list(checkers.one_branch(honest))
        if self.scenario.clusters:
            count = self.account.rounds_until_all_count(self.peers, self.healed_at or 0.0)
            if count is None or count > CONTRIBUTE_ROUNDS:
                what = f"all count in round {count} after the healing, not by round {CONTRIBUTE_ROUNDS}"
                found.append(checkers.Violation("contributes", "", 0, what))
        return found

    def _undisturbed(self, honest: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        """Every honest peer must commit every round, and an honest peer must name the liar."""
        found = []
        for peer, history in honest.items():
            if peer in self.observers:
                behind = self.scenario.rounds - self.replicas[peer].chain.head.key.round
                if behind > 0:
                    found.append(checkers.Violation("progress", peer, len(history), f"{behind} rounds behind"))
                continue
            if len(history) < self.scenario.rounds:
                found.append(checkers.Violation("progress", peer, len(history), "left out of the roster"))
            for report in history:
                if report["outcome"] not in ("committed", "alone"):
                    found.append(checkers.Violation("progress", peer, report["round"], f"outcome {report['outcome']}"))
        for liar in self.liars:
            if len(self.peers) > 1 and not any(liar in r["blamed"] for history in honest.values() for r in history):
                found.append(checkers.Violation("named", liar, 0, f"no peer named the lie {self.scenario.lie!r}"))
        return found + (list(self._uncounted(honest)) if self.scenario.clusters else [])

    def _uncounted(self, honest: dict[PeerId, list[checkers.Report]]) -> Iterator[checkers.Violation]:
        """Honest peers without work in a mean after the first ones, unless too slow for a step in each round. A liar
        that aggregates can waste the work of its cluster.
        """
        steps = dict(zip(self.peers, self.scenario.step_seconds or (), strict=True))
        able = [peer for peer in honest if 2.0 * steps[peer] < self.scenario.inner_steps * min(steps.values())]
        for number, absent in self.account.absent(able).items():
            if number >= CONTRIBUTE_ROUNDS and absent:
                yield checkers.Violation("contributes", "", number, f"its mean is without {', '.join(sorted(absent))}")

    def _accused(self, honest: dict[PeerId, list[checkers.Report]]) -> Iterator[checkers.Violation]:
        """With clusters, honest peers that honest peers have refused anything or, without faults, name for more than a
        norm or a weight above the limit.
        """
        for report in (report for history in honest.values() for report in history if self.scenario.clusters):
            for peer, why in report["blamed"].items():
                is_harmless = self.scenario.breaks or "clipped" in why or "clamped" in why
                if peer in honest and ("refused" in why or not is_harmless):
                    yield checkers.Violation("accused", report["peer"], report["round"], f"names {peer}: {why}")


def called_early(outer_loop: OuterLoop | None, report: checkers.Report) -> Iterator[checkers.Violation]:
    """A round with a mean was called because work was complete, or because a member left; never because one paused."""
    averager = getattr(outer_loop, "averager", None)
    session = averager._round if isinstance(averager, Butterfly) else None
    if session is None or session.head.key.lineage.hex() != report["parent"] or report["outcome"] != "committed":
        return
    resolved, roster = session.call.resolved, session.head.roster
    offers = resolved.plan.offers if isinstance(resolved, ResolvedPlan) else ()
    leave = {offer.member for offer in offers if offer.leaving} >= set(roster)
    planned = {offer.member.peer for offer in offers}
    # A later coordinator calls without a member that is silent. Its complete work may have begun the call.
    left_out = {member.peer for member in roster} - planned - {*session.call.incomplete()}
    if offers and not leave and not left_out and not any(offer.complete for offer in offers):
        what = f"called with {[offer.tokens for offer in offers]} tokens, none of them complete"
        yield checkers.Violation("early", report["peer"], report["round"], what)


def play(scenario: Scenario, world_type: Callable[[Scenario], World] = World) -> Outcome:
    world = world_type(scenario)

    seconds = world.play(world.run)
    honest = {peer: history for peer, history in world.histories.items() if peer not in world.liars}
    violations = world.check(honest) + world.leaks() + world.progress(honest)
    sent = {peer: world.network.totals(peer)[0] for peer in world.peers}
    anchors = {peer: outer_loop.anchor for peer, outer_loop in world.replicas.items()}
    outcome = Outcome(world.scenario, world.histories, violations, seconds, world.trace, sent, world.liars, anchors)
    outcome.rounds_could, outcome.rounds_did = world.account.shares()
    return outcome
