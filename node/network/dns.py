"""Resolve a DNS name in a multiaddr. Needed because p2pd reports the addresses that it dialled, not their names."""

from __future__ import annotations

import asyncio

from protocols.base import Deadline

_KINDS = {"dns": ("ip4", "ip6"), "dns4": ("ip4",), "dns6": ("ip6",)}


async def stands_for(where: str, deadline: Deadline) -> tuple[str, ...] | None:
    """Resolve the name in a multiaddr to multiaddrs with IP addresses; empty if the name has none of the wanted kind.

    None if the multiaddr has no name, or if it was not resolved before the deadline.
    """
    _, kind, name, *rest = [*where.split("/", 3), "", ""]
    if kind not in _KINDS:
        return None
    try:
        async with asyncio.timeout_at(deadline):
            found = await asyncio.get_running_loop().getaddrinfo(name, None)
    except TimeoutError:
        return None
    except (OSError, UnicodeError):
        return ()
    numbers = dict.fromkeys(str(address[0]) for *_, address in found)
    made = ((("ip6" if ":" in number else "ip4"), number) for number in numbers)
    return tuple(f"/{each}/{number}/{rest[0]}" for each, number in made if each in _KINDS[kind])
