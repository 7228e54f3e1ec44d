"""A simulated swarm whose model is cut into stages: peer i holds stage i mod S, and averages with those of its stage.

Peers of stage 0 drive microbatches of the paced task through all stages. What became of each microbatch is recorded and
judged (`tests.support.pipeline_checkers`), beside the rounds of each stage.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from node.outer.activity import Activity
from node.session.pipeline_session import settled_rounds
from node.tasks.paced_stage import SIZES, PacedStage
from node.training.stage_learner import StageCompute
from node.training.stage_replica import LeasedStage, OuterVersion, StageSeconds
from node.training.stage_trainer import DrivingTrainer, ServingTrainer, StageTraining
from protocols.aio import loop_time
from protocols.base import Buffer, Host, LocalProgress, Member, PeerId, Settings, Trainer, stage_scope
from protocols.pipeline.admission import StepAdmission
from protocols.pipeline.driving import PipelineDriver
from protocols.pipeline.job import Payload
from protocols.pipeline.serving import StageServer
from protocols.pipeline.settings import PipelineEvent, PipelineSettings
from protocols.pipeline.stages import StageClock, StageMembers, by_stage, lacks_majority
from protocols.pipeline.ways import Chains
from protocols.streams.endpoint import ProtocolEndpoint
from tests.sim import loop as simloop
from tests.sim.account import Head
from tests.sim.contact import HEARTBEAT_SECONDS
from tests.sim.inline_stage import InlineStage
from tests.sim.scenario import Scenario
from tests.sim.world import HEALED_ROUNDS, HEALED_SECONDS, RUN, World
from tests.support import checkers, pipeline_checkers

TOKENS = 32
"""Tokens of a microbatch of the paced task."""
FORWARD_SHARE = 1 / 3
"""Of a stage's time for a microbatch: a backward computes the forward again, but an average one is twice a forward."""

STREAM_TASKS = 3
"""Tasks of a replica for each stream that a driver holds open to it."""


class Announcements:
    """What one incarnation of a peer knows of the others' stages and rounds."""

    def __init__(self, world: PipelineWorld) -> None:
        self._world = world
        self._completed: dict[PeerId, int] = {}

    def stage_of(self, peer: PeerId) -> int | None:
        return self._world.stage(peer)

    def rounds_of(self, peer: PeerId) -> int:
        return self._completed.get(peer, 0)

    def rests(self, peer: PeerId) -> bool:
        return self._world.activities.get(peer, Activity.WORK) is not Activity.WORK

    def hear(self, peer: PeerId, rounds: int) -> None:
        self._completed[peer] = max(rounds, self._completed.get(peer, 0))


