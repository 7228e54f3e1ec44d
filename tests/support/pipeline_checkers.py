"""What must hold of a pipeline, judged on the events of all its peers (docs/pipeline-protocol.md).

counted-once      a microbatch counts at most once in each stage, over all replicas and incarnations
counted-below     what a stage has counted, the stage after it has counted before
same-weights      a count follows a grant and a forward of the same replica, in the forward's epoch: the present one
                  or, with lookahead A, the one before, if a step lies between them
full-steps        counted + leased never exceeds B + A; a step holds B to B + A microbatches, and leaves no lease whose
                  forward is more than one step old; without lookahead no lease at all
hops              what a replica takes from the stage before comes from one that has forwarded the microbatch; it has a
                  lease for it, and takes it once
tokens            the tokens that a peer offers are those of the microbatches that it has stepped on since its anchor
calls             no call lasts for more than a second after its driver has lost the replica
accounted         each microbatch that a driver started is done, abandoned with a reason, or was in flight at its end
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from protocols.base import Member
from protocols.pipeline.settings import PipelineEvent, PipelineSettings
from tests.support.checkers import Violation

NOTICED_SECONDS = 1.0

Microbatch = tuple[Member, int]


@dataclass(slots=True)
class _Replica:
    """One replica's present step."""

    leased: dict[Microbatch, int | None] = field(default_factory=dict)  # -> the epoch of its forward
    handed: set[Microbatch] = field(default_factory=set)  # of those that are leased
    counted: set[Microbatch] = field(default_factory=set)
    epoch: int = 0
    oldest: int = 0  # epoch of the weights in which a backward may run


class PipelineJudge:
    """Reads events in the order in which they happened."""

    def __init__(self, settings: PipelineSettings) -> None:
        self.found: list[Violation] = []
        self.counted: list[set[Microbatch]] = [set() for _ in range(settings.stages)]
        self.ended: dict[Microbatch, str] = {}
        self.started: set[Microbatch] = set()
        self._forwarders: dict[Microbatch, set[tuple[int, Member]]] = {}  # stages and replicas
        self._settings = settings
        self._replicas: dict[Member, _Replica] = {}

    def read(self, event: PipelineEvent) -> None:
        replica = self._replicas.setdefault(event.replica, _Replica())
        if event.kind in ("asked", "waiting", "answered", "lost"):  # what drivers do and see
            return
        oldest = replica.oldest if event.kind in ("forwarded", "counted") else replica.epoch
        if not oldest <= event.epoch <= replica.epoch and event.kind not in ("ended", "done", "abandoned"):
            self._violate("same-weights", event, f"in epoch {event.epoch}, and its replica is in {replica.epoch}")
        handle = getattr(self, f"_{event.kind}", None)
        if handle:
            handle(event, replica)

    def _violate(self, invariant: str, event: PipelineEvent, detail: str) -> None:
        what = f"stage {event.stage}, microbatch {event.number} of {event.origin.peer}: {detail}"
        self.found.append(Violation(invariant, event.replica.peer, 0, what))

    def _granted(self, event: PipelineEvent, replica: _Replica) -> None:
        microbatch = event.origin, event.number
        replica.leased[microbatch] = None
        replica.handed.discard(microbatch)
        if event.stage == 0:
            self.started.add(microbatch)
            if len(replica.leased) > self._settings.window(1):
                self._violate("window", event, f"{len(replica.leased)} microbatches are in flight")
        if len(replica.leased) + len(replica.counted) > self._settings.batches + self._settings.lookahead:
            self._violate("full-steps", event, f"{len(replica.leased)} leased beside {len(replica.counted)} counted")

    def _handed(self, event: PipelineEvent, replica: _Replica) -> None:
        microbatch = event.origin, event.number
        if event.sender is None or (event.stage - 1, event.sender) not in self._forwarders.get(microbatch, ()):
            self._violate("hops", event, f"from {event.sender}, which has not forwarded it in the stage before")
        if microbatch not in replica.leased:
            self._violate("hops", event, "without a lease")
        if microbatch in replica.handed:
            self._violate("hops", event, "a second time")
        replica.handed.add(microbatch)

    def _forwarded(self, event: PipelineEvent, replica: _Replica) -> None:
        microbatch = event.origin, event.number
        self._forwarders.setdefault(microbatch, set()).add((event.stage, event.replica))
        if microbatch in replica.leased:  # else its driver was lost meanwhile
            replica.leased[microbatch] = event.epoch

    def _counted(self, event: PipelineEvent, replica: _Replica) -> None:
        microbatch, stage = (event.origin, event.number), event.stage
        if microbatch not in replica.leased:
            self._violate("same-weights", event, "counted without a lease")
        elif stage < self._settings.last and replica.leased[microbatch] != event.epoch:
            self._violate("same-weights", event, f"its forward was in epoch {replica.leased[microbatch]}")
        if microbatch in self.counted[stage]:
            self._violate("counted-once", event, "counted twice")
        if stage < self._settings.last and microbatch not in self.counted[stage + 1]:
            self._violate("counted-below", event, f"stage {stage + 1} has not counted it")
        replica.leased.pop(microbatch, None)
        replica.counted.add(microbatch)
        self.counted[stage].add(microbatch)
        if stage == 0:
            self.ended.setdefault(microbatch, "")

    def _ended(self, event: PipelineEvent, replica: _Replica) -> None:
        microbatch = event.origin, event.number
        if microbatch not in replica.leased:
            return  # voided
        del replica.leased[microbatch]
        if event.stage == 0:
            self.ended.setdefault(microbatch, "")

    def open(self, origins: Collection[Member]) -> list[Microbatch]:
        """Microbatches of these drivers that have not ended."""
        return sorted(each for each in self.started - self.ended.keys() if each[0] in origins)

    def _stepped(self, event: PipelineEvent, replica: _Replica) -> None:
        batches, lookahead, counted = self._settings.batches, self._settings.lookahead, len(replica.counted)
        if not batches <= counted <= batches + lookahead or (replica.leased and not lookahead):
            self._violate("full-steps", event, f"{counted} counted and {len(replica.leased)} leased")
        for (origin, number), epoch in replica.leased.items():
            if epoch is not None and epoch < replica.epoch:
                self._violate("full-steps", event, f"{number} of {origin.peer} was forwarded before the last step")
        replica.counted.clear()
        replica.oldest = replica.epoch if lookahead else replica.epoch + 1
        replica.epoch += 1

    def _voided(self, event: PipelineEvent, replica: _Replica) -> None:
        replica.leased.clear()
        replica.counted.clear()
        replica.epoch += 1
        replica.oldest = replica.epoch

    def _done(self, event: PipelineEvent, replica: _Replica) -> None:
        self._close(event, "done")

    def _abandoned(self, event: PipelineEvent, replica: _Replica) -> None:
        self._close(event, "abandoned")
        if not event.why:
            self._violate("accounted", event, "abandoned without a reason")

    def _close(self, event: PipelineEvent, how: str) -> None:
        microbatch = event.origin, event.number
        if microbatch not in self.started:
            self._violate("accounted", event, f"{how}, and it was never started")
        if before := self.ended.setdefault(microbatch, ""):
            self._violate("accounted", event, f"{how}, and {before} before")
        self.ended[microbatch] = how


