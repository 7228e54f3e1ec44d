"""Moshpit over given states: exact means by tokens; groups fail alone; peers that are late, lie, fall silent, die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from protocols.base import Deadline, Host, Member, Outcome, PeerId, Settings, Vector
from protocols.moshpit.averager import Moshpit
from protocols.moshpit.group_allreduce import GroupAllReduce
from protocols.moshpit.state import ACQUAINTANCES, MoshpitState
from tests.sim.contact import LIVENESS_SECONDS
from tests.sim.host import SimDirectory, sim_host
from tests.sim.moshpit_harness import MoshpitHarness, Told
from tests.sim.network import SimNetwork, Trace


def swarm(count: int, most: int = 8, elements: int = 1001, **options: object) -> MoshpitHarness:
    """Peers whose states are a run's: near each other, and each with a momentum."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(elements, generator=generator)
    states = [
        [common + 0.1 * torch.randn(elements, generator=generator), torch.randn(elements, generator=generator)]
        for _ in range(count)
    ]
    rng = random.Random(count)
    return MoshpitHarness(states, [rng.randrange(1000, 5000) for _ in range(count)], most=most, **options)  # type: ignore[arg-type]


def mean_of(pits: MoshpitHarness) -> torch.Tensor:
    """By tokens, in float64, of the states as they are now."""
    whole = [torch.cat(state).double() for state in pits.states]
    total = sum(tokens * state for tokens, state in zip(pits.tokens, whole, strict=True))
    assert isinstance(total, torch.Tensor)
    return total / sum(pits.tokens)


def off(state: Sequence[Vector], mean: torch.Tensor) -> float:
    return float((torch.cat(list(state)).double() - mean).norm() / mean.norm())


def same_bits_in_a_group(histories: dict[PeerId, list[Told]]) -> None:
    held: dict[str, bytes] = {}
    for told in (told for history in histories.values() for told in history if told.group):
        bits = torch.cat(told.states).numpy().tobytes()
        assert held.setdefault(told.group, bits) == bits


def outcomes(history: Sequence[Told]) -> list[str]:
    return [str(told.mean.outcome) for told in history]


def named(histories: dict[PeerId, list[Told]], peer: PeerId) -> list[str]:
    """What the others say of a peer."""
    tellers = [history for teller, history in histories.items() if teller != peer]
    return [blame.why for history in tellers for told in history for blame in told.mean.blamed if blame.peer == peer]


# -- what it is for ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, most", ((2, 8), (3, 8), (8, 8), (4, 2), (9, 3), (12, 4), (8, 2)))
def test_full_grid_gives_the_exact_token_mean(count: int, most: int) -> None:
    """Unequal tokens, two vectors, one to three axes; to carry a peer's own tokens along would be far off."""
    pits = swarm(count, most)
    mean = mean_of(pits)
    histories = pits.play()
    assert all(off(state, mean) <= 1e-6 for state in pits.states)
    assert {outcome for history in histories.values() for outcome in outcomes(history)} == {"committed"}
    assert all(not told.mean.blamed and not told.half_exchanges for history in histories.values() for told in history)
    same_bits_in_a_group(histories)


def test_single_peer_continues_at_once() -> None:
    pits = swarm(1)
    (told,) = pits.play()["p00"]
    assert told.mean.outcome == Outcome.SKIPPED and told.seconds < 1.5


def test_peer_without_tokens_takes_the_mean_unweighted() -> None:
    pits = swarm(3)
    pits.tokens = [2000, 0, 3000]
    mean = mean_of(pits)
    histories = pits.play()
    assert all(off(state, mean) <= 1e-6 for state in pits.states)
    assert all("p01" not in history[0].mean.peers for history in histories.values())


def test_round_without_any_tokens_is_skipped() -> None:
    """The mean of nothing would be zero: a state that is lost."""
    pits = swarm(3)
    pits.tokens = [0, 0, 0]
    before = [torch.cat(state) for state in pits.states]
    histories = pits.play()
    assert all(outcomes(history) == ["skipped"] for history in histories.values())
    assert all(torch.equal(torch.cat(state), old) for state, old in zip(pits.states, before, strict=True))


