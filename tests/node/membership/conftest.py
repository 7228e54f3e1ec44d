from __future__ import annotations

import pytest

from tests.support.membership_swarm import MembershipSwarm


@pytest.fixture
def swarm() -> MembershipSwarm:
    return MembershipSwarm()
