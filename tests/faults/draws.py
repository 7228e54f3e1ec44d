"""Functions that draw the schedule of a scenario from a generator, a seed and the peers' names."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.faults.failpoints import ONE_ROLE_ONLY
from tests.faults.steps import STRUCK, Step

JOINERS = 8
AWAY_SECONDS, USUAL_SECONDS = 20, 12
"""How long a fault of the scenario `stages` lasts; and how long all run before it, so that the usual rate is known."""

Draw = Callable[[random.Random, int, Sequence[str]], list[Step]]
"""(generator, seed, names of the peers with the founder first) -> the schedule."""


def moment(rng: random.Random) -> Step:
    """Wait for a random moment of a round."""
    return Step("wait", amount=round(rng.uniform(0, 1.5), 2))


def trap(rng: random.Random, point: str, names: Sequence[str]) -> Step:
    return Step("trap", () if point in ONE_ROLE_ONLY else (rng.choice(names),), role=point)


def kill(points: Sequence[str]) -> Draw:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        return [trap(rng, points[seed % len(points)], names)]

    return draw


def kill_restart(points: Sequence[str]) -> Draw:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        first, second = points[seed % len(points)], points[(seed + len(points) // 2) % len(points)]
        restart = [Step("settle"), Step("restart", (STRUCK,)), Step("settle")]
        return [trap(rng, first, names), *restart, trap(rng, second, names), *restart[:2]]

    return draw


def stop(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    victim, role = (rng.choice(names),), ("peer", "all")[seed % 2]
    waits = [Step("suspected", victim), Step("excluded", victim), Step("wait", amount=3)]
    return [moment(rng), Step("stop", victim, role=role), *waits, Step("wake", victim, role=role)]


def one(role: str) -> Draw:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        return [moment(rng), Step("kill", (rng.choice(names),), role=role)]

    return draw


def bootstrap(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [moment(rng), Step("kill", (names[0],), role="peer"), Step("join", ("newcomer",))]


def many(but: int) -> Draw:
    """Kill `but` peers at once; all but `-but`, if it is negative."""

    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        return [moment(rng), Step("kill", tuple(rng.sample(names, but % len(names))), role="peer")]

    return draw


def partition(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    side = tuple(rng.sample(names, 1 if seed % 2 else len(names) // 2))
    return [moment(rng), Step("part", side), Step("wait", amount=10), Step("heal")]


def one_way(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [
        moment(rng),
        Step(("deafen", "mute")[seed % 2], (rng.choice(names),)),
        Step("wait", amount=10),
        Step("heal"),
    ]


def joiners(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [moment(rng), Step("join", tuple(f"joiner-{number}" for number in range(JOINERS)))]


def rolling(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    steps = []
    for name in rng.sample(names, len(names)):
        steps += [Step("join", (f"after-{name}",)), Step("settle"), moment(rng), Step("finish", (name,))]
    return steps


def everyone(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    everybody = tuple(names)
    return [moment(rng), Step("kill", everybody, role="peer"), Step("wait", amount=3), Step("back", everybody)]


def checkpoint(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    victim, how = (rng.choice(names),), ("flip", "truncate")[seed % 2]
    kill, damage = Step("kill", victim, role="peer"), Step(how, victim, amount=rng.randrange(1 << 20))
    return [moment(rng), kill, damage, Step("restart", victim), Step("named", victim)]


def suspend(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    targets = tuple(rng.sample(names, 1 + seed % 2))
    return [moment(rng), Step("stop", targets, role="all"), Step("wait", amount=20), Step("wake", targets, role="all")]


def skew(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    targets, seconds = (rng.choice(names),), rng.choice((-600.0, -90.0, -5.0, 5.0, 90.0, 600.0))
    return [
        moment(rng),
        Step("skew", targets, seconds),
        Step("join", ("newcomer",)),
        Step("wait", amount=5),
        Step("heal"),
    ]


def new_address(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [moment(rng), Step("move", (rng.choice(names),)), Step("settle"), Step("join", ("newcomer",))]


def firewall(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    """A firewall comes up in front of one peer: even seeds refuse, odd ones swallow."""
    victim = (rng.choice(names),)
    waits = [Step("detoured", victim), Step("wait", amount=10)]
    return [moment(rng), Step(("refuse", "swallow")[seed % 2], victim), *waits, Step("heal")]


def lasting(act: str, amount: float, everybody: bool = False, seconds: float = 10) -> Draw:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        targets = () if everybody else (rng.choice(names),)
        return [moment(rng), Step(act, targets, amount), Step("wait", amount=seconds), Step("heal")]

    return draw


def private(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    """A member that was killed learns of a removal when it comes back. The founder removes; a newcomer has a ticket."""
    founder, *others = names
    killed, removed = rng.sample(others, 2)
    return [
        moment(rng),
        Step("intrude", ("stranger",)),
        Step("kill", (killed,), role="peer"),
        Step("revoke", (removed,), role=founder),
        Step("settle"),
        Step("restart", (killed,)),
        Step("join", ("newcomer",)),
        Step("settle"),
    ]


# -- stages ----------------------------------------------------------------------------------------------------------


def stages(count: int) -> Draw:
    """One fault after the other in each kind of stage; peer i of `names` is in stage i mod `count`."""

    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        drivers, middle, last = names[::count], names[1::count], names[count - 1 :: count]
        shuffled = rng.sample(middle, len(middle))
        killed, stopped, driver = shuffled[:1], shuffled[-1:], [rng.choice(drivers)]
        faults = [
            _away("kill", killed, "peer", "restart"),
            _away("stop", stopped, "all", "wake"),
            [Step("kill", (rng.choice(last),), role="worker"), Step("wait", amount=AWAY_SECONDS)],
            [Step("kill", (rng.choice(last),), role="p2pd"), Step("wait", amount=AWAY_SECONDS)],
            _away("kill", driver, "peer", "restart"),
            _away("kill", middle, "peer", "restart"),
        ]
        usual = [Step("settle"), Step("wait", amount=USUAL_SECONDS)]
        return [moment(rng), *(step for fault in faults for step in (*usual, *fault))]

    return draw


def _away(act: str, targets: Sequence[str], role: str, back: str) -> list[Step]:
    names = tuple(targets)
    return [Step(act, names, role=role), Step("wait", amount=AWAY_SECONDS), Step(back, names, role=role)]


# -- several faults at once -------------------------------------------------------------------------------------------


def _strikes(rng: random.Random, targets: tuple[str, ...]) -> tuple[list[Step], list[Step]]:
    """A momentary fault of one peer, and the steps that bring the peer back afterwards."""
    kind = rng.choice(("peer", "worker", "p2pd", "stop"))
    if kind == "stop":
        stopped = [Step("stop", targets, role="all"), Step("wait", amount=4), Step("wake", targets, role="all")]
        return stopped, []
    return [Step("kill", targets, role=kind)], [Step("restart", targets)] if kind == "peer" else []


def overlap(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    """A lasting fault, and a momentary one meanwhile."""
    first, second = rng.sample(names, 2)
    lasting = rng.choice(
        (
            Step("part", (first,)),
            Step("part", tuple(rng.sample(names, len(names) // 2))),
            Step("deafen", (first,)),
            Step("mute", (first,)),
            Step("lose", (), 0.2),
            Step("slow", (first,), 10e6),
            Step("straggle", (first,), 0.2),
        )
    )
    strike, afterwards = _strikes(rng, (second,))
    pause = Step("wait", amount=round(rng.uniform(1, 5), 2))
    return [moment(rng), lasting, pause, *strike, Step("wait", amount=5), Step("heal"), *afterwards]


# -- memory, a disk, the wire, liars ----------------------------------------------------------------------------------


def memory(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    return [moment(rng), Step("squeeze", (rng.choice(names),)), Step("heal")]


def memory_gone(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    victim = (rng.choice(names),)
    steps = [moment(rng), Step("confine", victim), Step("resigned", victim), Step("settle")]
    return [*steps, Step("heal"), Step("restart", victim)]


def disk_checkpoint(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    """A disk fills up while a checkpoint is written; with odd seeds the peer is killed then."""
    victim = (rng.choice(names),)
    steps = [moment(rng), Step("choke", victim), Step("wait", amount=10)]
    if seed % 2:
        return [*steps, Step("kill", victim, role="peer"), Step("heal"), Step("restart", victim)]
    return [*steps, Step("heal")]


def latency(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    """Latency on all lines, or with odd seeds on those of one peer."""
    targets = (rng.choice(names),) if seed % 2 else ()
    seconds = rng.choice((0.05, 0.1, 0.2, 0.4))
    return [moment(rng), Step("delay", targets, seconds), Step("wait", amount=20), Step("heal")]


def bit_flips(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
    targets = (rng.choice(names),) if seed % 2 else ()
    every_bytes = rng.choice((1e6, 2e6, 4e6))
    return [moment(rng), Step("corrupt", targets, every_bytes), Step("wait", amount=10), Step("heal")]


def liar(lies: Sequence[str]) -> Draw:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        targets, lie = (rng.choice(names),), lies[seed % len(lies)]
        return [
            moment(rng),
            Step("lie", targets, role=lie),
            Step("accused", targets),
            Step("wait", amount=10),
            Step("heal"),
        ]

    return draw