def test_grid_with_holes_approximates_and_keeps_mean() -> None:
    """With equal tokens the mean of all is what it was, whatever the lines' lengths; the spread falls to a tenth."""
    pits = swarm(13, most=4)
    pits.tokens = [1000] * 13
    mean = mean_of(pits)
    apart = max(off(state, mean) for state in pits.states)
    pits.play(rounds=2)
    assert max(off(state, mean) for state in pits.states) < 0.1 * apart
    assert float((mean_of(pits) - mean).norm() / mean.norm()) < 1e-6


@pytest.mark.parametrize("name", ("fp16", "int8"))
def test_gradient_codec_is_not_used_for_states(name: str) -> None:
    """int8 is for pseudo-gradients; half precision loses 2**-11 of a number at most, once on either way."""
    pits = swarm(4, most=2, codec=name)
    mean = mean_of(pits)
    largest = max(float(vector.abs().max()) for state in pits.states for vector in state)
    pits.play()
    worst = max(float((torch.cat(state).double() - mean).abs().max()) for state in pits.states)
    assert worst <= (4 * 2**-11 * largest if name == "fp16" else 1e-5)
    assert worst > 1e-5 or name == "int8"


def test_same_state_never_counts_twice() -> None:
    histories = swarm(4, most=2).play(rounds=3)
    for history in histories.values():
        names = [name for told in history for each in told.mean.contributions.values() for name in each.messages]
        assert len(names) == len(set(names)) > 6
        assert all(len(name) <= 128 for name in names)


# -- time --------------------------------------------------------------------------------------------------------------


def test_slow_peer_is_cut_and_counts_partially() -> None:
    """It has half of the others' speed or less: they do not wait for it, and it is in every group all the same."""
    pits = swarm(4, train_seconds=(10.0, 10.0, 10.0, 60.0))
    histories = pits.play(rounds=2)
    assert all(outcomes(history) == ["committed"] * 2 for history in histories.values())
    assert all(told.seconds < 16.0 and len(told.mean.peers) == 4 for told in histories["p00"])


def test_late_peer_jumps_to_the_others_round() -> None:
    """One whose clock is rounds behind jumps to theirs, and commits it with them."""
    pits = swarm(4, round_seconds=60.0)

    def hold_up(network: SimNetwork) -> None:
        for peer in ("p00", "p01", "p02"):
            network.block("p03", peer)
            network.block(peer, "p03")

        def heal() -> None:
            for peer in ("p00", "p01", "p02"):
                network.heal("p03", peer)
                network.heal(peer, "p03")

        asyncio.get_running_loop().call_later(12.0, heal)

    pits.before = hold_up
    pits.train_seconds = (3.0, 3.0, 3.0, 29.0)
    histories = pits.play(rounds=8)
    rounds = [told.round for told in histories["p03"]]
    assert rounds == sorted(set(rounds)) and rounds[0] > 0, "it jumped"
    assert outcomes(histories["p03"])[-1] == "committed"
    same_bits_in_a_group(histories)


# -- what befalls a group stays in it ----------------------------------------------------------------------------------


def test_death_in_one_group_spares_the_others() -> None:
    """A member dies in the data phase of its first group: that group has no result, the others of the grid have."""
    pits = swarm(4, most=2, elements=60_000)
    deaths: list[PeerId] = []

    def kill_in_data(network: SimNetwork) -> None:
        def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
            mixing = pits.averagers["p03"]._moshpit.mixings.values() if "p03" in pits.averagers else ()
            if mixing and not deaths:
                deaths.append("p03")
                network.kill("p03")

        network.watch = watch

    pits.before = kill_in_data
    histories = pits.play()
    groups = [name for peer in ("p00", "p01", "p02") for name in histories[peer][0].mean.contributions]
    assert deaths and groups
    same_bits_in_a_group(histories)
    assert all(told.seconds < 20.0 for peer in ("p00", "p01", "p02") for told in histories[peer])
    completed = [peer for peer in ("p00", "p01", "p02") if histories[peer][0].mean.outcome == Outcome.COMMITTED]
    assert len(completed) >= 2, "those in the other line"


def test_link_slower_than_claimed_still_averages() -> None:
    """Budgets follow claims, which come down until a group has the time that it takes, and then hardly miss it."""
    pits = swarm(2, elements=60_000, train_seconds=(60.0,) * 2)

    def slow(network: SimNetwork) -> None:
        for node in network.nodes.values():
            node.slowness = 400.0

    pits.before = slow
    histories = pits.play(rounds=26)
    assert outcomes(histories["p00"])[:2] == ["skipped"] * 2, "or nothing had to come down"
    assert outcomes(histories["p00"])[-20:].count("committed") >= 18


