"""What a name in a multiaddr stands for: p2pd tells of the addresses that it dialled, and not of names."""

from __future__ import annotations

import asyncio

from protocols.base import Deadline

_KINDS = {"dns": ("ip4", "ip6"), "dns4": ("ip4",), "dns6": ("ip6",)}


async def stands_for(where: str, deadline: Deadline) -> tuple[str, ...] | None:
    """The multiaddrs that one with a name stands for, none if the name has no address of its kind.

    None: it has no name, or there was no telling before the deadline.
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
