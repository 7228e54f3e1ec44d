"""Private runs under faults: tickets, strangers and removals; and that the play notices what is broken."""

from __future__ import annotations

from typing import Any

import pytest

from node.membership.admission import PrivateRun, Revocations
from node.membership.invitations import Invitations
from node.membership.pass_exchange import PassExchange
from node.storage.pass_files import PassFiles
from tests.sim import private
from tests.sim.private import play
from tests.support.long import long


@pytest.mark.parametrize("seeds", ["0", "706", *long("1:60", "237", "640")])
def test_private_run_keeps_its_invariants_under_faults(seeds: str) -> None:
    """`python -m tests.sim.private --seeds 0:1000` plays more.

    706: a second record is proposed while a member waits before it asks again for the parts of the first.
    237: three that are cut off decide rounds, and are removed; the founder forks without those rounds.
    640: two that are cut off decide rounds that all others take over, and are removed.
    """
    assert private.main(["--seeds", seeds]) == 0


def _no_expulsion(self: PassExchange) -> None:
    """Streams of a removed peer stay."""


@pytest.mark.parametrize(
    ("seed", "place", "name", "broken", "invariants"),
    [
        (0, PassExchange, "serves", lambda self, peer, method: True, {"stranger"}),
        *long(
            (0, Revocations, "barring", lambda self, shown: None, {"removed"}),
            (0, PrivateRun, "_misfit", lambda self, links, subject: "", {"stranger"}),
            (0, Invitations, "why_not", lambda self, key, subject, now: "", {"stranger"}),
            (0, PassFiles, "keep_invitations", lambda self, invitations: None, {"lost"}),
            (2, PassExchange, "_judge_again", _no_expulsion, {"lost"}),
        ),
    ],
)
def test_broken_admission_is_noticed(
    seed: int, place: type, name: str, broken: Any, invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, broken)
    violations, _ = play(seed)
    assert {each.invariant for each in violations} & invariants