@pytest.mark.parametrize("sent_bytes", (400_000, 600_000))
def test_peer_silent_mid_round_costs_only_detection_time(sent_bytes: int) -> None:
    """Its streams stay open, and its part does not come: nobody waits for the budget's end, nor for another's answer
    that waits for its own."""
    pits = swarm(4, elements=60_000, train_seconds=(2.0,) * 4)
    others = ("p00", "p01", "p03")

    def silence(network: SimNetwork) -> None:
        def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
            if network.nodes["p02"].sent_bytes > sent_bytes:
                for each in others:
                    network.block("p02", each)

        network.watch = watch

    pits.before = silence
    histories = pits.play(rounds=2)
    assert all(histories[peer][0].seconds < 2.4 + LIVENESS_SECONDS + 2.0 for peer in others)
    assert named({peer: histories[peer] for peer in others}, "p02")
    assert all(outcomes(histories[peer])[-1] == "committed" for peer in others)


def points(pits: MoshpitHarness, victim: PeerId) -> int:
    """How many messages a peer sends and receives in a run without faults."""
    pits.play()
    return pits.network.nodes[victim].messages


def death_of(victim: PeerId, number: int) -> Callable[[SimNetwork], None]:
    """At its message of that number."""

    def kill(network: SimNetwork) -> None:
        def watch(who: PeerId, message: int, way: str, other: PeerId) -> None:
            if (who, message) == (victim, number):
                network.kill(who)

        network.watch = watch

    return kill


@pytest.mark.parametrize("first", range(4))
def test_death_at_every_message_is_survived(first: int) -> None:
    """The others end their round soon, and those who complete a group hold the same bits; every message is in
    `python -m tests.sim.crashes --protocol moshpit`, here is every one of a group of three in four shares."""
    count = points(swarm(3, elements=60), "p01")
    assert count > 40
    for number in range(1 + first, count + 1, 4):
        pits = swarm(3, elements=60)
        pits.before = death_of("p01", number)
        histories = pits.play(rounds=2)
        same_bits_in_a_group(histories)
        for peer in ("p00", "p02"):
            assert outcomes(histories[peer])[-1] == "committed", number
            assert all(told.seconds < 30.0 for told in histories[peer]), number
            assert all(bool(torch.isfinite(torch.cat(told.states)).all()) for told in histories[peer])


def handed_on() -> tuple[int, PeerId, PeerId]:
    """At which of p01's messages it has to die for one of the other two to have its part, and hand it to the other."""
    had: list[PeerId] = []
    obtain = GroupAllReduce._obtain

    async def watched(mixing: GroupAllReduce, part: int) -> bool:
        found = await obtain(mixing, part)
        had.extend({"p00", "p02"} - {mixing._context.me.peer} if found else ())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupAllReduce, "_obtain", watched)
        for number in range(45, points(swarm(3, elements=60), "p01") + 1):
            pits = swarm(3, elements=60)
            pits.before = death_of("p01", number)
            pits.play()
            if had:
                giver = had[0]
                return number, giver, "p02" if giver == "p00" else "p00"
    pytest.fail("no part was had of another member")


def test_part_of_dead_reducer_comes_from_another_member() -> None:
    """If it has given it to one of them; only what its reducer made counts."""
    pits = swarm(3, elements=60)
    pits.before = death_of("p01", handed_on()[0])
    histories = pits.play()
    same_bits_in_a_group(histories)
    assert all(outcomes(histories[peer]) == ["committed"] for peer in ("p00", "p02"))
    assert not any(histories[peer][0].half_exchanges for peer in ("p00", "p02"))


@pytest.mark.parametrize("way", ("both", "from", "to"))
def test_silence_costs_little_time(way: str) -> None:
    """A peer that neither hears nor is heard, or only one of it, from the middle of the first round on."""
    pits = swarm(4, train_seconds=(2.0,) * 4)

    def silence(network: SimNetwork) -> None:
        def cut() -> None:
            for peer in ("p00", "p01", "p03"):
                if way != "to":
                    network.block("p02", peer)
                if way != "from":
                    network.block(peer, "p02")

        asyncio.get_running_loop().call_later(2.1, cut)

    pits.before = silence
    histories = pits.play(rounds=3)
    same_bits_in_a_group(histories)
    for peer in ("p00", "p01", "p03"):
        assert outcomes(histories[peer])[-1] == "committed"
        assert all(told.seconds < 30.0 for told in histories[peer])
    assert all(told.seconds < 60.0 for told in histories["p02"])


