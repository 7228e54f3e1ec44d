"""Passes and revocations: who is admitted to a private run."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.membership.admission import (
    MAX_DEPTH,
    MAX_REVOCATIONS,
    MAX_REVOCATIONS_OF_ONE,
    PEER,
    VISITOR,
    Inviters,
    Pass,
    PassLink,
    PrivateRun,
    Revocations,
    issue_link,
    revoke,
)
from protocols.base import BadPayload

RUN, NOW = bytes(range(32)), 1_800_000_000


class Key:
    def __init__(self, number: int) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(bytes((number % 256, number // 256)) + bytes(30))
        self.public = self._private.public_key().public_bytes_raw()
        self.sign = self._private.sign


FOUNDER, ANNA, BERT, CARL, DORA, EVE = map(Key, range(1, 7))


def link(issuer: Key, subject: Key, depth: int = 0, kind: int = PEER, until: int = 0, run: bytes = RUN) -> PassLink:
    return issue_link(
        issuer.sign,
        subject.public,
        issuer=issuer.public,
        run=run,
        kind=kind,
        serial=bytes(16),
        depth=depth,
        not_after=until,
    )


def chain(*holders: Key, depth: int = MAX_DEPTH) -> Pass:
    return Pass(tuple(link(*pair, depth - place) for place, pair in enumerate(pairwise(holders))))


def why_not(shown: Pass, subject: Key, revoked: Revocations | None = None, inviters: Inviters = "members") -> str:
    run = PrivateRun(RUN, FOUNDER.public, inviters)
    return run.why_not(shown, subject.public, revoked or Revocations(RUN, FOUNDER.public), NOW)


def test_link_and_revocation_keep_their_bytes() -> None:
    assert link(FOUNDER, ANNA, 3).signed.hex() == (
        "737461726c696e67207061737320310a" + "9801c420" + RUN.hex() + "c420" + FOUNDER.public.hex() + "c420"
        + ANNA.public.hex() + "00c410" + "00" * 16 + "0300"
    )  # fmt: skip
    assert revoke(FOUNDER.sign, FOUNDER.public, ANNA.public, run=RUN, time=NOW).signed.hex() == (
        "737461726c696e67207265766f6b6520310a" + "94c420" + RUN.hex() + "c420" + ANNA.public.hex() + "c420"
        + FOUNDER.public.hex() + "ce6b49d200"
    )  # fmt: skip
    assert chain(FOUNDER, ANNA).encode()[:6].hex() == "91919901c420"


def test_chain_from_the_founder_admits_its_last_subject_only() -> None:
    holders = (FOUNDER, ANNA, BERT, CARL, DORA)
    for count in range(1, len(holders) + 1):
        assert not why_not(chain(*holders[:count]), holders[count - 1])
        assert why_not(chain(*holders[:count]), EVE)
    longest = chain(*holders)
    assert not why_not(Pass((*longest.links, link(DORA, EVE, kind=VISITOR, until=NOW))), EVE)


@pytest.mark.parametrize(
    "shown, why",
    [
        (Pass(()), "no pass"),
        (chain(FOUNDER, ANNA, BERT), "another peer's"),
        (chain(ANNA, EVE), "another peer's"),
        (Pass((link(FOUNDER, EVE, 3, run=bytes(32)),)), "another run"),
        (Pass((link(FOUNDER, ANNA, 0), link(ANNA, EVE, 0))), "may not invite"),
        (Pass((link(FOUNDER, ANNA, 1), link(ANNA, EVE, 1))), "may not invite"),
        (Pass((link(FOUNDER, ANNA, kind=VISITOR, until=NOW), link(ANNA, EVE, kind=VISITOR, until=NOW))), "too much"),
        (Pass((link(FOUNDER, EVE, kind=VISITOR),)), "too much"),
        (Pass((link(FOUNDER, EVE, 1, VISITOR, NOW),)), "too much"),
        (Pass((link(FOUNDER, EVE, kind=VISITOR, until=NOW - 1),)), "expired"),
        (Pass((link(FOUNDER, EVE, 3, until=NOW - 1),)), "expired"),
        (Pass((replace(link(ANNA, EVE, 3), issuer=FOUNDER.public),)), "forged"),
        (Pass((replace(link(FOUNDER, ANNA, 3), subject=EVE.public),)), "forged"),
        (Pass((replace(link(FOUNDER, EVE, 0), depth=3),)), "forged"),
        (Pass((replace(link(FOUNDER, EVE), version=2),)), "another run"),
    ],
)
def test_any_other_chain_is_refused(shown: Pass, why: str) -> None:
    assert why in why_not(shown, EVE)


def test_only_the_founder_invites_where_the_run_says_so() -> None:
    assert not why_not(chain(FOUNDER, ANNA, depth=0), ANNA, inviters="founder")
    assert why_not(chain(FOUNDER, ANNA), ANNA, inviters="founder")
    assert why_not(Pass((link(FOUNDER, ANNA), link(ANNA, BERT))), BERT, inviters="founder")
    visitor = Pass((link(FOUNDER, ANNA), link(ANNA, BERT, kind=VISITOR, until=NOW)))
    assert not why_not(visitor, BERT, inviters="founder")


def test_revocation_holds_from_above_and_takes_the_guests_along() -> None:
    shown = chain(FOUNDER, ANNA, BERT, CARL)
    for issuer, subject, holds in (
        (FOUNDER, BERT, True), (ANNA, BERT, True), (FOUNDER, ANNA, True), (BERT, CARL, True),
        (BERT, ANNA, False), (EVE, BERT, False), (BERT, BERT, False), (FOUNDER, EVE, False),
    ):  # fmt: skip
        revoked = Revocations(RUN, FOUNDER.public)
        assert revoked.merge([revoke(issuer.sign, issuer.public, subject.public, run=RUN, time=NOW)])
        assert bool(why_not(shown, CARL, revoked)) == holds
    invited_again = chain(FOUNDER, DORA, CARL)
    assert not why_not(invited_again, CARL, revoked)


def test_revocations_merge_to_the_same_set_in_any_order() -> None:
    made = [
        revoke(key.sign, key.public, subject.public, run=RUN, time=NOW + late)
        for key in (FOUNDER, ANNA)
        for subject in (BERT, CARL)
        for late in (0, 1)
    ]
    sets = []
    for seed in range(5):
        random.Random(seed).shuffle(made)
        found = Revocations(RUN, FOUNDER.public)
        for each in made:
            found.merge([each])
        assert not found.merge(Revocations.decode(found.encode()))
        sets.append(found)
    assert len({each.digest for each in sets}) == 1 and len(Revocations.decode(sets[0].encode())) == 4


def test_forged_revocation_is_refused_and_one_member_cannot_fill_the_set() -> None:
    found = Revocations(RUN, FOUNDER.public)
    genuine = revoke(ANNA.sign, ANNA.public, BERT.public, run=RUN, time=NOW)
    for bad in (replace(genuine, issuer=FOUNDER.public), replace(genuine, run=bytes(32)), replace(genuine, time=1)):
        with pytest.raises(BadPayload):
            found.merge([bad])
    flood = [revoke(ANNA.sign, ANNA.public, bytes(31) + bytes((n,)), run=RUN, time=NOW) for n in range(100)]
    found.merge(flood)
    assert len(Revocations.decode(found.encode())) == MAX_REVOCATIONS_OF_ONE


def test_founders_revocations_find_place_in_a_full_set() -> None:
    found = Revocations(RUN, FOUNDER.public)
    for number in range(MAX_REVOCATIONS // MAX_REVOCATIONS_OF_ONE + 1):
        other = Key(1000 + number)
        found.merge(
            revoke(other.sign, other.public, bytes(30) + bytes((number, n)), run=RUN, time=NOW)
            for n in range(MAX_REVOCATIONS_OF_ONE)
        )
    assert len(Revocations.decode(found.encode())) == MAX_REVOCATIONS
    assert found.merge([revoke(FOUNDER.sign, FOUNDER.public, ANNA.public, run=RUN, time=NOW)])
    assert why_not(chain(FOUNDER, ANNA), ANNA, found)
    assert len(Revocations.decode(found.encode())) == MAX_REVOCATIONS


def accepted(encoded: bytes, subject: Key) -> bool:
    try:
        return not why_not(Pass.decode(encoded), subject)
    except BadPayload:
        return False


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_passes_are_never_accepted(count: int) -> None:
    chance, genuine, began = random.Random(7), chain(FOUNDER, ANNA, BERT).encode(), time.process_time()
    assert accepted(genuine, BERT)
    for _ in range(count):
        mutated = bytearray(genuine)
        place = chance.randrange(len(mutated))
        match chance.randrange(3):
            case 0:
                mutated[place] ^= 1 << chance.randrange(8)
            case 1:
                del mutated[place : place + chance.randint(1, 40)]
            case _:
                mutated[place:place] = chance.randbytes(chance.randint(1, 4))
        assert bytes(mutated) == genuine or not accepted(bytes(mutated), BERT)
    assert time.process_time() - began < 20
