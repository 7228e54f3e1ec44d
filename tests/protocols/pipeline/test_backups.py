"""Each stage's backup is at two peers of other stages, the same two whatever order they are listed in."""

from __future__ import annotations

from dataclasses import replace

from protocols.pipeline.backups import HOLDERS, PASS_SECONDS, ahead, fits, is_covered, is_due, missing, order
from protocols.pipeline.balance import PlacedPeer, Placements

STAGE = 1
PEERS = tuple(PlacedPeer(f"p{number}", number % 3) for number in range(9))


def view(*peers: PlacedPeer) -> Placements:
    return Placements(bytes(32), 7, (1.0,) * 3, peers or PEERS)


def test_only_live_peers_of_other_stages_hold_a_backup() -> None:
    rests, moves = replace(PEERS[0], works=False), replace(PEERS[3], moving=STAGE)
    found = {each.peer for each in order(view(rests, moves, *PEERS[4:]), STAGE)}
    assert found == {"p5", "p6", "p8"} and ahead(view(rests, moves, *PEERS[4:]), STAGE, "p0") is None


def test_two_are_due_at_once_and_the_next_one_only_after_a_while() -> None:
    def due(seconds: float) -> list[str]:
        before = {each.peer: ahead(view(), STAGE, each.peer) for each in PEERS if each.stage != STAGE}
        return [peer for peer, others in before.items() if others is not None and is_due(others, seconds)]

    first = [each.peer for each in order(view(), STAGE)]
    assert set(due(0.0)) == set(first[:HOLDERS])
    assert set(due(2 * PASS_SECONDS)) == set(first[: HOLDERS + 2])


def test_a_holder_goes_once_two_before_it_have_the_backup() -> None:
    first = [each.peer for each in order(view(), STAGE)]
    held = [replace(each, holds=(each.peer in (first[0], first[2])) << STAGE) for each in PEERS]
    two = [replace(each, holds=(each.peer in first[:3]) << STAGE) for each in PEERS]
    assert not is_covered(STAGE, ahead(view(*held), STAGE, first[2]) or [])
    assert is_covered(STAGE, ahead(view(*two), STAGE, first[2]) or [])
    assert (missing(view(), STAGE), missing(view(*held), STAGE)) == (2, 0)


def test_room_for_the_former_backup_while_the_new_one_comes() -> None:
    sizes = (100, 10, 30)
    assert fits(1, (), sizes, 20) and not fits(1, (), sizes, 19), "twice its size"
    assert fits(1, (2,), sizes, 70) and not fits(1, (2,), sizes, 69)
    assert not fits(0, (), sizes, 0)
