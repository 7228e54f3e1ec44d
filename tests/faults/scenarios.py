"""What can be done to a swarm: each scenario draws a schedule from its seed: a list of steps, written before it begins.

A schedule is data. Who plays it (`tests/faults/nemesis.py`) does one step after the other, and tells when it was done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from protocols import LOOSE
from tests.faults.play import Limits
from tests.faults.points import ONE_ROLE_ONLY, POINTS

STRUCK = "the one struck"
"""Stands for the peer that the last trap has caught."""
_JOINERS = 8
_VOTERS_ONLY = ("excluded",)
_VOTERS_AIMS = ("decided_seconds", "excluded_seconds", "rounds_skipped", "skipped_share", "contributions_lost")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, or to wait for.

    wait            `amount` seconds
    kill            SIGKILL to `role` of each of `whom`: `peer`, its `worker`, its `p2pd`
    trap            SIGKILL to the first of `whom`, or of all, that comes to the point `role`; waits for it
    stop, wake      SIGSTOP and SIGCONT to `role`: `peer` alone, or `all` its processes
    part            nothing passes between `whom` and the others
    deafen          what the others send to `whom` vanishes
    mute            what `whom` send to the others vanishes
    lose            of all packets, or of those of `whom`, the share `amount` vanishes
    slow            the lines of `whom` carry `amount` bits per second
    straggle        the workers of `whom` run for the share `amount` of the time
    heal            all that lasts is over
    join            new peers, side by side, with nothing but the address of one that runs
    restart         peers that were killed, in their directories
    back            all peers, after all were killed: started again, with nothing but their directories
    finish          asked to leave, one after the other
    fill            the small disk of `whom` fills up
    flip, truncate  one bit of the newest checkpoint of `whom` flips, or it is cut short; `amount` is drawn with
    named           that `whom` have said so
    skew            the wall clocks of `whom` are `amount` seconds off
    move            the machines of `whom` get other addresses
    suspected       waits until all others believe `whom` dead
    excluded        waits until the rosters of all others are without `whom`
    settle          waits until all who run are in one mean
    """

    act: str
    whom: tuple[str, ...] = ()
    amount: float = 0.0
    role: str = ""

    def __str__(self) -> str:
        amount = f"{self.amount:g}" if self.amount else ""
        return " ".join(each for each in (self.act, ", ".join(self.whom), self.role, amount) if each)


