"""Statements about resting from hostile members: forged, in another's name, of another round, or played again."""

from __future__ import annotations

import pytest

from protocols.base import BadPayload, Member, RoundKey
from protocols.butterfly.resting import Resting, RestingMembers
from tests.sim.host import SimSigner
from tests.support.variants import variants

KEY = RoundKey(bytes(32), "run", bytes(32), 3)
ME = Member("p1")
SIGNER = SimSigner("p1", 1)


def statements() -> tuple[Resting, Resting]:
    """The statements of a member that rests, and then works again."""
    own = RestingMembers()
    return own.state(KEY, ME, True, SIGNER), own.state(KEY, ME, False, SIGNER)


def test_statement_played_again_changes_nothing() -> None:
    """The one from before the member resumed, as in a later attempt at the round."""
    heard = RestingMembers()
    rests, works = statements()
    assert heard.take(rests, SIGNER.verify) and heard.peers() == {"p1"}
    assert heard.take(works, SIGNER.verify) and heard.peers() == frozenset()
    assert not heard.take(rests, SIGNER.verify) and heard.peers() == frozenset()


def test_changed_statement_is_refused() -> None:
    heard, (genuine, _) = RestingMembers(), statements()
    for changed in variants(genuine):
        with pytest.raises(BadPayload, match="forged"):
            heard.take(changed, SIGNER.verify)
    assert heard.peers() == frozenset()