def check(
    events: Sequence[tuple[float, PipelineEvent]], settings: PipelineSettings, finished: Collection[Member] = ()
) -> list[Violation]:
    """Every violation of these events: (virtual seconds, event), in the order in which they happened."""
    judge = PipelineJudge(settings)
    for _, event in events:
        judge.read(event)
    found = [Violation("accounted", member.peer, 0, f"microbatch {number} has no end") for member, number in
             judge.open(finished)]  # fmt: skip
    return judge.found + found + overlong_calls(events, finished)


def overlong_calls(events: Sequence[tuple[float, PipelineEvent]], finished: Collection[Member] = ()) -> list[Violation]:
    """Calls of drivers to replicas that they had lost. Events of kind `lost`, which a world adds, name both."""
    called: dict[tuple[Member, Member], dict[int, float]] = {}  # driver and replica: microbatch, and when it was lost
    found = []

    def end(call: tuple[Member, Member], number: int, time: float) -> None:
        if (since := called[call].pop(number)) + NOTICED_SECONDS < time:
            what = f"microbatch {number}: a call to {call[1].peer} ended {time - since:.1f} s after it was lost"
            found.append(Violation("calls", call[0].peer, 0, what))

    for time, event in events:
        call = event.origin, event.replica
        if event.kind == "waiting":
            called.setdefault(call, {})[event.number] = math.inf
        elif event.kind == "answered":
            end(call, event.number, time)
        elif event.kind == "lost":
            called[call] = dict.fromkeys(called.get(call, ()), time)
    for call in called:
        for number in tuple(called[call]) if call[0] in finished else ():
            end(call, number, events[-1][0])
    return found
