"""A step has B to B + A microbatches; each was forwarded and counted in the same weights, one step old at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.base import Member
from protocols.pipeline.admission import Lease, LeaseState, StepAdmission, fair_share

A, B = Member("a"), Member("b")


def admission(batches: int = 4, lookahead: int = 0) -> tuple[StepAdmission, list[tuple[str, int]]]:
    events: list[tuple[str, int]] = []
    found = StepAdmission(batches, lambda kind, lease: events.append((kind, lease.number)), lookahead)
    found.open()
    return found, events


def settled(lease: Lease) -> bool:
    return lease.state in (LeaseState.COUNTED, LeaseState.ENDED)


def counted(lease: Lease) -> None:
    assert lease.begin_backward()
    lease.count()


@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=80),
)
def test_step_holds_its_batches_in_weights_that_are_kept(
    batches: int, lookahead: int, moves: list[tuple[int, int]]
) -> None:
    """Whatever drivers, the worker and the outer loop do: counted + leased stays within B + A, and no backward needs
    weights older than those before the last step. Without lookahead no lease survives a step.
    """
    step, events = admission(batches, lookahead)
    leases: list[Lease] = []
    for number, (move, which) in enumerate(moves):
        lease = leases[which % len(leases)] if leases else None
        if move == 0 and step.may_grant(A, 2, 0.0):
            leases.append(step.grant(A, number, 0.0))
        elif move == 1 and step.may_grant(B, 2, 0.0):
            leases.append(step.grant(B, number, 0.0))
        elif move == 2 and lease:
            lease.end()
        elif move == 3 and lease:
            lease.begin_forward()
        elif move == 4 and lease and lease.begin_backward():
            assert step.epoch - lease.epoch == lease.is_stale
            lease.count()
        elif move == 5 and step.is_due:
            assert batches <= len(step.counted) <= batches + lookahead and (lookahead or not step.leased)
            kept = step.leased
            step.stepped()
            assert step.leased == kept and not step.counted
        elif move == 6:
            step.void()
            assert not step.leased and not step.counted
        assert len(step.counted) + step.leased <= batches + lookahead
        assert all(step.epoch - each.epoch <= 1 for each in leases if each.has_begun and not settled(each))
    numbers = [number for kind, number in events if kind != "granted"]
    assert len(numbers) == len(set(numbers)), "each lease ends once"


def test_voided_lease_never_counts() -> None:
    step, _ = admission()
    lease = step.grant(A, 1, 0.0)
    step.void()
    assert lease.is_void and not lease.begin_backward()
    with pytest.raises(ValueError, match="ENDED"):
        lease.count()


def test_backward_that_began_counts_without_its_driver() -> None:
    step, events = admission()
    lease = step.grant(A, 1, 0.0)
    assert lease.begin_backward()
    lease.end()
    assert step.leased == 1, "its place is kept while its backward runs"
    lease.count()
    assert (step.leased, len(step.counted)) == (0, 1) and events == [("granted", 1), ("counted", 1)]


def test_failed_backward_frees_its_place() -> None:
    step, events = admission(1)
    lease = step.grant(A, 1, 0.0)
    lease.begin_backward()
    lease.fail()
    assert step.may_grant(A, 1, 0.0) and events[-1] == ("ended", 1)


def test_first_batches_to_be_counted_make_the_step() -> None:
    """Those left over are counted in the next one, which waits for them, but not for what has not begun."""
    step, _ = admission(2, lookahead=2)
    early, late, waiting, other = (step.grant(A, number, 0.0) for number in range(4))
    assert not step.may_grant(A, 1, 0.0)
    for lease in (early, late, other):
        lease.begin_forward()
    counted(early)
    counted(other)
    assert step.is_due
    step.stepped()
    assert late.is_stale and not waiting.is_stale
    for number in (4, 5):
        counted(step.grant(A, number, 0.0))
    assert not step.is_due
    counted(late)
    assert step.is_due and len(step.counted) == 3
    waiting.begin_forward()
    assert waiting.epoch == step.epoch == 1, "its weights are those of its forward, not of its grant"


def test_closed_gate_keeps_leases_valid() -> None:
    step, _ = admission()
    lease = step.grant(A, 1, 0.0)
    step.close()
    assert not step.may_grant(A, 1, 0.0)
    counted(lease)
    assert len(step.counted) == 1


def test_driver_holds_at_most_twice_its_share() -> None:
    assert [fair_share(16, drivers) for drivers in (0, 1, 2, 4, 5)] == [16, 16, 16, 8, 7]
    step, _ = admission(4)
    for number in range(2):
        step.grant(A, number, 0.0)
    assert not step.may_grant(A, 4, 0.0) and step.may_grant(B, 4, 0.0)


def test_driver_whose_leases_run_out_waits_longer_each_time() -> None:
    step, _ = admission(4)
    first, second = step.grant(A, 1, 0.0), step.grant(A, 2, 0.0)
    step.expire(first, 20.0)
    step.expire(second, 20.0)
    assert not step.may_grant(A, 1, 29.0) and step.may_grant(B, 2, 20.0)
    third = step.grant(A, 3, 30.0)
    assert not step.may_grant(A, 1, 30.0), "one place at a time"
    step.expire(third, 40.0)
    assert not step.may_grant(A, 1, 59.0) and step.may_grant(A, 1, 60.0)
    counted(step.grant(A, 4, 60.0))
    assert step.may_grant(A, 1, 60.0) and not step.lets_leases_expire(A), "it has returned one"