Draw = Callable[[random.Random, int, Sequence[str]], list[Step]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of trouble.

    Attributes:
        about: what is done, in one line.
        draw: (generator, seed, names of the peers, the founder first) -> the schedule.
        network: whether it needs a network of namespaces.
    """

    about: str
    draw: Draw
    limits: Limits = field(default_factory=Limits)
    network: bool = False

    def schedule(self, name: str, seed: int, names: Sequence[str]) -> list[Step]:
        """The same for the same seed and peers."""
        return self.draw(random.Random(f"{name}/{seed}"), seed, names)


def _moment(rng: random.Random) -> Step:
    """Some moment of a round."""
    return Step("wait", amount=round(rng.uniform(0, 1.5), 2))


def _trap(rng: random.Random, point: str, names: Sequence[str]) -> Step:
    return Step("trap", () if point in ONE_ROLE_ONLY else (rng.choice(names),), role=point)


def _kill(points: Sequence[str]) -> Draw:
    """At one of these points."""

    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        return [_trap(rng, points[seed % len(points)], names)]

    return draw


def _kill_restart(points: Sequence[str]) -> Draw:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        first, second = points[seed % len(points)], points[(seed + len(points) // 2) % len(points)]
        restart = [Step("settle"), Step("restart", (STRUCK,)), Step("settle")]
        return [_trap(rng, first, names), *restart, _trap(rng, second, names), *restart[:2]]

    return draw


def _stop(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    victim, role = (rng.choice(names),), ("peer", "all")[seed % 2]
    waits = [Step("suspected", victim), Step("excluded", victim), Step("wait", amount=3)]
    return [_moment(rng), Step("stop", victim, role=role), *waits, Step("wake", victim, role=role)]


def _one(role: str) -> Draw:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        return [_moment(rng), Step("kill", (rng.choice(names),), role=role)]

    return draw


def _bootstrap(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [_moment(rng), Step("kill", (names[0],), role="peer"), Step("join", ("newcomer",))]


def _many(but: int) -> Draw:
    """Kill so many at once; all but so many, if negative."""

    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        return [_moment(rng), Step("kill", tuple(rng.sample(names, but % len(names))), role="peer")]

    return draw


def _partition(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    side = tuple(rng.sample(names, 1 if seed % 2 else len(names) // 2))
    return [_moment(rng), Step("part", side), Step("wait", amount=10), Step("heal")]


def _one_way(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [
        _moment(rng),
        Step(("deafen", "mute")[seed % 2], (rng.choice(names),)),
        Step("wait", amount=10),
        Step("heal"),
    ]


def _joiners(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [_moment(rng), Step("join", tuple(f"joiner-{number}" for number in range(_JOINERS)))]


def _rolling(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    steps = []
    for name in rng.sample(names, len(names)):
        steps += [Step("join", (f"after-{name}",)), Step("settle"), _moment(rng), Step("finish", (name,))]
    return steps


def _everyone(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    everybody = tuple(names)
    return [_moment(rng), Step("kill", everybody, role="peer"), Step("wait", amount=3), Step("back", everybody)]


def _checkpoint(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    victim, how = (rng.choice(names),), ("flip", "truncate")[seed % 2]
    kill, damage = Step("kill", victim, role="peer"), Step(how, victim, amount=rng.randrange(1 << 20))
    return [_moment(rng), kill, damage, Step("restart", victim), Step("named", victim)]


def _suspend(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    whom = tuple(rng.sample(names, 1 + seed % 2))
    return [_moment(rng), Step("stop", whom, role="all"), Step("wait", amount=20), Step("wake", whom, role="all")]


def _skew(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    whom, seconds = (rng.choice(names),), rng.choice((-600.0, -90.0, -5.0, 5.0, 90.0, 600.0))
    return [
        _moment(rng),
        Step("skew", whom, seconds),
        Step("join", ("newcomer",)),
        Step("wait", amount=5),
        Step("heal"),
    ]


def _new_address(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [_moment(rng), Step("move", (rng.choice(names),)), Step("settle"), Step("join", ("newcomer",))]


def _lasting(act: str, amount: float, everybody: bool = False, seconds: float = 10) -> Draw:
    """Something that lasts for a while."""

    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        whom = () if everybody else (rng.choice(names),)
        return [_moment(rng), Step(act, whom, amount), Step("wait", amount=seconds), Step("heal")]

    return draw


_GOES_ON = Limits(aims={"standstill_seconds": 10})
"""Of trouble that lasts, and is no reason to stand still meanwhile."""

SCENARIOS: Mapping[str, Scenario] = {
    "kill": Scenario(
        "SIGKILL at a named point of a round", _kill(POINTS["butterfly"]), Limits(aims={"decided_seconds": 2})
    ),
    "kill-restart": Scenario(
        "the same twice; whoever was killed is started again",
        _kill_restart(POINTS["butterfly"]),
        Limits(aims={"recovery_seconds": 30}),
    ),
    "stop": Scenario(
        "SIGSTOP of one peer's own process, or of all of its processes, until it is excluded; then SIGCONT",
        _stop,
        Limits(aims={"suspected_seconds": 6, "excluded_seconds": 10, "recovery_seconds": 30}),
    ),
    "worker": Scenario("SIGKILL to a worker", _one("worker"), Limits(aims={"recovery_seconds": 15})),
    "p2pd": Scenario("SIGKILL to a p2pd", _one("p2pd"), Limits(aims={"recovery_seconds": 15})),
    "bootstrap": Scenario(
        "the founder is killed, then a newcomer joins through another",
        _bootstrap,
        Limits(aims={"recovery_seconds": 30}),
    ),
    "kill-two": Scenario("two are killed at once", _many(2), Limits(forks=True)),
    "all-but-one": Scenario("all but one are killed at once", _many(-1), Limits(forks=True)),
    "partition": Scenario(
        "halves, or one and the others, do not hear each other for 10 s",
        _partition,
        Limits(aims={"recovery_seconds": 30}, forks=True),
        network=True,
    ),
    "one-way": Scenario(
        "for 10 s one hears nobody, or nobody hears one",
        _one_way,
        Limits(aims={"recovery_seconds": 30}, forks=True),
        network=True,
    ),
    "joiners": Scenario("eight join at once", _joiners, Limits(180, aims={"recovery_seconds": 120})),
    "rolling": Scenario(
        "one after the other joins for another that leaves",
        _rolling,
        Limits(aims={"rounds_skipped": 0, "contributions_lost": 0}),
    ),
    "slow-link": Scenario("one line carries 10 Mbit/s for 10 s", _lasting("slow", 10e6), _GOES_ON, network=True),
    "loss": Scenario(
        "1 % of all packets are lost for 20 s",
        _lasting("lose", 0.01, everybody=True, seconds=20),
        Limits(aims={"skipped_share": 0.01, "standstill_seconds": 10}),
        network=True,
    ),
    "loss-20": Scenario(
        "20 % of all packets are lost for 10 s",
        _lasting("lose", 0.2, everybody=True),
        Limits(aims={"standstill_seconds": 30}, forks=True),
        network=True,
    ),
    "everyone": Scenario(
        "all are killed at once, and started again 3 s later",
        _everyone,
        Limits(aims={"rounds_lost": 5, "recovery_seconds": 60}, forks=True),
    ),
    "disk": Scenario("one disk is full for 10 s", _lasting("fill", 0), _GOES_ON),
    "checkpoint": Scenario(
        "one is killed, and its newest checkpoint damaged before it is started again",
        _checkpoint,
        Limits(aims={"recovery_seconds": 30}),
    ),
    "suspend": Scenario(
        "one or two machines sleep for 20 s", _suspend, Limits(aims={"recovery_seconds": 30}, forks=True)
    ),
    "skew": Scenario("one clock is 5 s to 10 min off", _skew, Limits(aims={"rounds_skipped": 0})),
    "new-address": Scenario(
        "one machine gets another address", _new_address, Limits(aims={"recovery_seconds": 30}), network=True
    ),
    "straggler": Scenario("one worker runs a fifth of the time for 10 s", _lasting("straggle", 0.2), _GOES_ON),
}


def scenario_of(name: str, protocol: str) -> Scenario:
    """A scenario as it is for peers of that protocol: where nobody votes, nobody is excluded, and no round is decided.

    Aims at what follows from a vote are none there, either.
    """
    scenario, points = SCENARIOS[name], POINTS[protocol]
    if protocol not in LOOSE:
        return scenario
    draws = {"kill": _kill(points), "kill-restart": _kill_restart(points)}
    aims = {what: aim for what, aim in scenario.limits.aims.items() if what not in _VOTERS_AIMS}
    draw = _without_votes(draws.get(name, scenario.draw))
    return replace(scenario, draw=draw, limits=replace(scenario.limits, aims=aims))


def _without_votes(draw: Draw) -> Draw:
    return lambda *drawn: [step for step in draw(*drawn) if step.act not in _VOTERS_ONLY]


def left(schedule: Sequence[Step], names: Sequence[str]) -> int:
    """How many peers there are when all of it is done."""
    here, struck = set(names), 0
    for step in schedule:
        if step.act == "finish" or (step.act == "kill" and step.role == "peer"):
            here -= set(step.whom)
        elif step.act == "trap":
            struck += 1
        elif step.whom == (STRUCK,):
            struck -= 1
        elif step.act in ("join", "restart", "back"):
            here |= set(step.whom)
    return len(here) - struck
