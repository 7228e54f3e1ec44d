"""This machine's limits on the traffic of its peer: the caps, the quota, and what they cost the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from node.config.derived import cap_cost_seconds, check_caps, vector_bytes
from node.config.manifest import Manifest
from node.config.peer_config import PeerConfig
from node.config.peer_sources import SETTINGS_FILE, overriding, read_settings, serialize, with_setting
from node.config.sizes import megabytes, quota_parts
from node.session.fatal import FatalPeerError
from node.storage.statedir import write_atomically
from node.streams.byte_limiter import ByteLimiter
from node.streams.byte_quota import ByteQuota, QuotaDamaged
from node.streams.traffic import Traffic
from protocols.base import Compute

QUOTA_FILE = "quota.json"
_MAX_FILE_BYTES = 1 << 12
_LOOK_SECONDS = 10.0
_ROUND_VECTORS = 4
"""Most vectors that a round moves, both directions together: each member sends and takes less than two."""


class TrafficLimits:
    """Holds the traffic of one peer, and its limits.

    `files` must not be what writes checkpoints: a long one would delay the quota's counts.
    """

    def __init__(self, config: PeerConfig, wall: Callable[[], float], directory: Path, files: Compute) -> None:
        self._config, self._directory, self._files = config, directory, files
        self._manifest: Manifest | None = None
        self._stage = 0
        self._changing = asyncio.Lock()
        self.quota = ByteQuota(*quota_parts(config.quota), wall) if config.quota else None
        upload, download = (
            ByteLimiter(each) for each in (config.upload_limit_bytes_per_second, config.download_limit_bytes_per_second)
        )
        self.traffic = Traffic(upload, download, self.quota)

    def enter_run(self, manifest: Manifest, stage: int, founding: bool = False) -> None:
        """Note which run this peer takes part in.

        Raises ConfigError if its caps are too low for a run of others, FatalPeerError if the quota does not last for a
        round.
        """
        if not founding:
            check_caps(manifest, self._config, stage)
        self._manifest, self._stage = manifest, stage
        if self.quota:
            self.quota.margin_bytes = _ROUND_VECTORS * vector_bytes(manifest, stage)
            self._require_quota()

    def _require_quota(self) -> None:
        if self.quota and self.quota.exhausted:
            quota = self.quota
            until = f"the quota is used up until {quota.until()} ({quota.describe()})"
            raise FatalPeerError(f"{until}: start again then, or give a larger --quota")

    def describe(self, peers: int) -> str:
        """The limits in one line, with `peers` live peers of the run; empty if there are none."""
        up, down = self.traffic.upload.rate, self.traffic.download.rate
        words = [f"{megabytes(each)}/s {way}" for each, way in ((up, "up"), (down, "down")) if each]
        text = f"at most {', '.join(words)}" if words else ""
        cost = cap_cost_seconds(self._manifest, self._config, peers, self._stage) if words and self._manifest else 0.0
        if cost >= 0.1:
            text += f": costs the run about {cost:.3g} s a round"
        return "; ".join(filter(None, (text, self.quota.describe() if self.quota else "")))

    def claim(self) -> float:
        """What this peer may declare as its bandwidth now, bytes/s."""
        return self._config.claim_bytes_per_second

    def upload(self) -> float:
        """What this peer's line sends, bytes/s: measured, else declared, within its cap; 0 if it is not known."""
        measured, cap = self.traffic.upload_speed.bytes_per_second, self.traffic.upload.rate
        known = measured if not math.isnan(measured) else self.claim() if self._config.declares_line else math.inf
        line = min(known, math.inf if cap is None else cap)
        return 0.0 if math.isinf(line) else line

    async def change(self, name: str, text: str) -> str:
        """Change a setting from now on, and keep it in the state directory. Returns a line for the user.

        Raises ValueError if there is no such setting, its value is bad or too low for the run, or it cannot be kept.
        """
        directory, files = self._directory, self._files
        async with self._changing:  # else the second of two changes at once would undo the first
            config = with_setting(self._config, name, text)
            if self._manifest:
                check_caps(self._manifest, config, self._stage)
            try:
                settings = {**await files.run(partial(read_settings, directory), 0), name: text}
                await files.run(partial(write_atomically, directory / SETTINGS_FILE, serialize(settings)), 0)
            except OSError as error:
                raise ValueError(f"{name} cannot be kept: {error.filename}: {error.strerror}") from None
            self._config = config
            self.traffic.upload.set_rate(config.upload_limit_bytes_per_second)
            self.traffic.download.set_rate(config.download_limit_bytes_per_second)
        line = f"{name} is {text} from now on"
        if origin := overriding(config, name):
            line += f"; at the next start {origin} wins over it: leave that out"
        return line

    @asynccontextmanager
    async def kept(self, say: Callable[[str], None], leave: Callable[[str], None]) -> AsyncIterator[None]:
        """Keep the quota's counts in the state directory. When it is exhausted, `node.machine.rules` pauses the peer.

        Raises `FatalPeerError` if it is exhausted already, or its file cannot be read or written.
        """
        quota, files = self.quota, self._files
        if quota is None:
            yield
            return
        file = self._directory / QUOTA_FILE
        try:
            quota.load(await files.run(partial(_read, file), 0))
            self._require_quota()
            await files.run(partial(write_atomically, file, quota.store()), 0)
        except (OSError, QuotaDamaged) as error:
            raise FatalPeerError(f"{file}: {error}: delete it to count from 0, or leave --quota out") from None
        quota.listen(
            lambda: say(f"nine tenths of the quota are used: {quota.describe()}"),
            lambda: say(f"quota used up; paused until {quota.until()} ({quota.describe()})"),
        )
        keeper = asyncio.create_task(self._keep(quota, file, leave))
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            with suppress(OSError):
                await files.run(partial(write_atomically, file, quota.final()), 0)

    async def _keep(self, quota: ByteQuota, file: Path, leave: Callable[[str], None]) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await quota.changed.wait()
            quota.turn()
            if quota.changed.is_set():
                try:
                    await self._files.run(partial(write_atomically, file, quota.store()), 0)
                except OSError as error:
                    return leave(f"the quota cannot be counted: {file}: {error.strerror or error}")


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        return b""
