"""Files of addresses: how peers that share a directory find each other, and know no address beforehand.

`join --addresses-file PATH` writes one, `join --bootstrap @PATH` reads it. One address a line, as a join line has it;
blank lines, and what follows a #, count for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.config.peer_config import FILE_SIGN, PeerConfig, peer_address
from node.config.toml import ConfigError
from node.membership.hello import MAX_ADDRESS_CHARACTERS
from node.storage.statedir import write_atomically
from protocols.base import Compute, PeerId

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 16
MAX_ADDRESSES = 64
LOOK_SECONDS = 2.0
AGAIN_SECONDS = 60.0
"""After a file could not be written, if the addresses do not change before."""


@dataclass(frozen=True, slots=True)
class AddressLine:
    """What a file says.

    Attributes:
        addresses: of other peers.
        complaint: one line for a person, on what is wrong with it; empty if nothing is.
    """

    addresses: tuple[str, ...]
    complaint: str = ""


def read_addresses(me: PeerId, path: Path) -> AddressLine | str:
    """What a file says now, or why it cannot be read, in words. It waits for the disk.

    Args:
        me: this peer, whose own addresses are left out.
    """
    try:
        if path.exists() and not path.is_file():
            return "is no regular file"
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return "no such file yet" if path.parent.is_dir() else f"no such file yet, nor the directory {path.parent}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return parse_addresses(me, data)


def parse_addresses(me: PeerId, data: bytes) -> AddressLine | str:
    """The same, of the content. Pure."""
    if len(data) > MAX_BYTES:
        return f"longer than {MAX_BYTES >> 10} KiB: is it a file of addresses?"
    found: dict[str, None] = {}
    complaint, own = "", False
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        try:
            address = _checked(text)
        except ValueError as error:
            complaint = complaint or f"line {number}: {error}"
            continue
        own |= address.endswith(f"/p2p/{me}")
        if not address.endswith(f"/p2p/{me}"):
            found[address] = None
    if len(found) > MAX_ADDRESSES:
        complaint = complaint or f"has {len(found)} addresses, of which the first {MAX_ADDRESSES} are tried"
    if not found:
        complaint = complaint or ("names this peer alone" if own else "names no peer yet")
    return AddressLine(tuple(found)[:MAX_ADDRESSES], complaint)


def _checked(text: str) -> str:
    limit = MAX_ADDRESS_CHARACTERS + len("/p2p/") + 64
    if len(text) > limit:
        raise ValueError(f"longer than {limit} characters: is it an address?")
    return peer_address(text)


def require_usable(config: PeerConfig) -> None:
    """What can be known of `--addresses-file` before anything is begun.

    Raises:
        ConfigError: nothing can be written there.
    """
    path = config.addresses_file
    if path is None:
        return
    why = ""
    if path.exists() and not path.is_file():
        why = f"{path} is no regular file: name a file"
    elif not path.parent.is_dir():
        why = f"{path}: there is no directory {path.parent}: make it, or name a file in another"
    elif any(path.resolve() == Path(each[1:]).resolve() for each in config.bootstrap if each.startswith(FILE_SIGN)):
        why = f"{path} is read by --bootstrap: this peer would write its own addresses over the others'; name another"
    else:
        try:
            with tempfile.TemporaryFile(dir=path.parent):  # what it takes to replace a file there
                pass
        except OSError as error:
            why = (
                f"{path}: nothing can be written in {path.parent} ({error.strerror}): name a file in another directory"
            )
    if why:
        raise ConfigError(f"{config.origins['addresses_file']}: {why}", "addresses_file")


class AddressesFile:
    """Keeps a file of this peer's addresses as they are. It is never removed: a peer that comes back is found again."""

    def __init__(
        self, path: Path, addresses: Callable[[], Sequence[str]], disk: Compute, say: Callable[[str], None]
    ) -> None:
        """
        Args:
            addresses: multiaddrs that end in this peer's id; none while they are not known.
            disk: runs what waits for the disk.
            say: told one line for a person.
        """
        self._path, self._addresses, self._disk, self._say = path, addresses, disk, say

    async def run(self) -> None:
        """Write it, again when the addresses change, for ever."""
        loop = asyncio.get_running_loop()
        tried: tuple[str, ...] = ()
        again, told = 0.0, ""
        while True:
            here = tuple(self._addresses())[:MAX_ADDRESSES]
            if here and (here != tried or (told and loop.time() >= again)):
                why = await self._write(here)
                if why and why != told:
                    self._say(f"{self._path}: this peer's addresses cannot be written ({why}): it is tried again")
                elif told and not why:
                    self._say(f"{self._path}: this peer's addresses could be written")
                tried, told, again = here, why, loop.time() + AGAIN_SECONDS
            await asyncio.sleep(LOOK_SECONDS)

    async def _write(self, addresses: Sequence[str]) -> str:
        """Returns why it failed, or nothing."""
        data = "".join(f"{each}\n" for each in addresses).encode()
        try:
            await self._disk.run(partial(write_atomically, self._path, data), len(data))
        except OSError as error:
            return error.strerror or type(error).__name__
        log.info("addresses written to %s: %s", self._path, ", ".join(addresses))
        return ""
