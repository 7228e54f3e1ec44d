"""What all rounds of one averager work with."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.allreduce.plan import PlanInputs
from protocols.base import Head, Host, Member, Settings
from protocols.butterfly.part_cache import PartCache
from protocols.codec import Codec
from protocols.control_channel import ControlChannel, RoundAccounting


@dataclass(frozen=True, slots=True)
class ButterflyContext:
    """What stays from round to round.

    Raises:
        ValueError: chunks of the settings' size would cut the codec's grain.
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

    def inputs(self, head: Head, elements: int) -> PlanInputs:
        """What the plan of the round that extends this head is drawn on."""
        codec, many = self.codec, 1 << 20
        size = codec.encoded_bytes(many)
        return PlanInputs(
            key=head.key,
            elements=elements,
            bytes_per_element=size / many,
            complaints=head.complaints,
            robust=self.settings.robust,
            grain=codec.grain,
            growth=lambda members: codec.reduced(members).encoded_bytes(many) / size,
        )
