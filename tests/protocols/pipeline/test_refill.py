"""Who goes to a stage that has lost all its members, and who has to agree."""

from __future__ import annotations

from dataclasses import replace

from protocols.pipeline.backups import electors, is_majority, proposers
from protocols.pipeline.balance import PlacedPeer, Placements

RUN, STAGE = bytes(32), 1
PEERS = tuple(PlacedPeer(f"p{number}", stage) for number, stage in enumerate((0, 0, 0, 2, 2)))


def turns(held: dict[str, int], *peers: PlacedPeer) -> list[str]:
    return proposers(Placements(RUN, 9, (1.0,) * 3, peers or PEERS), STAGE, 1, held)


def test_newest_backup_goes_first_and_then_one_whose_stage_keeps_enough() -> None:
    assert turns({"p0": 5, "p3": 10}) == ["p3", "p0"]
    assert turns({"p3": 10, "p0": 10}) == ["p0", "p3"], "stage 0 keeps two, stage 2 one"


def test_nobody_goes_who_is_pinned_or_the_last_of_its_stage() -> None:
    pinned, moves, last = replace(PEERS[0], pinned=True), replace(PEERS[1], moving=2), PEERS[3]
    assert turns({"p0": 10, "p1": 10, "p3": 10}, pinned, moves, PEERS[2], last) == []
    assert turns({"p1": 10}, replace(PEERS[1], moving=STAGE), PEERS[2]) == ["p1"], "its own turn has begun"


def test_most_of_those_asked_have_to_agree_and_of_many_only_some_are_asked() -> None:
    many = [f"p{number}" for number in range(100)]
    asked = electors(RUN, STAGE, 1, many, 31)
    assert len(asked) == 31 and asked == electors(RUN, STAGE, 1, reversed(many), 31)
    assert asked != electors(RUN, STAGE, 2, many, 31)
    assert is_majority(asked[:16], asked) and not is_majority(asked[:15], asked)
    assert not is_majority(["p0", "p0"], ["p0", "p1"]) and not is_majority(["x", "y"], ["p0", "p1", "p2"])
