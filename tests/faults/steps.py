"""The steps of a schedule, and the number of peers after all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STRUCK = "the one struck"
"""Name for the peer that the last trap has killed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action, or one condition to wait for, by `act`:

    wait            `amount` seconds
    kill            SIGKILL to `role` of each of `targets`: `peer`, its `worker`, its `p2pd`
    trap            SIGKILL to the first of `targets`, or of all peers, that reaches the point `role`; waits for that
    stop, wake      SIGSTOP and SIGCONT to `role`: `peer` alone, or `all` its processes
    part            no packet passes between `targets` and the others
    deafen          packets from the others to `targets` are dropped
    mute            packets from `targets` to the others are dropped
    lose            the share `amount` of all packets, or of those of `targets`, is dropped
    slow            the lines of `targets` carry `amount` bits per second
    refuse, swallow a firewall resets all direct connections of `targets`, or drops their packets
    detoured        waits until bulk data between `targets` and the others has gone over libp2p
    straggle        the workers of `targets` run for the share `amount` of the time
    heal            end all lasting faults
    join            start new peers at once, with the address of one running peer
    restart         start killed peers again, with their directories and the address of one running peer
    back            after all peers were killed: start them again with only their directories
    finish          ask peers to leave, one after the other
    intrude         start new peers with an address, but no ticket, of a private run, which refuses them
    revoke          the peer `role` removes `targets` from its private run; waits until they have left
    fill            the small disk of `targets` fills up
    flip, truncate  one bit of the newest checkpoint of `targets` flips, or it is cut short; `amount` is the seed
    named           waits until `targets` have logged that their checkpoint is damaged
    skew            the wall clocks of `targets` are `amount` seconds off
    move            the machines of `targets` get other addresses
    choke           the small disk of `targets` fills up while a checkpoint is being written
    squeeze         the memory of `targets` runs out, until the kernel has killed its worker
    confine         the same, and from then on the memory of `targets` has no room for a worker
    resigned        waits until `targets` have exited for lack of a worker
    delay           `amount` seconds of latency, and as much jitter, on all data from and to `targets`, or all peers
    corrupt         one bit of each `amount` bytes from and to `targets`, or all peers, flips
    lie             `targets` tell the lie `role`
    accused         waits until an honest peer has named `targets`
    suspected       waits until all others believe `targets` dead
    excluded        waits until the rosters of all others are without `targets`
    settle          waits until all running peers are in one mean
    """

    act: str
    targets: tuple[str, ...] = ()
    amount: float = 0.0
    role: str = ""

    def __str__(self) -> str:
        amount = f"{self.amount:g}" if self.amount else ""
        return " ".join(each for each in (self.act, ", ".join(self.targets), self.role, amount) if each)


def left(schedule: Sequence[Step], names: Sequence[str]) -> int:
    """The number of running peers after the whole schedule."""
    here, struck = set(names), 0
    for step in schedule:
        if step.act in ("finish", "resigned", "revoke") or (step.act == "kill" and step.role == "peer"):
            here -= set(step.targets)
        elif step.act == "trap":
            struck += 1
        elif step.targets == (STRUCK,):
            struck -= 1
        elif step.act in ("join", "restart", "back"):
            here |= set(step.targets)
    return len(here) - struck
