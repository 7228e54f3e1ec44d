"""What a peer tells of a round: one line of its history."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What became of one round at one peer. Ids and hashes are hex but for peer ids; times are seconds.

    A peer that caught up reports it as a round of its own, `superseded`: from `parent`, where it stood, to `lineage`.

    Attributes:
        anchor_lineage: of the state that the round's work was measured from; it stays where a round was skipped.
        contributions: peer -> lineage of its anchor, chunks counted, chunks.
        tokens: of this peer's work in the round, counted or not.
        lost_rounds: rounds of the branch that was given up, since the two parted; 0 if it was merely behind.
        lost_tokens: of this peer's work that was counted in them.
        replayed_rounds: outer steps taken again from their kept means.
        bytes_downloaded: of snapshots' chunks.
        held_out_loss: of the outer parameters after the round, nats per token of data that no peer trains on.
        loop_lag_p99_seconds, loop_lag_max_seconds: of the event loop, since the last report.
        rss_bytes: of the peer's processes: its own, the worker's, p2pd's.
        open_files, tasks: of the peer's own process, when the round was over.
    """

    run: str
    peer: str
    incarnation: int
    round: int
    parent: str
    lineage: str
    anchor_lineage: str
    outcome: str
    peers: tuple[str, ...]
    contributions: dict[str, tuple[str, int, int]]
    blamed: dict[str, str]
    finite: bool
    weight: float
    tokens: int
    loss: float
    params_hash: str
    seconds_train: float
    seconds_wait: float
    seconds_average: float
    bytes_sent: int
    bytes_received: int
    time: float
    lost_rounds: int = 0
    lost_tokens: int = 0
    replayed_rounds: int = 0
    bytes_downloaded: int = 0
    held_out_loss: float = math.nan
    loop_lag_p99_seconds: float = 0.0
    loop_lag_max_seconds: float = 0.0
    rss_bytes: int = 0
    open_files: int = 0
    tasks: int = 0


class Watch:
    """Laps of the loop's time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = self._mark = self._loop.time()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = self._loop.time()
        self.seconds[name], self._mark = now - self._mark, now

    def total(self) -> float:
        return self._loop.time() - self.began