class PipelineWorld(World):
    microbatch_tokens = TOKENS

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.events: list[tuple[float, PipelineEvent]] = []
        self.announcements: dict[PeerId, Announcements] = {}
        self.admissions: dict[Member, StepAdmission] = {}
        self.found: list[checkers.Violation] = []
        self.work: dict[PeerId, InlineStage] = {}
        self.drivers: dict[PeerId, PipelineDriver] = {}
        self._beats: asyncio.Task[None] | None = None
        self._completed: dict[Member, int] = {}
        self._counted: Counter[Member] = Counter()
        self._stepped: Counter[Member] = Counter()
        self._trained: dict[PeerId, int] = {}

    def _start(self, peer: PeerId) -> asyncio.Task[None]:
        if self._beats is None:
            self._beats = asyncio.get_running_loop().create_task(self._beat())
        return super()._start(peer)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for me, rounds in self._completed.items():
                if self.network.nodes[me.peer].member == me and self.network.nodes[me.peer].process.alive:
                    self._tell(me.peer, rounds)

    def announce(self, me: Member, rounds: int) -> None:
        """Announce the completed rounds of a driver to the others: at once, and again with every heartbeat."""
        self._completed[me] = max(rounds, self._completed.get(me, 0))
        self._tell(me.peer, self._completed[me])

    def _tell(self, source: PeerId, rounds: int) -> None:
        for peer in self.peers:
            if peer != source and peer in self.announcements:
                self.network.travel(source, peer, partial(self._hear, peer, source, rounds))

    def _hear(self, peer: PeerId, source: PeerId, rounds: int) -> None:
        self.announcements[peer].hear(source, rounds)

    def stage(self, peer: PeerId) -> int:
        return self.peers.index(peer) % self.scenario.stages

    def stage_compute(self, index: int, me: Member) -> StageCompute:
        assert self.scenario.elements
        return PacedStage(
            self.scenario.elements, self.scenario.seed * 1000 + index, TOKENS, f"{me.peer}/{me.incarnation}"
        )

    def replica_on(self, index: int, me: Member) -> InlineStage:
        return InlineStage(self.stage_compute(index, me), self.scenario.inner_steps, self.seconds(index))

    def pipeline(self) -> PipelineSettings:
        return PipelineSettings(RUN, self.scenario.stages, self.scenario.batches, SIZES, self.scenario.lookahead)

    @property
    def chains(self) -> Chains:
        return Chains.ALWAYS if self.scenario.chains else Chains.NEVER

    def upload(self, index: int) -> float:
        """Bytes/s of a peer's line, as it knows them; 0 if it does not."""
        return self.scenario.uplinks[index] if self.scenario.uplinks else 0.0

    def check_payload(self, data: Buffer, payload: Payload) -> None:
        """Nothing: the hashes of the paced task are always finite."""

    def trained_rounds(self, peer: PeerId) -> int:
        """Rounds whose result a peer's outer parameters have."""
        return settled_rounds(self.replicas[peer].chain)

    def outer_version(self, peer: PeerId) -> OuterVersion | None:
        change = self.replicas[peer].change
        return None if change is None else OuterVersion(self.trained_rounds(peer), change)

    def seconds(self, index: int) -> StageSeconds:
        """Of a peer's jobs: an inner step of B microbatches takes it `step_seconds`."""
        assert self.scenario.step_seconds
        microbatch = self.scenario.step_seconds[index] / self.scenario.batches
        return StageSeconds(FORWARD_SHARE * microbatch, (1 - FORWARD_SHARE) * microbatch, 0.01 * microbatch)

    # -- what a peer is built of --------------------------------------------------------------------------------------

    def trainer_on(self, index: int, host: Host) -> Trainer:
        """A driver's trainer in stage 0, a server's in the others."""
        me = self.network.nodes[host.me].member
        stage, settings = self.stage(host.me), self.pipeline()
        directory = self.announcements[host.me] = Announcements(self)
        replica = self.replica_on(index, me)
        self.work[me.peer], work = replica, LeasedStage(replica, partial(self.outer_version, me.peer))
        self.network.contacts.views[me.peer].on_lost = partial(self._lose, me)
        alone = partial(self.lacks_majority, me, host)
        training = StageTraining(me, stage, replica, lambda: self.is_member(me), alone, self.watch)
        averaging = Settings("fp32", replica.layout.sizes(), incarnation=me.incarnation)
        endpoint = ProtocolEndpoint(host, averaging)
        if stage == 0:
            driver = PipelineDriver(
                endpoint,
                settings,
                work=work,
                directory=directory,
                check=lambda data, payload: self.check_payload(data, payload),
                chains=self.chains,
                upload=lambda: self.upload(index),
                job_seconds=lambda: work.usual_seconds,
                watch=self.watch,
            )
            self.drivers[me.peer] = driver
            self.admissions[me] = driver.admission
            return self._checked(me, DrivingTrainer(training, driver, lambda rounds: self.announce(me, rounds)))
        clock = StageClock(directory)

        def drivers() -> tuple[Member, ...]:
            return by_stage(host.members.live(), directory, settings.stages)[0]

        server = StageServer(
            endpoint,
            settings,
            stage=stage,
            work=work,
            drivers=lambda: len(drivers()),
            trained=lambda: self.trained_rounds(me.peer),
            check=lambda data, payload: self.check_payload(data, payload),
            watch=self.watch,
        )
        self.admissions[me] = server.admission
        return self._checked(
            me, ServingTrainer(training, server.admission, lambda: clock.rounds(drivers(), loop_time()))
        )

    def _checked(self, me: Member, trainer: DrivingTrainer | ServingTrainer) -> Trainer:
        """The trainer, whose work is compared with the events of its steps."""
        train = trainer.train

        async def checked(*arguments: Any, **options: Any) -> LocalProgress:
            work = await train(*arguments, **options)
            due = self._stepped[me] * self.microbatch_tokens + work.carried
            if work.tokens != due:
                what = f"offers {work.tokens} tokens, and has stepped on {due} since its anchor"
                self.found.append(checkers.Violation("tokens", me.peer, 0, what))
            return work

        trainer.train = checked  # type: ignore[method-assign]
        return trainer

    def averaging_host(self, index: int, host: Host) -> Host:
        me = self.network.nodes[host.me].member
        members = StageMembers(host.members, self.announcements[host.me], self.stage(host.me), me)
        return replace(host, members=members)

    def scope(self, index: int) -> str:
        return stage_scope(self.stage(self.peers[index]))

    def founders_of(self, index: int) -> tuple[Member, ...]:
        return tuple(Member(peer) for peer in self.sharing(index))

    def sharing(self, index: int) -> tuple[PeerId, ...]:
        return self.of_stage(self.stage(self.peers[index]))

    def of_stage(self, stage: int) -> tuple[PeerId, ...]:
        return self.peers[stage :: self.scenario.stages]

    def can_train(self, peer: PeerId) -> bool:
        """Whether a peer is in touch with a peer of every other stage; each path needs one of them all."""
        stages = [stage for stage in range(self.scenario.stages) if stage != self.stage(peer)]
        open_ = partial(self.network.contacts.open, peer)
        return all(any(open_(other) for other in self.of_stage(stage)) for stage in stages)

    def is_member(self, me: Member) -> bool:
        """Whether what this peer trains counts."""
        outer_loop = self.replicas[me.peer]
        return me in outer_loop.chain.head.roster and not outer_loop.chain.lacks_state

    def lacks_majority(self, me: Member, host: Host) -> bool:
        return lacks_majority(self.replicas[me.peer].chain.head.roster, host.members.live())

    # -- what is seen -------------------------------------------------------------------------------------------------

    def watch(self, event: PipelineEvent) -> None:
        """An event of a living peer; the dead do nothing more."""
        process = simloop.PROCESS.get()
        if process is None or process.alive:
            self.events.append((asyncio.get_running_loop().time(), event))
            if event.kind == "counted":
                self._counted[event.replica] += 1
            elif event.kind == "stepped":
                self._stepped[event.replica] += self._counted.pop(event.replica)
            elif event.kind == "voided":
                self._stepped[event.replica] = self._counted[event.replica] = 0

    def _lose(self, me: Member, member: Member) -> None:
        node = self.network.nodes[me.peer]
        if node.process.alive and node.member == me:
            self.events.append((asyncio.get_running_loop().time(), PipelineEvent("lost", me, 0, 0, member, 0)))

    def entering(self, peer: PeerId, head: Head) -> None:
        super().entering(peer, head)
        if peer in self.replicas:
            trained = self._trained[peer] = self.replicas[peer].chain.trained
            furthest = max(self._trained.get(driver, 0) for driver in self.of_stage(0))
            if trained > furthest + 1:
                what = f"has trained {trained} rounds where stage 0 has trained {furthest}"
                self.found.append(checkers.Violation("clock", peer, trained, what))

    def satisfied(self) -> bool:
        """Whether enough rounds of all peers of each stage were committed since all was healed."""
        return self.healed_at is not None and self.whole_rounds() >= HEALED_ROUNDS

    def whole_rounds(self) -> int:
        """Rounds since all was healed, with all peers of the stage in their roster, of the stage with the fewest."""
        stages = range(self.scenario.stages)
        return min(self.account.whole(self.of_stage(stage), self.healed_at or 0.0) for stage in stages)

    def progress(self, honest: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        if not self.scenario.breaks:
            return super().progress(honest)
        if not self.satisfied():
            what = f"{self.whole_rounds()} rounds of all peers in {HEALED_SECONDS:g} s after all was healed"
            return [checkers.Violation("progress", "", 0, f"{what}, not {HEALED_ROUNDS}")]
        stages = [{peer: honest[peer] for peer in self.of_stage(stage)} for stage in range(self.scenario.stages)]
        return [violation for stage in stages for violation in checkers.one_branch(stage)]

    def check(self, histories: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        found = []
        for stage in range(self.scenario.stages):
            found += checkers.check({peer: histories[peer] for peer in self.of_stage(stage) if peer in histories})
        return found + self.found + pipeline_checkers.check(self.events, self.pipeline(), self._finished())

    def _finished(self) -> list[Member]:
        nodes = self.network.nodes
        return [me for me in self.admissions if nodes[me.peer].member == me and nodes[me.peer].process.alive]

    @property
    def level_tasks(self) -> int:
        """Each lane of each driver may hold a stream to a replica, or to none while there are others."""
        drivers = len(self.of_stage(0))
        return super().level_tasks + STREAM_TASKS * drivers * self.pipeline().window(drivers)

    def leaks(self) -> list[checkers.Violation]:
        found = [
            checkers.Violation("no-leak", me.peer, 0, f"{self.admissions[me].leased} leases are left over")
            for me in self._finished() if self.admissions[me].leased
        ]  # fmt: skip
        return super().leaks() + found