def test_disconnected_peer_blames_no_one_and_rejoins() -> None:
    """It has had nothing of anybody, which is its own line's fault: it is in their group again in the next round."""
    for hundredths in range(220, 242, 2):
        pits = swarm(3, elements=60_000, train_seconds=(2.0,) * 3)

        def fault(network: SimNetwork, seconds: float = hundredths / 100) -> None:
            def each(call: Callable[[PeerId, PeerId], None]) -> None:
                for peer in ("p00", "p01"):
                    call("p02", peer)
                    call(peer, "p02")

            asyncio.get_running_loop().call_later(seconds, each, network.block)
            asyncio.get_running_loop().call_later(seconds + 5.0, each, network.heal)

        pits.before = fault
        history = pits.play(rounds=4)["p02"]
        began = [sum(told.seconds for told in history[:index]) for index in range(len(history))]
        since = [told for told, at in zip(history, began, strict=True) if at > hundredths / 100 + 5.0]
        assert since and outcomes(since) == ["committed"] * len(since), hundredths


# -- who meets whom ----------------------------------------------------------------------------------------------------


class Nobody:
    """Members of which none but this peer is in sight."""

    version = 0

    def __init__(self, me: Member) -> None:
        self._me = me

    def live(self) -> tuple[Member, ...]:
        return (self._me,)

    async def changed(self, since: int, deadline: Deadline) -> int:
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
        return 0


def test_unconnected_peers_find_groups_through_the_directory() -> None:
    """They keep coordinates of their own, which their positions in groups become; some rounds bring them close."""

    def dress(host: Host) -> Host:
        return replace(host, members=Nobody(Member(host.me)))

    pits = swarm(4, most=4, told=0, dress=dress, train_seconds=(4.0,) * 4)
    mean = mean_of(pits)
    apart = max(off(state, mean) for state in pits.states)
    histories = pits.play(rounds=4)
    assert all("committed" in outcomes(history) for history in histories.values())
    assert max(off(state, mean_of(pits)) for state in pits.states) < 0.5 * apart
    same_bits_in_a_group(histories)


def test_directory_entry_is_renewed_during_long_training() -> None:
    """What is said there is forgotten after ten minutes; who comes later has to find it all the same."""
    pits = swarm(
        2, most=2, told=0, dress=lambda host: replace(host, members=Nobody(Member(host.me))),
        train_seconds=(1500.0,) * 2, round_seconds=3000.0,
    )  # fmt: skip
    listed: list[Sequence[tuple[PeerId, bytes]]] = []
    tasks: list[asyncio.Task[None]] = []

    async def ask() -> None:
        moshpit = pits.averagers["p00"]._moshpit
        now = asyncio.get_running_loop().time()
        listed.append(await moshpit.context.host.directory.find(f"moshpit/{moshpit.coming.hex()}", 2, now + 1.0))

    def begin(network: SimNetwork) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1400.0, lambda: tasks.append(loop.create_task(ask())))

    pits.before = begin
    histories = pits.play()
    assert [peer for peer, _ in listed[0]] == ["p00", "p01"]
    assert outcomes(histories["p00"]) == ["committed"]


def test_peers_in_diverged_rounds_meet_again() -> None:
    """Each finds its line in the directory, under its round: only acquaintances can say that it is another by now."""
    pits = swarm(4, most=2, told=0, train_seconds=(4.0,) * 4, starts=(0, 0, 3, 3))
    apart = max(off(state, mean_of(pits)) for state in pits.states)
    histories = pits.play(rounds=7)
    assert [told.round for told in histories["p00"]][:2] == [3, 4], "at once"
    assert max(off(state, mean_of(pits)) for state in pits.states) < 0.2 * apart
    same_bits_in_a_group(histories)


