"""The way into a run, on virtual time: many addresses of which some lead nowhere, and doors that lie."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from node.config.manifest import ManifestError
from node.joining.addresses_file import AddressLine
from node.joining.bootstrap import (
    ASK_SECONDS,
    ATTEMPT_SECONDS,
    PAUSE_SECONDS,
    TRANSFER_SECONDS,
    BootstrapClient,
    BootstrapServer,
    RunInfo,
    ask_run,
    ask_status,
    reach,
)
from node.membership.hello import ENTRY, MAX_RUN_BYTES, MAX_STATUS_BYTES, RunReply, StatusReply, WantRun, WantStatus
from protocols import wire
from protocols.base import BadPayload, Deadline, Header, PeerError, PeerGone, PeerId, PeerSilent, Stream
from tests.sim import loop as simloop
from tests.sim.network import SimNetwork, Trace

RUN = RunInfo(b"sealed", b"sample")
OTHER = RunInfo(b"another", b"")
STATUS = {"round": 3, "loss": math.nan, "peers": []}


def now() -> float:
    return asyncio.get_running_loop().time()


def play(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    simloop.run(body(), limit_seconds=3600.0)


# -- many addresses ---------------------------------------------------------------------------------------------------


class Addresses:
    """What is at each address: how long it takes, and what comes of it, the last for ever."""

    def __init__(self, **there: Sequence[RunInfo | Exception] | RunInfo | Exception) -> None:
        self.there: dict[str, list[RunInfo | Exception]] = {
            name: [results] if isinstance(results, RunInfo | Exception) else [*results]
            for name, results in there.items()
        }
        self.seconds = dict.fromkeys(there, 0.1)
        self.tried: dict[str, list[float]] = {name: [] for name in there}
        self.said: list[str] = []
        self.files: dict[str, list[tuple[float, AddressLine | str]]] = {}  # since when it says what

    async def connect(self, address: str, deadline: Deadline) -> PeerId:
        self.tried[address].append(now())
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(self.seconds[address])
        except TimeoutError:
            raise PeerSilent(address, "no answer before the deadline") from None
        if isinstance(result := self._result(address), Exception):
            raise result
        return f"peer-{address}"

    async def ask(self, peer: PeerId, deadline: Deadline) -> RunInfo:
        result = self._result(peer.removeprefix("peer-"))
        assert isinstance(result, RunInfo)
        return result

    def _result(self, address: str) -> RunInfo | Exception:
        results = self.there[address]
        return results[min(len(self.tried[address]), len(results)) - 1]

    def judge(self, run: RunInfo) -> None:
        if run != RUN:
            raise ManifestError("is another run than the one that you named")

    def entry(self) -> BootstrapClient:
        return BootstrapClient(self.connect, self.ask, self.judge, self.said.append, self.read)

    async def read(self, path: Path) -> AddressLine | str:
        says = [said for since, said in self.files[str(path)] if since <= now()]
        return says[-1]


def gone(why: str) -> PeerGone:
    return PeerGone("x", why)


def test_all_addresses_are_tried_and_failures_reported() -> None:
    async def body() -> None:
        addresses = Addresses(a=gone("refused"), b=PeerSilent("b", "silent"), c=BadPayload("nonsense"), d=RUN)
        addresses.seconds = {"a": 0.1, "b": 30.0, "c": 0.1, "d": 3.0}
        async with addresses.entry() as entry:
            assert await entry.find("abcd") == RUN
            assert now() == pytest.approx(3.0)
            assert addresses.said == ["a: refused (retrying)", "c: nonsense (retrying)"]
            assert entry.met == {"peer-d": "d"}
            await asyncio.sleep(20.0)
        assert addresses.said[2:] == ["b: no answer before the deadline"]  # told, though nobody waits for it any more
        tried = {name: len(times) for name, times in addresses.tried.items()}
        await asyncio.sleep(100.0)
        assert tried == {name: len(times) for name, times in addresses.tried.items()}

    play(body)


def test_first_answer_wins_and_later_peers_are_kept() -> None:
    async def body() -> None:
        addresses = Addresses(a=RUN, b=RUN)
        addresses.seconds["a"] = 5.0
        async with addresses.entry() as entry:
            await entry.find("abab")
            assert now() == pytest.approx(0.1) and list(entry.met) == ["peer-b"]
            await asyncio.sleep(10.0)
            assert list(entry.met) == ["peer-b", "peer-a"]
        assert [len(times) for times in addresses.tried.values()] == [1, 1] and not addresses.said

    play(body)


def test_failure_is_reported_only_when_it_changes() -> None:
    async def body() -> None:
        causes = [gone("refused"), gone("refused"), gone("no route"), gone("no route"), gone("refused"), RUN]
        addresses = Addresses(a=list(causes))
        async with addresses.entry() as entry:
            await entry.find("a")
        again = " (retrying)"
        assert addresses.said == [f"a: refused{again}", f"a: no route{again}", f"a: refused{again}"]

    play(body)


def test_dead_address_is_retried_with_growing_pauses() -> None:
    async def body() -> None:
        addresses = Addresses(a=[*[gone("refused")] * 50, RUN])
        async with addresses.entry() as entry:
            await entry.find("a")
        times = addresses.tried["a"]
        pauses = [second - first - 0.1 for first, second in itertools.pairwise(times)]
        assert pauses[: len(PAUSE_SECONDS)] == pytest.approx(PAUSE_SECONDS)
        assert set(map(round, pauses[len(PAUSE_SECONDS) :])) == {PAUSE_SECONDS[-1]} and len(pauses) == 50

    play(body)


def test_attempt_has_a_time_limit() -> None:
    async def body() -> None:
        addresses = Addresses(a=RUN, b=RUN)
        addresses.seconds = {"a": 1e6, "b": ATTEMPT_SECONDS + 1}
        async with addresses.entry() as entry:
            search = asyncio.create_task(entry.find("ab"))
            await asyncio.sleep(ATTEMPT_SECONDS + 0.5)
            assert len(addresses.said) == 2
            search.cancel()
            await asyncio.wait([search])

    play(body)


def test_other_run_is_neither_joined_nor_retried() -> None:
    async def body() -> None:
        addresses = Addresses(a=OTHER, b=[gone("refused")] * 3 + [OTHER], c=ValueError("is not a multiaddr"))
        async with addresses.entry() as entry:
            with pytest.raises(ManifestError, match="b: is another run"):
                await entry.find("abc")
        assert len(addresses.tried["a"]) == 1 and len(addresses.tried["c"]) == 1
        told = [
            "a: is another run than the one that you named",
            "b: refused (retrying)",
            "c: is not a multiaddr",
        ]
        assert sorted(addresses.said) == told
        assert not entry.met

    play(body)


def test_one_liar_does_not_block_the_join() -> None:
    async def body() -> None:
        addresses = Addresses(a=OTHER, b=[gone("refused"), gone("refused"), RUN])
        async with addresses.entry() as entry:
            assert await entry.find("ab") == RUN
        assert list(entry.met) == ["peer-b"]

    play(body)


def test_cancelled_search_leaves_no_tasks() -> None:
    async def body() -> None:
        addresses = Addresses(a=gone("refused"), b=RUN)
        addresses.seconds["b"] = 100.0

        async def look() -> None:
            async with addresses.entry() as entry:
                await entry.find("ab")

        task = asyncio.create_task(look())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and len(asyncio.all_tasks()) == 1

    play(body)


# -- files of addresses -----------------------------------------------------------------------------------------------


def test_late_address_file_is_used() -> None:
    async def body() -> None:
        addresses = Addresses(a=RUN)
        addresses.files["/f"] = [
            (0.0, "no such file yet"),
            (600.0, AddressLine((), "holds no addresses yet")),
            (700.0, AddressLine(("a",))),
        ]
        async with addresses.entry() as entry:
            assert await entry.find(["@/f"]) == RUN
        assert 700.0 <= now() <= 702.0 and entry.met == {"peer-a": "a"}
        waits = "this peer waits for addresses of others there, and does not start a run of its own (reading it again)"
        assert addresses.said == [f"@/f: no such file yet; {waits}", f"@/f: holds no addresses yet; {waits}"]

    play(body)


def test_address_removed_from_file_is_not_retried() -> None:
    async def body() -> None:
        addresses = Addresses(a=gone("refused"), b=gone("refused"), c=RUN, d=OTHER)
        first, line = AddressLine(("a", "b", "d")), "line 4: is nonsense"
        addresses.files["/f"] = [(0.0, first), (60.0, "cannot be read"), (90.0, AddressLine(("b", "c"), line))]
        named: list[Sequence[str]] = []
        async with addresses.entry() as entry:
            entry.set_listener(named.append)
            assert await entry.find(["a", "@/f"]) == RUN, "all may lead elsewhere: the file may name others"
            assert (until := now()) >= 90.0 and entry.met == {"peer-c": "c"}
            assert addresses.tried["d"] == [pytest.approx(0.0)]
            assert max(addresses.tried["a"]) > 60.0 and max(addresses.tried["b"]) > 60.0, "what it named last holds"
            await asyncio.sleep(100.0)
            assert not [each for each in addresses.tried["b"] if each > until + 20.0]
        assert named[0] == first.addresses and named[-1] == ("b", "c"), "whoever is alone later is told of them"
        assert addresses.said[-2:] == ["@/f: cannot be read (reading it again)", f"@/f: {line} (reading it again)"]

    play(body)


def test_unlisted_addresses_are_reported_in_one_line() -> None:
    async def body() -> None:
        refused, other = gone("cannot be reached: refused: is it up?"), gone("cannot be reached: no route, or worse")
        addresses = Addresses(a=refused, b=[refused, other, RUN], c=refused, d=other, e=OTHER, f=refused, g=refused)
        addresses.files["/f"] = [(0.0, AddressLine(("f", "g")))]
        async with addresses.entry() as entry:
            assert await entry.find(["a", "b", "c", "d", "e", "@/f"], remembered="bcde") == RUN
            await asyncio.sleep(30.0)
        another = "is another run than the one that you named"
        assert sorted(addresses.said) == [
            "@/f: none of its 2 addresses could be used: 2 × refused (retrying)",
            "a: cannot be reached: refused: is it up? (retrying)",
            f"none of the 4 addresses of peers met before could be used: 2 × refused, 1 × {another}, "
            "1 × no route (retrying)",
        ]

    play(body)


# -- reaching a peer that is known ------------------------------------------------------------------------------------


def test_first_working_address_reaches_the_peer() -> None:
    async def body() -> None:
        ended: Counter[str] = Counter()

        async def connect(address: str, deadline: Deadline) -> PeerId:
            try:
                await asyncio.sleep({"slow": 9.0, "good": 1.0}.get(address.partition("/")[0], 0.1))
            finally:
                ended[address] += 1
            match address.partition("/")[0]:
                case "dead":
                    raise gone("refused")
                case "bad":
                    raise ValueError("not a multiaddr")
            return "p"

        await reach(connect, "p", ["dead", "bad", "slow", "good"], now() + 20.0)
        assert now() == pytest.approx(1.0)
        await asyncio.sleep(0.01)
        assert ended == {f"{name}/p2p/p": 1 for name in ("dead", "bad", "slow", "good")}
        await reach(connect, "p", ["dead", "bad"], now() + 20.0)  # the transport may know a way all the same
        await reach(connect, "p", [], now() + 20.0)

    play(body)


# -- doors ------------------------------------------------------------------------------------------------------------


class Street:
    """One peer with a door, `a`, and one who knocks, `x`."""

    def __init__(self, status: Callable[[], dict[str, Any]] = lambda: STATUS) -> None:
        self.network = SimNetwork(Trace())
        self.home, self.guest = self.network.join("a"), self.network.join("x")
        BootstrapServer(self.home, RUN, status)

    async def refusal(self, request: Header) -> type[BaseException]:
        try:
            async with self.guest.open("a", ENTRY, now() + 10.0) as stream:
                await stream.send(request)
                await stream.receive(wire.MAX_HEADER_BYTES)
        except PeerError as error:
            return type(error)
        pytest.fail("it was answered")


def test_server_answers_run_and_status_requests() -> None:
    async def body() -> None:
        street = Street()
        assert await ask_run(street.guest, "a", now() + 5.0) == RUN
        assert await ask_status(street.guest, "a", now() + 5.0) == {"round": 3, "loss": None, "peers": []}

    play(body)


def test_run_without_sample_is_accepted() -> None:
    async def body() -> None:
        network = SimNetwork(Trace())
        BootstrapServer(network.join("a"), RunInfo(b"s", b""), lambda: STATUS)
        assert await ask_run(network.join("x"), "a", now() + 5.0) == RunInfo(b"s", b"")

    play(body)


def test_status_of_many_peers_is_cut_between_peers() -> None:
    async def body() -> None:
        crowd = [{"peer": "\x1b" * 64, "address": f"{number:0256}"} for number in range(1000)]
        status = await ask_status(Street(lambda: STATUS | {"peers": crowd}).guest, "a", now() + 5.0)
        assert 10 < len(status["peers"]) < 1000 and status["peers"] == crowd[: len(status["peers"])]
        assert len(json.dumps(status, separators=(",", ":"))) <= MAX_STATUS_BYTES

    play(body)


@pytest.mark.parametrize("request_", [RunReply(1, 1), StatusReply(5)], ids=lambda each: type(each).__name__)
def test_server_rejects_invalid_requests(request_: Header) -> None:
    async def body() -> None:
        street = Street()
        assert issubclass(await street.refusal(request_), PeerError)
        assert street.home.refused and not street.network.bugs

    play(body)


def test_silent_client_is_not_waited_for() -> None:
    async def body() -> None:
        street = Street()
        with pytest.raises(PeerError):
            async with street.guest.open("a", ENTRY, now() + 100.0) as stream:
                await stream.receive(wire.MAX_HEADER_BYTES)
        assert ASK_SECONDS <= now() <= ASK_SECONDS + 1.0
        assert not street.network.nodes["a"].ends and not street.network.bugs

    play(body)


def test_client_not_reading_the_answer_is_dropped() -> None:
    class Stuck:
        async def receive(self, limit: int) -> Header:
            return WantRun()

        async def send(self, header: Header, payload: bytes = b"") -> None:
            await asyncio.sleep(1e6)

    async def body() -> None:
        street = Street()
        with pytest.raises(PeerSilent):
            await street.network.nodes["a"].handlers[ENTRY]("x", Stuck())  # type: ignore[arg-type]
        assert now() == TRANSFER_SECONDS

    play(body)


Lie = Callable[[Stream], Awaitable[None]]


async def _too_large(stream: Stream) -> None:
    await stream.send(RunReply(MAX_RUN_BYTES + 1, 0), b"x" * (MAX_RUN_BYTES + 1))


async def _of_another_kind(stream: Stream) -> None:
    await stream.send(WantStatus())


async def _less_than_promised(stream: Stream) -> None:
    await stream.send(RunReply(100, 100), b"x" * 150)


async def _nothing(stream: Stream) -> None:
    pass


async def _silence(stream: Stream) -> None:
    await asyncio.sleep(1000.0)


async def _drip(stream: Stream) -> None:
    await stream.send(RunReply(1000, 0), b"x")
    await asyncio.sleep(1000.0)


def says(data: bytes, size: int | None = None) -> Lie:
    async def lie(stream: Stream) -> None:
        await stream.send(StatusReply(len(data) if size is None else size), data)

    return lie


async def _lied_to(ask: Callable[..., Awaitable[Any]], lie: Lie) -> type[BaseException]:
    network = SimNetwork(Trace())
    home, guest = network.join("a"), network.join("x")

    async def serve(peer: PeerId, stream: Stream) -> None:
        await stream.receive(wire.MAX_HEADER_BYTES)
        await lie(stream)

    home.serve(ENTRY, serve)
    with pytest.raises((PeerError, BadPayload)) as caught:
        await ask(guest, "a", now() + ATTEMPT_SECONDS)
    assert now() <= ATTEMPT_SECONDS + 0.1
    return caught.type


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        (_too_large, BadPayload),
        (_of_another_kind, BadPayload),
        (says(b"{}"), BadPayload),
        (_less_than_promised, PeerError),
        (_nothing, PeerError),
        (_silence, PeerSilent),
        (_drip, PeerSilent),
    ],
)
def test_false_run_reply_fails_the_attempt(lie: Lie, error: type[Exception]) -> None:
    async def body() -> None:
        assert issubclass(await _lied_to(ask_run, lie), error)

    play(body)


@pytest.mark.parametrize(
    "lie",
    [
        says(b""),
        says(b"no json"),
        says(b"[1]"),
        says(b"\xff\xfe"),
        says(b"[" * MAX_STATUS_BYTES),
        says(b'{"a":' * 10_000),
        says(b"1" * 10_000),
        says(b"x" * (MAX_STATUS_BYTES + 1)),
        _too_large,
        _of_another_kind,
    ],
)
def test_false_status_reply_is_rejected(lie: Lie) -> None:
    async def body() -> None:
        assert issubclass(await _lied_to(ask_status, lie), BadPayload)

    play(body)


def test_peer_without_bootstrap_server_is_gone() -> None:
    async def body() -> None:
        network = SimNetwork(Trace())
        network.join("a")
        with pytest.raises(PeerGone):
            await ask_run(network.join("x"), "a", now() + 5.0)

    play(body)
