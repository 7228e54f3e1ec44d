"""Replicas get microbatches in proportion to their speed; those that fail or are new get no flood."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest

from protocols.pipeline.routing import BAN_SECONDS, MAX_BAN_SECONDS, ReplicaRouter


class Queues:
    """Replicas that serve one call at a time, called by one driver with a window of calls in flight."""

    def __init__(self, seconds: dict[str, float], window: int = 8) -> None:
        self.router = ReplicaRouter(random.Random(1))
        self.seconds, self.window = dict(seconds), window
        self.dead: set[str] = set()
        self.now = 0.0
        self._free_at = dict.fromkeys(seconds, 0.0)
        self._calls: list[tuple[float, str, float]] = []  # (answered at, replica, began)

    def run(self, calls: int) -> Counter[str]:
        """Make `calls` calls; returns how many each replica got."""
        got: Counter[str] = Counter()
        while got.total() < calls:
            while len(self._calls) < self.window:
                peer = self.router.choose(tuple(self.seconds), self.now)
                if peer is None:
                    break
                got[peer] += 1
                self._call(peer)
            self._wait()
        return got

    def _call(self, peer: str) -> None:
        if peer in self.dead:
            self.router.failed(peer, self.now, 10.0)
            return
        self._free_at[peer] = max(self.now, self._free_at.get(peer, 0.0)) + self.seconds[peer]
        heapq.heappush(self._calls, (self._free_at[peer], peer, self.now))

    def _wait(self) -> None:
        self.now, peer, began = heapq.heappop(self._calls)
        if peer not in self.dead:
            self.router.succeeded(peer, self.now - began)


def test_shares_follow_speeds() -> None:
    """Of 1,000 calls each replica gets its share within 10 %."""
    queues = Queues({"slow": 0.4, "middle": 0.2, "fast": 0.1})
    queues.run(200)
    got = queues.run(1000)
    for peer, share in (("slow", 1 / 7), ("middle", 2 / 7), ("fast", 4 / 7)):
        assert got[peer] == pytest.approx(1000 * share, rel=0.1), got


def test_share_of_a_dead_replica_moves_at_once() -> None:
    queues = Queues({"a": 0.1, "b": 0.1, "c": 0.1})
    queues.run(300)
    queues.dead.add("a")
    got = queues.run(300)
    assert got["a"] <= 8 and abs(got["b"] - got["c"]) < 30, got


def test_newcomer_is_not_flooded() -> None:
    queues = Queues({"a": 0.1, "b": 0.1})
    queues.run(400)
    queues.seconds["new"] = 0.1
    assert queues.run(50)["new"] <= 1.5 * 50 / 3
    assert queues.run(300)["new"] == pytest.approx(100, rel=0.15)


def test_returning_replica_is_not_flooded() -> None:
    queues = Queues({"a": 0.1, "b": 0.1, "c": 0.1})
    queues.run(100)
    queues.dead.add("a")
    queues.run(400)
    queues.dead.clear()
    queues.now += MAX_BAN_SECONDS * 2
    assert queues.run(50)["a"] <= 1.5 * 50 / 3


def test_banned_replica_gets_one_probe_per_ban() -> None:
    router, now, probes = ReplicaRouter(random.Random(1)), 0.0, []
    router.failed("a", now)
    while now < 300.0:
        if router.choose(("a",), now):
            probes.append(now)
            assert router.choose(("a",), now) is None, "a single call until that one has ended"
            router.failed("a", now)
        now += 0.05
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert probes[0] >= 0.5 * BAN_SECONDS and len(probes) <= 22
    assert all(0.5 * MAX_BAN_SECONDS <= gap <= 1.6 * MAX_BAN_SECONDS for gap in gaps[8:]), gaps


def test_busy_replica_is_left_alone_and_not_blamed() -> None:
    router = ReplicaRouter(random.Random(1))
    assert router.choose(("a",), 0.0) == "a"
    router.busy("a", 0.0, 1.0)
    assert router.choose(("a",), 0.4) is None and router.choose(("a", "b"), 0.4) == "b"
    assert 0.5 <= (router.retry_at(("a",)) or 0.0) <= 1.5
    assert router.choose(("a",), 3.1) == "a" and router.choose(("a",), 3.1) is None, "one call asks again"
    router.busy("a", 3.1, 1.0)
    assert 4.1 <= (router.retry_at(("a",)) or 0.0) <= 6.1
    assert router.choose(("a",), 9.2) == "a"
    router.granted("a")
    assert router.choose(("a",), 9.2) == "a"


def test_no_replica_is_no_choice() -> None:
    router = ReplicaRouter(random.Random(1))
    assert router.choose((), 0.0) is None and router.retry_at(()) is None
