"""What all rounds of one averager work with."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Host, Member, Settings
from protocols.codec import Codec
from protocols.post import Ledger, Post
from protocols.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Desk:
    """What stays from round to round."""

    host: Host
    settings: Settings
    codec: Codec
    me: Member
    ledger: Ledger
    post: Post
    shelf: Shelf
