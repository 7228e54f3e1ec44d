"""The bootstrap client and server on virtual time: many addresses, some of them dead, and servers that lie."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

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
from node.membership.hello import (
    BOOTSTRAP_METHOD,
    MAX_RUN_BYTES,
    MAX_STATUS_BYTES,
    RunReply,
    StatusReply,
    WantRun,
    WantStatus,
)
from protocols import wire
from protocols.base import BadPayload, Deadline, Header, PeerError, PeerGone, PeerId, PeerSilent, Stream
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace
from tests.support.simulated import on_virtual_time
from tests.support.waiting import now

RUN = RunInfo(b"sealed", b"sample")
OTHER = RunInfo(b"another", b"")
STATUS = {"round": 3, "loss": math.nan, "peers": []}


# -- many addresses ----------------------------------------------------------------------------------------------------


class Addresses:
    """What each address answers, attempt by attempt, and after how long; the last answer is repeated."""

    def __init__(self, **there: Sequence[RunInfo | Exception] | RunInfo | Exception) -> None:
        self.there: dict[str, list[RunInfo | Exception]] = {
            name: [results] if isinstance(results, RunInfo | Exception) else [*results]
            for name, results in there.items()
        }
        self.seconds = dict.fromkeys(there, 0.1)
        self.tried: dict[str, list[float]] = {name: [] for name in there}
        self.said: list[str] = []
        self.files: dict[str, list[tuple[float, AddressLine | str]]] = {}  # from when on it says what

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

    def client(self, hint: str = "") -> BootstrapClient:
        return BootstrapClient(self.connect, self.ask, self.judge, self.said.append, self.read, hint)

    async def read(self, path: Path) -> AddressLine | str:
        says = [said for since, said in self.files[str(path)] if since <= now()]
        return says[-1]


def gone(why: str) -> PeerGone:
    return PeerGone("x", why)


@on_virtual_time
async def test_all_addresses_are_tried_and_failures_reported() -> None:
    addresses = Addresses(a=gone("refused"), b=PeerSilent("b", "silent"), c=BadPayload("nonsense"), d=RUN)
    addresses.seconds = {"a": 0.1, "b": 30.0, "c": 0.1, "d": 3.0}
    async with addresses.client("HTTPS_PROXY is set") as client:
        assert await client.find("abcd") == RUN
        assert now() == pytest.approx(3.0)
        assert addresses.said == ["a: refused (retrying)", "HTTPS_PROXY is set", "c: nonsense (retrying)"]
        assert client.met == {"peer-d": "d"}
        await asyncio.sleep(20.0)
    assert addresses.said[3:] == ["b: no answer before the deadline"]  # reported, although it is too late to matter
    tried = {name: len(times) for name, times in addresses.tried.items()}
    await asyncio.sleep(100.0)
    assert tried == {name: len(times) for name, times in addresses.tried.items()}


@on_virtual_time
async def test_first_answer_wins_and_later_peers_are_kept() -> None:
    addresses = Addresses(a=RUN, b=RUN)
    addresses.seconds["a"] = 5.0
    async with addresses.client() as client:
        await client.find("abab")
        assert now() == pytest.approx(0.1) and list(client.met) == ["peer-b"]
        await asyncio.sleep(10.0)
        assert list(client.met) == ["peer-b", "peer-a"]
    assert [len(times) for times in addresses.tried.values()] == [1, 1] and not addresses.said


@on_virtual_time
async def test_dead_address_is_retried_with_growing_pauses() -> None:
    addresses = Addresses(a=[*[gone("refused")] * 50, RUN])
    async with addresses.client() as client:
        await client.find("a")
    times = addresses.tried["a"]
    pauses = [second - first - 0.1 for first, second in itertools.pairwise(times)]
    assert pauses[: len(PAUSE_SECONDS)] == pytest.approx(PAUSE_SECONDS)
    assert set(map(round, pauses[len(PAUSE_SECONDS) :])) == {PAUSE_SECONDS[-1]} and len(pauses) == 50


@on_virtual_time
async def test_other_run_is_neither_joined_nor_retried() -> None:
    addresses = Addresses(a=OTHER, b=[gone("refused")] * 3 + [OTHER], c=ValueError("is not a multiaddr"))
    async with addresses.client() as client:
        with pytest.raises(ManifestError, match="b: is another run"):
            await client.find("abc")
    assert len(addresses.tried["a"]) == 1 and len(addresses.tried["c"]) == 1
    assert sorted(addresses.said) == [
        "a: is another run than the one that you named",
        "b: refused (retrying)",
        "c: is not a multiaddr",
    ]
    assert not client.met


@on_virtual_time
async def test_cancelled_search_leaves_no_tasks() -> None:
    addresses = Addresses(a=gone("refused"), b=RUN)
    addresses.seconds["b"] = 100.0

    async def look() -> None:
        async with addresses.client() as client:
            await client.find("ab")

    task = asyncio.create_task(look())
    await asyncio.sleep(1.0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and len(asyncio.all_tasks()) == 1


# -- files of addresses ------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_late_address_file_is_used() -> None:
    addresses = Addresses(a=RUN)
    addresses.files["/f"] = [
        (0.0, "no such file yet"),
        (600.0, AddressLine((), "holds no addresses yet")),
        (700.0, AddressLine(("a",))),
    ]
    async with addresses.client() as client:
        assert await client.find(["@/f"]) == RUN
    assert 700.0 <= now() <= 702.0 and client.met == {"peer-a": "a"}
    waits = "waiting for addresses in it (reading it again)"
    assert addresses.said == [f"@/f: no such file yet; {waits}", f"@/f: holds no addresses yet; {waits}"]


@on_virtual_time
async def test_address_removed_from_file_is_not_retried() -> None:
    addresses = Addresses(a=gone("refused"), b=gone("refused"), c=RUN, d=OTHER)
    first, line = AddressLine(("a", "b", "d")), "line 4: is nonsense"
    addresses.files["/f"] = [(0.0, first), (60.0, "cannot be read"), (90.0, AddressLine(("b", "c"), line))]
    named: list[Sequence[str]] = []
    async with addresses.client() as client:
        client.on_named = named.append
        assert await client.find(["a", "@/f"]) == RUN, "all may lead elsewhere: the file may name others"
        assert (until := now()) >= 90.0 and client.met == {"peer-c": "c"}
        assert addresses.tried["d"] == [pytest.approx(0.0)]
        assert max(addresses.tried["a"]) > 60.0 and max(addresses.tried["b"]) > 60.0, "what it named last holds"
        await asyncio.sleep(100.0)
        assert not [each for each in addresses.tried["b"] if each > until + 20.0]
    assert named[0] == first.addresses and named[-1] == ("b", "c"), "a peer that is alone later asks them"
    assert addresses.said[-2:] == ["@/f: cannot be read (reading it again)", f"@/f: {line} (reading it again)"]


@on_virtual_time
async def test_unlisted_addresses_are_reported_in_one_line() -> None:
    refused, other = gone("cannot be reached: refused: is it up?"), gone("cannot be reached: no route, or worse")
    addresses = Addresses(a=refused, b=[refused, other, RUN], c=refused, d=other, e=OTHER, f=refused, g=refused)
    addresses.files["/f"] = [(0.0, AddressLine(("f", "g")))]
    async with addresses.client() as client:
        assert await client.find(["a", "b", "c", "d", "e", "@/f"], remembered="bcde") == RUN
        await asyncio.sleep(30.0)
    another = "is another run than the one that you named"
    assert sorted(addresses.said) == [
        "@/f: none of its 2 addresses could be used: 2 × refused (retrying)",
        "a: cannot be reached: refused: is it up? (retrying)",
        f"none of the 4 addresses of peers met before could be used: 2 × refused, 1 × {another}, "
        "1 × no route (retrying)",
    ]


# -- reaching a known peer ---------------------------------------------------------------------------------------------


@on_virtual_time
async def test_first_working_address_reaches_the_peer() -> None:
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
    await reach(connect, "p", ["dead", "bad"], now() + 20.0)  # the transport may know another address
    await reach(connect, "p", [], now() + 20.0)


# -- the server --------------------------------------------------------------------------------------------------------


class ServedPeer:
    """A bootstrap server, `a`, and its client, `x`."""

    def __init__(self, run: RunInfo = RUN, status: Callable[[], dict[str, Any]] = lambda: STATUS) -> None:
        self.network = SimNetwork(Trace())
        self.server, self.client = self.network.join("a"), self.network.join("x")
        BootstrapServer(self.server, run, status)

    async def refusal(self, request: Header) -> type[BaseException]:
        try:
            async with self.client.open("a", BOOTSTRAP_METHOD, now() + 10.0) as stream:
                await stream.send(request)
                await stream.receive(wire.MAX_HEADER_BYTES)
        except PeerError as error:
            return type(error)
        pytest.fail("it was answered")


@on_virtual_time
async def test_server_answers_run_and_status_requests() -> None:
    served, without_sample = ServedPeer(), RunInfo(b"s", b"")
    assert await ask_run(served.client, "a", now() + 5.0) == RUN
    assert await ask_run(ServedPeer(without_sample).client, "a", now() + 5.0) == without_sample
    served.network.join("y")  # without a server
    with pytest.raises(PeerGone):
        await ask_run(served.client, "y", now() + 5.0)
    assert await ask_status(served.client, "a", now() + 5.0) == {"round": 3, "loss": None, "peers": []}


@on_virtual_time
async def test_status_of_many_peers_is_cut_between_peers() -> None:
    crowd = [{"peer": "\x1b" * 64, "address": f"{number:0256}"} for number in range(1000)]
    status = await ask_status(ServedPeer(status=lambda: STATUS | {"peers": crowd}).client, "a", now() + 5.0)
    assert 10 < len(status["peers"]) < 1000 and status["peers"] == crowd[: len(status["peers"])]
    assert len(json.dumps(status, separators=(",", ":"))) <= MAX_STATUS_BYTES


@pytest.mark.parametrize("request_", [RunReply(1, 1), StatusReply(5)], ids=lambda each: type(each).__name__)
@on_virtual_time
async def test_server_rejects_invalid_requests(request_: Header) -> None:
    served = ServedPeer()
    assert issubclass(await served.refusal(request_), PeerError)
    assert served.server.refused and not served.network.bugs


@on_virtual_time
async def test_silent_client_is_not_waited_for() -> None:
    served = ServedPeer()
    with pytest.raises(PeerError):
        async with served.client.open("a", BOOTSTRAP_METHOD, now() + 100.0) as stream:
            await stream.receive(wire.MAX_HEADER_BYTES)
    assert ASK_SECONDS <= now() <= ASK_SECONDS + 1.0
    assert not served.network.nodes["a"].ends and not served.network.bugs


@on_virtual_time
async def test_client_not_reading_the_answer_is_dropped() -> None:
    class Stuck:
        async def receive(self, limit: int) -> Header:
            return WantRun()

        async def send(self, header: Header, payload: bytes = b"") -> None:
            await asyncio.sleep(1e6)

    served, stuck = ServedPeer(), cast("Stream", Stuck())
    with pytest.raises(PeerSilent):
        await served.network.nodes["a"].handlers[BOOTSTRAP_METHOD]("x", stuck)
    assert now() == TRANSFER_SECONDS


Send = tuple[Header, bytes]


def status(data: bytes) -> Send:
    return StatusReply(len(data)), data


TOO_LARGE: Send = (RunReply(MAX_RUN_BYTES + 1, 0), b"x" * (MAX_RUN_BYTES + 1))
OTHER_KIND: Send = (WantStatus(), b"")


@pytest.mark.parametrize(
    ("ask", "replies", "seconds", "error"),
    [
        pytest.param(ask_run, [TOO_LARGE], 0.0, BadPayload, id="run, too large"),
        pytest.param(ask_run, [OTHER_KIND], 0.0, BadPayload, id="run, of another kind"),
        pytest.param(ask_run, [status(b"{}")], 0.0, BadPayload, id="run, a status"),
        pytest.param(ask_run, [(RunReply(100, 100), b"x" * 150)], 0.0, PeerError, id="run, less than promised"),
        pytest.param(ask_run, [], 0.0, PeerError, id="run, nothing"),
        pytest.param(ask_run, [], 1000.0, PeerSilent, id="run, silence"),
        pytest.param(ask_run, [(RunReply(1000, 0), b"x")], 1000.0, PeerSilent, id="run, stalled"),
        pytest.param(ask_status, [status(b"")], 0.0, BadPayload, id="status, empty"),
        pytest.param(ask_status, [status(b"no json")], 0.0, BadPayload, id="status, no JSON"),
        pytest.param(ask_status, [status(b"[1]")], 0.0, BadPayload, id="status, no object"),
        pytest.param(ask_status, [status(b"\xff\xfe")], 0.0, BadPayload, id="status, no text"),
        pytest.param(ask_status, [status(b"[" * MAX_STATUS_BYTES)], 0.0, BadPayload, id="status, deep lists"),
        pytest.param(ask_status, [status(b'{"a":' * 10_000)], 0.0, BadPayload, id="status, deep objects"),
        pytest.param(ask_status, [status(b"1" * 10_000)], 0.0, BadPayload, id="status, long number"),
        pytest.param(ask_status, [status(b"x" * (MAX_STATUS_BYTES + 1))], 0.0, BadPayload, id="status, too large"),
        pytest.param(ask_status, [TOO_LARGE], 0.0, BadPayload, id="status, a run that is too large"),
        pytest.param(ask_status, [OTHER_KIND], 0.0, BadPayload, id="status, of another kind"),
    ],
)
@on_virtual_time
async def test_false_reply_fails_the_attempt(
    ask: Callable[..., Awaitable[object]], replies: list[Send], seconds: float, error: type[Exception]
) -> None:
    network = SimNetwork(Trace())
    server, client = network.join("a"), network.join("x")

    async def serve(peer: PeerId, stream: Stream) -> None:
        await stream.receive(wire.MAX_HEADER_BYTES)
        for header, data in replies:
            await stream.send(header, data)
        await asyncio.sleep(seconds)

    server.serve(BOOTSTRAP_METHOD, serve)
    with pytest.raises((PeerError, BadPayload)) as caught:
        await ask(client, "a", now() + ATTEMPT_SECONDS)
    assert now() <= ATTEMPT_SECONDS + 0.1
    assert issubclass(caught.type, error)
