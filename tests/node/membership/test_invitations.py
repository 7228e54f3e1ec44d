"""Tickets as text, and the issuer's account of them."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from node.membership.invitations import MISTYPED, PREFIX, Invitations, Ticket, TicketError, read_ticket, redeemed_part
from node.runtime.identity import peer_id_of, verify
from tests.node.membership.test_admission import ANNA, BERT, CARL, EVE, FOUNDER, NOW, RUN, chain, link

AT = (f"/ip4/203.0.113.5/tcp/4001/p2p/{peer_id_of(ANNA.public)}", f"/dns4/box/tcp/1/p2p/{peer_id_of(ANNA.public)}")
TICKET = Ticket(RUN, ANNA.public, NOW, bytes(range(32)), addresses=AT)
PERSONAL = Ticket(RUN, ANNA.public, shown=chain(FOUNDER, ANNA, BERT), addresses=AT)


@pytest.mark.parametrize("ticket, characters", [(TICKET, 225), (PERSONAL, 900)])
def test_ticket_reads_back_as_pasted(ticket: Ticket, characters: int) -> None:
    text = ticket.encode()
    assert len(text) < characters and text.startswith(PREFIX)
    for pasted in (text, f"  {text.upper()}\n", f"{text[:70]}\n{text[70:140]}\r\n {text[140:]}", f"'{text}'"):
        assert read_ticket(pasted) == ticket


def test_ticket_keeps_its_bytes() -> None:
    digests = [hashlib.sha256(each.encode().encode()).hexdigest()[:16] for each in (TICKET, PERSONAL)]
    assert digests == ["1ae76b02feb52487", "7513c2b72b72914f"]


def test_mistyped_ticket_is_refused() -> None:
    text, chance = TICKET.encode(), random.Random(1)
    for _ in range(2000):
        place = chance.randrange(len(text))
        for wrong in (text[:place], text[:place] + chance.choice("abcdefgh234567") + text[place + 1 :]):
            if wrong != text:
                with pytest.raises(TicketError, match=MISTYPED):
                    read_ticket(wrong)
    for wrong in ("", "starling1", "starling1!", f"{text}{text}", "starling1" + "a" * 5000, "/ip4/1.2.3.4/tcp/1"):
        with pytest.raises(TicketError, match=MISTYPED):
            read_ticket(wrong)


def test_redeeming_signature_is_for_one_peer_and_one_issuer() -> None:
    signature = TICKET.redeem(BERT.public)
    key = peer_id_of(TICKET.key)
    assert verify(key, redeemed_part(RUN, ANNA.public, BERT.public), signature)
    assert not verify(key, redeemed_part(RUN, ANNA.public, EVE.public), signature)
    assert not verify(key, redeemed_part(RUN, FOUNDER.public, BERT.public), signature)


def test_account_counts_uses_by_peer_and_survives_json() -> None:
    account = Invitations(RUN).add(TICKET.key, 2, NOW, NOW).add(b"x" * 32, 1, NOW, NOW)
    assert [each.number for each in account.invites] == [1, 2]
    for guest in (BERT, CARL):
        assert not account.why_not(TICKET.key, guest.public, NOW)
        account = account.redeemed(TICKET.key, link(ANNA, guest))
        account = Invitations.of_json(json.loads(json.dumps(account.as_json())))
    assert not account.why_not(TICKET.key, BERT.public, NOW + 1)  # again, even late
    assert peer_id_of(CARL.public)[-6:] in account.why_not(TICKET.key, EVE.public, NOW)
    assert "expired" in account.why_not(b"x" * 32, EVE.public, NOW + 1)
    assert "revoked" in account.voided(1).why_not(TICKET.key, BERT.public, NOW)
    assert "no such ticket" in account.why_not(b"y" * 32, BERT.public, NOW)
