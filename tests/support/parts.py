"""A part fetched from one peer."""

from __future__ import annotations

from protocols import wire
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Deadline, Host, PeerError, PeerGone, PeerId
from protocols.blobs.parts import PartDownload
from protocols.streams.endpoint import RoundAccounting


async def fetch_part(
    host: Host, peer: PeerId, wanted: wire.PartDigest, part: ReducedPart, deadline: Deadline, silence: float = 30.0
) -> ReducedPart:
    """Fetch a part into an empty one; raises what the peer did instead, and PeerGone if it does not have it."""
    errors: list[PeerError | BadPayload] = []
    download = PartDownload(
        host,
        RoundAccounting(),
        wanted=wanted,
        part=part,
        silence_seconds=silence,
        on_lost=lambda _, error: errors.append(error),
    )
    if await download.run(lambda: [peer], deadline):
        return part
    raise errors[0] if errors else PeerGone(peer, "does not have the part")
