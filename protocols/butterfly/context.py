"""Objects that all rounds of one averager share."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.allreduce.plan import PlanInputs
from protocols.base import Head, Host, Member, PeerId, Settings
from protocols.butterfly.part_cache import PartCache
from protocols.codec import Codec
from protocols.control_channel import ControlChannel, RoundAccounting


@dataclass(frozen=True, slots=True)
class ButterflyContext:
    """What stays the same from round to round.

    Raises:
        ValueError: the settings' chunk length is not a multiple of the codec's grain.
    """

    host: Host
    settings: Settings
    codec: Codec
    me: Member
    accounting: RoundAccounting
    post: ControlChannel
    part_cache: PartCache

    def __post_init__(self) -> None:
        chunk, grain = self.settings.chunk_elements, self.codec.grain
        if chunk % grain:
            raise ValueError(f"chunks of {chunk} elements with codec {self.codec.name}: take a multiple of {grain}")

    def live_peers(self) -> set[PeerId]:
        """The peers that the failure detector believes alive."""
        return {member.peer for member in self.host.members.live()}

    def elements(self, head: Head) -> int:
        """Length of the vector that the round after this head averages."""
        return self.settings.elements[head.key.fragment]

    def inputs(self, head: Head) -> PlanInputs:
        """The inputs from which each member draws the plan of the round after this head."""
        codec, many = self.codec, 1 << 20
        size = codec.encoded_bytes(many)
        return PlanInputs(
            key=head.key,
            elements=self.elements(head),
            bytes_per_element=size / many,
            complaints=head.complaints,
            robust=self.settings.robust,
            grain=codec.grain,
            growth=lambda members: codec.reduced(members).encoded_bytes(many) / size,
        )
