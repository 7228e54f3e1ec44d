"""The round on the script's progress bar."""

from __future__ import annotations

import io

from tqdm import tqdm

from node.library.swarm import _shown_on_bar


def test_round_is_shown_on_the_outermost_bar_with_no_postfix_of_its_own() -> None:
    def metrics(number: int) -> dict[str, float]:
        return {"swarm/round": float(number), "swarm/peers": 2.0, "swarm/loss": 1.23456789, "swarm/tokens": 9.0}

    assert _shown_on_bar(metrics(1), "") == ""
    out = io.StringIO()
    with tqdm(range(9), file=out, ncols=100) as outer, tqdm(range(3), file=out, ncols=100) as inner:
        shown = _shown_on_bar(metrics(1), "")
        assert shown == outer.postfix == "round=1, peers=2, loss=1.23457" and shown in out.getvalue()
        shown = _shown_on_bar(metrics(2), shown)
        assert outer.postfix == "round=2, peers=2, loss=1.23457" and not inner.postfix
        outer.set_postfix(mine=3)
        assert _shown_on_bar(metrics(3), shown) == shown and outer.postfix == "mine=3"
    with tqdm(range(9), file=out) as later:
        assert _shown_on_bar({}, shown) == "" and not later.postfix
