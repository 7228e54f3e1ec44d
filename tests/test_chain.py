"""The chain as one peer sees it: what extends the head, what does not, and what it remembers."""

from __future__ import annotations

import itertools

import pytest

from protocols import record as records
from protocols.base import BadPayload, Head, Member, RoundKey
from protocols.chain import KEEP_RECORDS, Chain, state_root
from protocols.record import Kind, Record

RUN = b"r" * 32
ROOT = b"0" * 32
ROSTER = (Member("anna"), Member("bert"))


def fresh() -> Chain:
    return Chain(RUN, "run", ROSTER, ROOT)


def following(chain: Chain, plan: bytes = b"d" * 32, roster: tuple[Member, ...] = ROSTER) -> Record:
    """A record that extends the head."""
    head = chain.head
    return Record(head.key.lineage, head.state_root, head.key.round, Kind.MEAN, plan, (), roster)


def test_a_chain_begins_at_its_runs_genesis() -> None:
    chain = fresh()
    assert chain.head == Head(RoundKey(RUN, "run", records.genesis(RUN), 0), ROSTER, ROOT, records.genesis(RUN))
    assert list(chain.records) == []
    assert Chain(b"s" * 32, "run", ROSTER, ROOT).head.key.lineage != chain.head.key.lineage


def test_a_record_moves_the_head() -> None:
    chain = fresh()
    record = following(chain, roster=(Member("bert"), Member("cleo", 3)))
    encoded = records.encode(record)
    assert chain.extend(encoded) == record
    key = RoundKey(RUN, "run", records.lineage(encoded), 1)
    assert chain.head == Head(key, (Member("bert"), Member("cleo", 3)), ROOT, records.genesis(RUN))
    assert list(chain.records) == [encoded]


def test_each_record_extends_the_one_before() -> None:
    chain = fresh()
    lineages = [chain.head.key.lineage]
    for number in range(5):
        record = following(chain)
        assert (record.parent, record.round) == (lineages[-1], number)
        chain.extend(records.encode(record))
        lineages.append(chain.head.key.lineage)
    assert len(set(lineages)) == 6
    assert [records.decode(each).parent for each in chain.records] == lineages[:-1]


@pytest.mark.parametrize(
    "parent, number",
    [
        (b"x" * 32, 1),  # another parent
        (None, 0),  # a round that was
        (None, 2),  # a round to come
        (records.genesis(RUN), 0),  # a second child of the genesis
        (records.genesis(RUN), 1),
    ],
)
def test_what_does_not_extend_the_head_is_refused_and_changes_nothing(parent: bytes | None, number: int) -> None:
    chain = fresh()
    chain.extend(records.encode(following(chain)))
    before = (chain.head, list(chain.records))
    bad = Record(parent or chain.head.key.lineage, ROOT, number, Kind.MEAN, b"e" * 32, (), ROSTER)
    with pytest.raises(ValueError, match=f"^record of round {number} does not extend the head at round 1$"):
        chain.extend(records.encode(bad))
    assert (chain.head, list(chain.records)) == before


def test_the_same_record_twice_is_refused() -> None:
    chain = fresh()
    encoded = records.encode(following(chain))
    chain.extend(encoded)
    with pytest.raises(ValueError, match="does not extend"):
        chain.extend(encoded)


def test_bytes_that_are_no_record_change_nothing() -> None:
    chain = fresh()
    encoded = records.encode(following(chain))
    for bad in (b"", b"\xc0", encoded[:-1], encoded + b"\x00"):
        with pytest.raises(BadPayload):
            chain.extend(bad)
    assert chain.head == fresh().head and not chain.records


def test_settling_sets_the_root_and_nothing_else() -> None:
    chain = fresh()
    chain.extend(records.encode(following(chain)))
    before = chain.head
    assert before.state_root == ROOT, "it is not known before it is computed"
    chain.settle(b"1" * 32)
    assert chain.head == Head(before.key, before.roster, b"1" * 32, before.anchor)
    chain.extend(records.encode(following(chain)))
    assert chain.head.state_root == b"1" * 32 and len(chain.records) == 2


def test_a_head_is_a_value() -> None:
    chain = fresh()
    before = chain.head
    chain.extend(records.encode(following(chain)))
    chain.settle(b"1" * 32)
    assert before == fresh().head, "a round keeps the head that it began with"


def test_history_is_bounded_and_keeps_the_last() -> None:
    chain = fresh()
    every = []
    for number in range(KEEP_RECORDS + 10):
        every.append(records.encode(following(chain, plan=number.to_bytes(32, "big"))))
        chain.extend(every[-1])
    assert list(chain.records) == every[-KEEP_RECORDS:]
    for before, after in itertools.pairwise(chain.records):
        assert records.decode(after).parent == records.lineage(before)


def test_the_state_root_binds_everything() -> None:
    one, two = b"1" * 32, b"2" * 32
    roots = [state_root(p, v, n) for p in (one, two) for v in (one, two) for n in (0, 1, 256, 1 << 40)]
    assert len(set(roots)) == len(roots) == 16
    assert {len(root) for root in roots} == {32}
    assert state_root(one, two, 5) == state_root(bytes(one), bytes(two), 5)


def test_the_state_root_stays_what_it_is() -> None:
    """All peers of a run compare it, whatever their version."""
    assert (
        state_root(b"1" * 32, b"2" * 32, 7).hex() == "f543cee602b7233b9b45f14c2d72e8c4f19617500880af3faaa4fed495069822"
    )
