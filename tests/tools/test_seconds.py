"""The budget of processor seconds."""

from __future__ import annotations

from tests.support.seconds import over_budget


def test_folder_with_over_twice_its_share_is_named() -> None:
    budget = {"sim": 10.0, "node": 90.0}
    assert over_budget({"sim": 4.0, "node": 18.0}, budget) == []
    (line,) = over_budget({"sim": 5.0, "node": 18.0}, budget)
    assert line == "sim takes 21.7% of the processor seconds, over twice its 10.0%"
    assert len(over_budget({"sim": 2.0, "node": 18.0, "new": 1.0}, budget)) == 1, "a new folder needs a budget"
