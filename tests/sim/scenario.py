"""A simulated run as a value: the scenario, and the fields that its seed draws."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from node.tasks.recipe import most_pull
from protocols.base import PeerId
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.vectors.codec import codec
from protocols.vectors.robust import RULES
from protocols.wire import MAX_ROSTER
from tests.sim import families
from tests.sim.byzantine.contributors import LIES
from tests.sim.byzantine.independent import INDEPENDENT_LIES
from tests.sim.families import BREAKING, FAULTS
from tests.sim.faults import Faults, Message, Skew

DRAWN_CODECS = ("bf16", "fp16", "fp32", "int8")
LATER_CODECS = ("e3m0", "int4", "topk")
"""Drawn by a generator of their own, so that older seeds keep their meaning."""
RULED_PROTOCOLS = ("butterfly", "moshpit")
LARGE_PROTOCOLS = ("butterfly",)
"""Protocols in whose runs peers outside the roster follow the rounds."""
OUTER_RATE, OUTER_MOMENTUM = 0.9, 0.5
MOST_PULL = most_pull(OUTER_MOMENTUM)
BREAKING_SECONDS = 40.0
"""Faults last at least so long, and at least 1.5 times as long as the scenario's rounds take without faults."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run, determined by its fields. The seed draws every field that is None, except `pull`.

    Attributes:
        fault: the family from which the seed draws the faults.
        faults: these faults instead.
        elements: length of the vector.
        uplinks: bytes/s of each peer.
        step_seconds: of each peer's inner step.
        jitter: whether messages of different streams may overtake each other.
        breaking_seconds: how long faults last before all are healed.
        directory: Moshpit's peers announce themselves only to peers found in the directory, and meet in pairs, as in a
            swarm too large to announce to all.
        pull: gamma of NoLoCo, by which gossip's peers then step and mix.
        stages: of a pipeline; peer i is in stage i mod `stages`. 1: no pipeline.
        batches: microbatches of an inner step, with more than one stage.
        lookahead: microbatches of the next inner step that a replica of a stage admits.
        chains: whether replicas of stages pass activations on to each other.
        overlaps: whether peers train on while a round averages.
        fragments: of the vector, which rounds average in turn.
        voters: peers in the first roster; 0: all, up to `MAX_ROSTER`. The others observe until a record admits them.
        clusters: no roster is larger than the first one, and the work of the others counts, through its members.
        robust: the rule by which reducers average.
    """

    protocol: str = "butterfly"
    peers: int = 5
    rounds: int = 6
    seed: int = 0
    fault: str = "none"
    faults: Faults | None = None
    codec: str | None = None
    elements: int | None = None
    chunk_elements: int = 256
    inner_steps: int = 10
    uplinks: tuple[float, ...] | None = None
    step_seconds: tuple[float, ...] | None = None
    lie: str | None = None
    jitter: bool | None = None
    breaking_seconds: float | None = None
    directory: bool = False
    pull: float | None = None
    stages: int = 1
    batches: int = 4
    lookahead: int = 0
    chains: bool = False
    overlaps: bool = False
    fragments: int = 1
    voters: int = 0
    clusters: bool = False
    robust: str = "mean"

    def __post_init__(self) -> None:
        protocols = (*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS)
        for name, known in (("protocol", protocols), ("fault", FAULTS), ("robust", RULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.peers < 1 or self.rounds < 1:
            raise ValueError(f"peers and rounds must be at least 1, not {self.peers} and {self.rounds}")
        if self.inner_steps < 1:
            raise ValueError(f"inner steps must be at least 1, not {self.inner_steps}")
        if self.directory and self.protocol != "moshpit":
            raise ValueError(f"{self.protocol} does not use the directory")
        if self.pull is not None and not (self.protocol == "gossip" and 0 < self.pull < MOST_PULL):
            raise ValueError(f"a pull is of gossip, above 0 and below {MOST_PULL:g}: {self.protocol}, {self.pull}")
        self._check_butterfly()
        self._check_voters()
        strangers = (self.faults or Faults()).peers() - set(self.names())
        if strangers:
            raise ValueError(f"faults of {', '.join(sorted(strangers))}, who is none of {', '.join(self.names())}")

    def _check_butterfly(self) -> None:
        if self.robust != "mean" and self.protocol not in RULED_PROTOCOLS:
            raise ValueError(f"{self.protocol} takes no robust rule")
        streams = self.overlaps or self.fragments > 1
        if self.protocol != "butterfly" and (self.stages > 1 or streams):
            raise ValueError(f"stages, overlap and fragments are of the butterfly, not of {self.protocol}")
        if self.stages > 1 and streams:
            raise ValueError("stages go neither with overlap nor with fragments")
        if self.lookahead < 0 or (self.lookahead and self.stages == 1):
            raise ValueError(f"lookahead is of stages, 0 or more: {self.stages} stages, {self.lookahead}")
        if self.chains and self.stages < 3:
            raise ValueError(f"chains need at least three stages, not {self.stages}")
        if not 1 <= self.stages <= self.peers or self.batches < 1:
            raise ValueError(f"each of {self.stages} stages needs a peer, and a step microbatches: {self.peers} peers")

    def _check_voters(self) -> None:
        if not 0 <= self.voters <= min(self.peers, MAX_ROSTER):
            raise ValueError(f"{self.voters} voters of {self.peers} peers: at most {MAX_ROSTER} vote")
        if self.peers > MAX_ROSTER and self.protocol not in LARGE_PROTOCOLS:
            raise ValueError(f"a roster of {self.protocol} holds at most {MAX_ROSTER} peers, not {self.peers}")
        if self.clusters and (self.protocol != "butterfly" or self.stages > 1):
            raise ValueError("clusters are of the butterfly, without stages")
        beyond = math.ceil(self.peers / self.stages) > (self.voters or MAX_ROSTER)  # each stage has a roster
        if beyond and (self.stages > 1 or (self.fault != "none" and not self.clusters)):
            raise ValueError("with observers, runs without stages and faults are played")

    def names(self) -> tuple[PeerId, ...]:
        return tuple(f"p{index}" for index in range(self.peers))

    @property
    def breaks(self) -> bool:
        """Whether rounds may fail until the healing; otherwise every round must commit."""
        return self.fault in BREAKING or bool(self.faults and self.faults.dated())


def resolve(scenario: Scenario) -> Scenario:
    """The scenario with all fields that its seed draws."""
    rng = random.Random(f"world/{scenario.seed}")
    pace = rng.uniform(0.05, 0.5)
    if scenario.breaks:  # rounds of some seconds, as the failure detector takes five
        pace = rng.uniform(2.0, 6.0) / scenario.inner_steps
    steps = [pace * rng.uniform(0.9, 1.1) for _ in range(scenario.peers)]
    # A liar needs a receiver: where one peer has all the bandwidth, it reduces all parts itself.
    rates = (12.5e6,) if scenario.fault == "lies" else (1.25e6, 12.5e6)
    links = [rng.choice(rates) * rng.uniform(0.8, 1.2) for _ in range(scenario.peers)]
    # Each fragment of its vector has many chunks: in a part of one chunk, a chunk that is sent again is never read.
    sizes = (5000, 20_000) if scenario.fault == "lies" else (3, 64, 1000, 5000, 20_000)
    elements = rng.choice(sizes) * (scenario.fragments if scenario.fault == "lies" else 1)
    chosen = rng.choice(DRAWN_CODECS)
    apart = random.Random(f"codec/{scenario.seed}")
    if apart.random() < 0.3:
        later = apart.choice(LATER_CODECS)
        # Other protocols and rules need whole vectors; with parts of 4096 elements a liar may have no receiver.
        whole = scenario.protocol != "butterfly" or scenario.robust != "mean" or scenario.fault == "lies"
        if later != "topk" or not whole:
            chosen = later
    lie = LIES[rng.randrange(13) % len(LIES)]  # there were 13: the seeds draw what they drew
    if scenario.protocol in INDEPENDENT_LIES:
        lie = random.Random(f"lie/{scenario.seed}").choice(INDEPENDENT_LIES[scenario.protocol])
    if scenario.fault == "slow":
        for index in rng.sample(range(scenario.peers), max(1, scenario.peers // 3)):
            steps[index] *= 10
            links[index] /= rng.choice((1, 10))
    jitter = scenario.fault != "none" and rng.random() < 0.5
    grain = codec(scenario.codec or chosen).grain
    scenario = replace(
        scenario,
        codec=scenario.codec or chosen,
        chunk_elements=-(-scenario.chunk_elements // grain) * grain,
        elements=max(scenario.elements or elements, scenario.fragments),
        uplinks=scenario.uplinks or tuple(links),
        step_seconds=scenario.step_seconds or tuple(steps),
        lie=scenario.lie or (lie if scenario.fault == "lies" else None),
        jitter=jitter if scenario.jitter is None else scenario.jitter,
    )
    return _with_faults(scenario)


def _with_faults(scenario: Scenario) -> Scenario:
    assert scenario.step_seconds
    rng = random.Random(f"breaking/{scenario.seed}")
    undisturbed = scenario.rounds * scenario.inner_steps * max(scenario.step_seconds)
    seconds = scenario.breaking_seconds or max(BREAKING_SECONDS, 1.5 * undisturbed)
    faults, names = scenario.faults, scenario.names()
    if faults is None:
        faults = Faults()
        if scenario.lie:
            associates = names[scenario.voters :] if scenario.clusters and scenario.lie == "weight-huge" else ()
            faults = faults.lie(rng.choice(associates or names), scenario.lie)  # a lead's tokens are in its own offers
        if scenario.fault == "skew":
            faults = families.skew(rng, names, seconds)
        elif scenario.fault in BREAKING:
            faults = BREAKING[scenario.fault](rng, names, seconds)
    elif not scenario.breaking_seconds:
        seconds = max(seconds, _end(faults))
    return replace(scenario, faults=faults, breaking_seconds=seconds)


def _end(faults: Faults) -> float:
    ends = [0.0]
    for fault in faults.events:
        if not isinstance(fault, Skew) and not isinstance(getattr(fault, "at", None), Message | None):
            ends.append(fault.at + (getattr(fault, "lasts", None) or 0.0))  # type: ignore[union-attr, operator]
    return max(ends) + 1.0
