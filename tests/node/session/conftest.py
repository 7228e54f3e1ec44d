from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.session_cluster import SessionCluster, SessionPeer


@pytest.fixture
def founders() -> str:
    return "abc"


@pytest.fixture
def peer_kind() -> type[SessionPeer]:
    return SessionPeer


@pytest.fixture
def cluster(tmp_path: Path, founders: str, peer_kind: type[SessionPeer]) -> Iterator[SessionCluster]:
    """An empty cluster. No handler of its peers may have failed when the test ends."""
    cluster = SessionCluster(tmp_path, founders, peer_kind)
    yield cluster
    if cluster.network.bugs:
        raise cluster.network.bugs[0]