def test_announcements_go_to_group_and_few_contacts() -> None:
    """Sixteen in groups of four, told by the directory: what they know of each other stays small, and they mix."""
    pits = swarm(16, most=4, told=8, elements=16, train_seconds=(4.0,) * 16)
    apart, most = max(off(state, mean_of(pits)) for state in pits.states), 0

    def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
        nonlocal most
        if way == "sent":
            most = max(most, len(pits.averagers[peer]._moshpit.in_sight()))

    def begin(network: SimNetwork) -> None:
        network.watch = watch

    pits.before = begin
    histories = pits.play(rounds=3)
    assert most < 15
    assert all("committed" in outcomes(history) for history in histories.values())
    assert max(off(state, mean_of(pits)) for state in pits.states) < 0.3 * apart
    same_bits_in_a_group(histories)


@pytest.fixture
def moshpit() -> MoshpitState:
    """That of p00, who is to tell one other at most, before its first round."""
    network = SimNetwork(Trace())
    hosts = [sim_host(network, network.join(f"p{index:02}"), 1, {}) for index in range(6)]
    return Moshpit(hosts[0], Settings("fp32", (8,), 8), most=2, told=1)._moshpit


async def test_contacts_change_each_round(moshpit: MoshpitState) -> None:
    met = []
    for number in range(4):
        moshpit.begin(number)
        met.append(tuple(moshpit.in_sight()))
    assert all(len(each) == ACQUAINTANCES for each in met) and len(set(met)) > 1


async def test_dead_peer_is_not_sought_until_it_returns(moshpit: MoshpitState) -> None:
    """The directory goes on naming it for as long as it said that it would come."""
    moshpit.begin(0)
    network = moshpit.context.host.transport.network  # type: ignore[attr-defined]
    moshpit.meet("p03", b"line")
    network.contacts.views["p00"].lose("p03")
    moshpit.look()
    moshpit.meet("p03", b"line")
    assert "p03" not in moshpit.in_sight() and "p03" not in moshpit.context.tracker.sight
    network.contacts.views["p00"].meet(Member("p03", 1))
    moshpit.meet("p03", b"line")
    moshpit.look()
    assert moshpit.context.tracker.sight["p03"] == Member("p03", 1)


async def test_late_directory_answer_for_old_group_is_ignored(
    moshpit: MoshpitState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is slow, and this peer has come to its next line meanwhile, where that one may be, too."""
    moshpit.begin(0)
    others = sorted({f"p{index:02}" for index in range(1, 6)} - set(moshpit.in_sight()))
    moshpit.set_next_group(b"first")

    async def find(directory: SimDirectory, scope: str, limit: int, deadline: Deadline) -> list[tuple[PeerId, bytes]]:
        moshpit.set_next_group(b"second")
        moshpit.meet(others[0], b"second")
        return [(others[0], b""), (others[1], b"")] if scope.endswith(b"first".hex()) else []

    monkeypatch.setattr(SimDirectory, "find", find)
    await moshpit.search(asyncio.get_running_loop().time() + 0.01, lambda: None)
    assert moshpit.found[others[0]] == b"second" and others[1] not in moshpit.found


async def test_members_of_finished_groups_are_dropped(moshpit: MoshpitState) -> None:
    moshpit.begin(0)
    acquaintances = set(moshpit.in_sight())
    others = sorted({f"p{index:02}" for index in range(1, 6)} - acquaintances)
    moshpit.meet(others[0], b"first")
    moshpit.meet(others[1], b"second")
    moshpit.narrow(b"second")
    assert set(moshpit.in_sight()) == {*acquaintances, others[1]}
    moshpit.meet(others[1])
    assert moshpit.found[others[1]] == b"second", "it is no mere acquaintance"


def test_grid_shrinks_when_peers_leave() -> None:
    """Nine on 3 x 3; when five of them die, the rest come to one group of four."""
    pits = swarm(9, most=8)

    def kill_some(network: SimNetwork) -> None:
        for peer in ("p04", "p05", "p06", "p07", "p08"):
            asyncio.get_running_loop().call_later(2.0, network.kill, peer)

    pits.before = kill_some
    histories = pits.play(rounds=3)
    shapes = {averager._moshpit.grid.shape for peer, averager in pits.averagers.items() if peer < "p04"}  # type: ignore[union-attr]
    assert shapes == {(8,)}
    assert all(told.seconds < 20.0 for peer in ("p00", "p01", "p02", "p03") for told in histories[peer])
    assert all(len(histories[peer][-1].mean.peers) == 4 for peer in ("p00", "p01", "p02", "p03"))
