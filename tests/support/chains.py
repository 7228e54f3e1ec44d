"""Small chains of made-up rounds."""

from __future__ import annotations

from protocols.base import Head, Member
from protocols.consensus import record as records
from protocols.history.chain import Chain
from tests.support.fake_rounds import ROOT, RUN, line

ROSTER = (Member("anna"), Member("bert"))


def fresh() -> Chain:
    return Chain(RUN, "run", ROSTER, ROOT)


def grown(rounds: int, **changes: object) -> Chain:
    chain = fresh()
    for link in line(chain.head, rounds, **changes):
        chain.extend(link.certificate)
    return chain


def lineages(chain: Chain) -> list[bytes]:
    return [records.genesis(RUN), *(records.lineage(each) for each in chain.records)]


def state(chain: Chain) -> tuple[Head, tuple[bytes, ...], tuple[bytes, ...]]:
    return chain.head, chain.records, chain.locator()
