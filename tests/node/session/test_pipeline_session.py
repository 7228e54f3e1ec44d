"""What a stage says of its own outer parameters, which evaluations of stage 0 wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.session.pipeline_session import settled_rounds
from protocols.history.chain import UNSETTLED


@pytest.mark.parametrize(
    ("root", "lacks_state", "rounds"),
    [(b"r" * 32, False, 7), (UNSETTLED, False, 6), (b"r" * 32, True, 0)],
    ids=["all are in it", "its outer step is under way", "it has yet to fetch the state"],
)
def test_parameters_have_the_result_of_all_rounds_that_are_settled(root: bytes, lacks_state: bool, rounds: int) -> None:
    """Skipped rounds, too: a replica that skipped the last ones must not hold up an evaluation."""
    chain: Any = SimpleNamespace(trained=7, head=SimpleNamespace(state_root=root), lacks_state=lacks_state)
    assert settled_rounds(chain) == rounds
