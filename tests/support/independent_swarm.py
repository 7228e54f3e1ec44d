"""Real peers that share no anchor: instead of one mean, exchanges that connect all peers."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support import independent_checkers as checkers_loose
from tests.support.checkers import Report
from tests.support.real_swarm import RealPeer, RealSwarm


class IndependentSwarm(RealSwarm):
    decisions = ("committed",)
    invariants = staticmethod(checkers_loose.check)

    def all_in_one_mean(self, peers: Iterable[RealPeer], since: float = 0.0) -> Report | None:
        """The report by which all have mixed, in rounds that began after that wall time (`mixed`); None: not yet."""
        wanted = list(peers)
        reports = (report for peer in wanted for report in peer.reports())
        return checkers_loose.mixed(reports, [peer.id for peer in wanted], since)
