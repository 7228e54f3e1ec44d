"""The model of draws that docs/decisions/0089 rests on: what silence costs decides whether liars win."""

from __future__ import annotations

from benchmarks.rotation import play


def test_liars_win_by_the_lineage_and_not_where_silence_costs_their_place() -> None:
    found = {policy: play(policy, 0.2, runs=12, draws=300) for policy in ("lineage", "kept", "lost")}
    assert len(found["lineage"].majorities) == 12
    shares = {policy: sum(each.shares) / 12 for policy, each in found.items()}
    assert shares["lineage"] > 0.9 > shares["kept"] > 0.2 > shares["lost"]
    assert not found["lost"].majorities


def test_without_liars_nobody_withholds() -> None:
    assert set(play("lost", 0.0, runs=2, draws=50).shares) == {0.0}
