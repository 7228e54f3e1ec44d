"""Objects that all rounds of one averager share."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.allreduce.parts import PartFormat
from protocols.allreduce.plan import PlanInputs
from protocols.base import Head, Host, Member, PeerId, Settings
from protocols.butterfly.part_cache import PartCache
from protocols.streams.control_channel import ControlChannel, RoundAccounting


@dataclass(frozen=True, slots=True)
class ButterflyContext:
    """What stays the same from round to round."""

    host: Host
    settings: Settings
    format: PartFormat
    me: Member
    accounting: RoundAccounting
    post: ControlChannel
    part_cache: PartCache

    def live_peers(self) -> set[PeerId]:
        """The peers that the failure detector believes alive."""
        return {member.peer for member in self.host.members.live()}

    def elements(self, head: Head) -> int:
        """Length of the vector that the round after this head averages."""
        return self.settings.elements[head.key.fragment]

    def inputs(self, head: Head) -> PlanInputs:
        """The inputs from which each member draws the plan of the round after this head."""
        codec, many = self.format.codec, 1 << 20
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
