"""The round on the script's progress bar."""

from __future__ import annotations

import io

from tqdm import tqdm

from node.library.shown import BarPostfix


def test_round_is_shown_on_the_outermost_bar_with_no_postfix_of_its_own() -> None:
    def metrics(number: int) -> dict[str, float]:
        return {"swarm/round": float(number), "swarm/peers": 2.0, "swarm/loss": 1.23456789, "swarm/tokens": 9.0}

    postfix = BarPostfix()
    postfix.show(metrics(1))
    assert postfix.text == ""
    out = io.StringIO()
    with tqdm(range(9), file=out, ncols=100) as outer, tqdm(range(3), file=out, ncols=100) as inner:
        postfix.show(metrics(1))
        assert postfix.text == outer.postfix == "round=1, peers=2, loss=1.23457" and postfix.text in out.getvalue()
        postfix.show(metrics(2))
        assert outer.postfix == "round=2, peers=2, loss=1.23457" and not inner.postfix
        outer.set_postfix(mine=3)
        postfix.show(metrics(3))
        assert postfix.text and outer.postfix == "mine=3"
    with tqdm(range(9), file=out) as later:
        postfix.show({})
        assert not postfix.text and not later.postfix
