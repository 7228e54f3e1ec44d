"""One step of a schedule: what is done, to whom; and who is left when all of it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STRUCK = "the one struck"
"""Stands for the peer that the last trap has caught."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, or to wait for.

    wait            `amount` seconds
    kill            SIGKILL to `role` of each of `whom`: `peer`, its `worker`, its `p2pd`
    trap            SIGKILL to the first of `whom`, or of all, that comes to the point `role`; waits for it
    stop, wake      SIGSTOP and SIGCONT to `role`: `peer` alone, or `all` its processes
    part            nothing passes between `whom` and the others
    deafen          what the others send to `whom` vanishes
    mute            what `whom` send to the others vanishes
    lose            of all packets, or of those of `whom`, the share `amount` vanishes
    slow            the lines of `whom` carry `amount` bits per second
    straggle        the workers of `whom` run for the share `amount` of the time
    heal            all that lasts is over
    join            new peers, side by side, with nothing but the address of one that runs
    restart         peers that were killed, in their directories
    back            all peers, after all were killed: started again, with nothing but their directories
    finish          asked to leave, one after the other
    fill            the small disk of `whom` fills up
    flip, truncate  one bit of the newest checkpoint of `whom` flips, or it is cut short; `amount` is drawn with
    named           that `whom` have said so
    skew            the wall clocks of `whom` are `amount` seconds off
    move            the machines of `whom` get other addresses
    choke           the small disk of `whom` fills up while a checkpoint is being written
    squeeze         the memory of `whom` runs out, until the kernel has killed its worker
    confine         the same, and from then on the memory of `whom` has no room for a worker
    resigned        waits until `whom` have left in good order, for want of a worker
    delay           `amount` seconds of latency, and of jitter as much again, on all that `whom`, or all, send and get
    corrupt         one bit of each `amount` bytes that `whom`, or all, send and get flips
    lie             `whom` tell the lie `role`
    accused         waits until an honest peer has named `whom`
    suspected       waits until all others believe `whom` dead
    excluded        waits until the rosters of all others are without `whom`
    settle          waits until all who run are in one mean
    """

    act: str
    whom: tuple[str, ...] = ()
    amount: float = 0.0
    role: str = ""

    def __str__(self) -> str:
        amount = f"{self.amount:g}" if self.amount else ""
        return " ".join(each for each in (self.act, ", ".join(self.whom), self.role, amount) if each)


def left(schedule: Sequence[Step], names: Sequence[str]) -> int:
    """How many peers there are when all of it is done."""
    here, struck = set(names), 0
    for step in schedule:
        if step.act in ("finish", "resigned") or (step.act == "kill" and step.role == "peer"):
            here -= set(step.whom)
        elif step.act == "trap":
            struck += 1
        elif step.whom == (STRUCK,):
            struck -= 1
        elif step.act in ("join", "restart", "back"):
            here |= set(step.whom)
    return len(here) - struck
