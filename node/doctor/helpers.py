"""Asks other peers what this one cannot see itself: whether it reaches them, and they it; their versions and clocks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from node._version import VERSION
from node.config.peer_config import PeerConfig
from node.direct.routes import host_of
from node.doctor.dial_back import ask_dial_back
from node.doctor.findings import Finding
from node.doctor.network import (
    DialBackReport,
    Helper,
    Listening,
    Outside,
    Reached,
    check_listening,
    check_others_clocks,
    check_outside,
    check_reach,
    check_upload,
    check_versions,
    choose_helpers,
    ports_to_forward,
    ports_to_probe,
    tcp_port,
)
from node.joining.bootstrap import ask_summary, reach
from node.network.address_scope import Scope, scope
from node.reporting.status import MAX_NAME, short
from node.runtime.listening import interfaces
from node.runtime.proxies import named_proxies
from node.streams.traffic import Traffic
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, PeerError, PeerId, Transport

REACH_SECONDS = 4.0
FORGET_SECONDS = 1.0
MAX_HELPERS = 4
ITSELF = "that is this peer itself: give the address of another one"


class DialledTransport(Transport, Protocol):
    """What the doctor needs of `node.network.libp2p.LibP2PTransport`."""

    listening: tuple[str, ...]
    traffic: Traffic

    @property
    def addresses(self) -> tuple[str, ...]: ...

    @property
    def direct_port(self) -> int: ...

    def host_of(self, peer: PeerId) -> str | None: ...

    async def connect(self, address: str, deadline: Deadline) -> PeerId: ...

    async def forget(self, peer: PeerId, deadline: Deadline) -> None: ...


@dataclass(frozen=True, slots=True)
class LivePeer:
    """Another peer of the run that this one takes part in."""

    peer: PeerId
    nickname: str
    offset_seconds: float  # its wall clock minus this peer's


class NetworkExamination:
    """The checks of one peer's network, in order: each call needs what the one before has found."""

    def __init__(
        self,
        transport: DialledTransport,
        config: PeerConfig,
        *,
        given: str = "",
        met: Mapping[PeerId, Sequence[str]],
        live: Sequence[LivePeer] = (),
        is_running: bool = False,
        itself: PeerId = "",
    ) -> None:
        """Helpers are the live peers, and the one at the `given` multiaddr; else those `met` before, by address.

        `itself` is this peer's id if the transport has another one for the time of the examination.
        """
        self._transport, self._config = transport, config
        self._given, self._met, self._live = given, met, live[:MAX_HELPERS]
        self._is_running, self._is_alone = is_running, is_running and not live
        self._own = {transport.me, itself}
        self._offsets = [each.offset_seconds for each in live]
        self._hosts = interfaces()
        self._helpers: dict[PeerId, Helper] = {}
        self._reports: tuple[DialBackReport, ...] = ()

    async def listening(self) -> list[Finding]:
        ports = dict.fromkeys(port for each in self._transport.listening if (port := tcp_port(each)))
        only_here = all(scope(each) is Scope.MACHINE for each in self._transport.listening)
        wants_data = self._config.direct_port != "off"
        return check_listening(Listening(tuple(ports), self._transport.direct_port, wants_data, only_here))

    async def reach(self) -> list[Finding]:
        wanted = [self._by_name(each) for each in self._live]
        if self._given:
            wanted.insert(0, self._at(self._given))
        if not wanted:
            known = list(self._met.items())[:MAX_HELPERS]
            wanted = [self._asked(peer, f"{short(peer)}", addresses) for peer, addresses in known]
        for peer, helper in await asyncio.gather(*wanted):
            self._helpers[peer] = helper
        helpers = tuple(self._helpers.values())
        given = self._given.rpartition("/p2p/")[2]
        return check_reach(
            Reached(
                self._hosts,
                self._seen_as(),
                helpers,
                self._helpers.get(given),
                named_proxies(),
                is_well=self._is_running or given in self._own,
            )
        )

    async def outside(self) -> list[Finding]:
        """Have up to two helpers dial this peer's ports."""
        transport, reached = self._transport, {peer: each for peer, each in self._helpers.items() if not each.why}
        listening = [port for each in transport.listening if (port := tcp_port(each))]
        libp2p, data = ports_to_probe(transport.addresses, listening, transport.direct_port)
        chosen = choose_helpers([(peer, each.host) for peer, each in reached.items()])
        ports = (*libp2p, *((data,) if data else ()))
        asked = (ask_dial_back(transport, peer, reached[peer].name, ports) for peer in chosen)
        self._reports = tuple(await asyncio.gather(*asked)) if ports else ()
        if not chosen:
            self._reports = tuple(
                DialBackReport(each.name, why="it cannot be reached" if each.why else "it is reached through a relay")
                for each in self._helpers.values()
            )
        return check_outside(
            Outside(
                reports=self._reports,
                libp2p=libp2p,
                data=data,
                forward=ports_to_forward(self._config.listen, self._config.direct_port),
                own_hosts=tuple(host for _, host in self._hosts),
                relays=self._relays(),
                is_alone=self._is_alone,
            )
        )

    async def upload(self) -> list[Finding]:
        traffic = self._transport.traffic
        declared = min(self._config.claim_bytes_per_second, traffic.upload.rate or math.inf)
        return check_upload(declared, traffic.upload_speed.bytes_per_second)

    async def others(self) -> list[Finding]:
        versions = [each.version for each in self._helpers.values() if not each.why]
        return [*check_others_clocks(self._offsets), *check_versions(VERSION, versions)]

    def _seen_as(self) -> str:
        """The public address by which p2pd knows this peer, if it is not one of this machine's."""
        own = {host for _, host in self._hosts}
        public = (each for each in self._transport.addresses if scope(each) is Scope.ANYWHERE)
        return next((host for each in public if (host := host_of(each)) and host not in own), "")

    async def forget_helpers(self) -> None:
        """Close the connections to peers that were met for this examination only."""
        strangers = self._helpers.keys() - {each.peer for each in self._live} - self._own
        for peer in strangers:
            with suppress(PeerError):
                await self._transport.forget(peer, loop_time() + FORGET_SECONDS)

    def _relays(self) -> tuple[str, ...]:
        """Names of the peers through which others may reach this one."""
        circuits = (each.split("/p2p-circuit")[0] for each in self._transport.addresses if "/p2p-circuit" in each)
        peers = dict.fromkeys(each.rpartition("/p2p/")[2] for each in circuits)
        return tuple(self._helpers[peer].name if peer in self._helpers else short(peer) for peer in peers)

    # -- asking one peer ----------------------------------------------------------------------------------------------

    async def _at(self, address: str) -> tuple[PeerId, Helper]:
        where, _, peer = address.rpartition("/p2p/")
        if peer in self._own:
            return peer, Helper(short(peer), why=ITSELF)
        return await self._asked(peer, short(peer), (where,), keep_reason=True)

    async def _by_name(self, live: LivePeer) -> tuple[PeerId, Helper]:
        return await self._asked(live.peer, live.nickname or short(live.peer), ())

    async def _asked(
        self, peer: PeerId, name: str, addresses: Sequence[str], keep_reason: bool = False
    ) -> tuple[PeerId, Helper]:
        """Connect to a peer at one of these addresses, if there are any, and ask it for its status."""
        deadline = loop_time() + REACH_SECONDS
        try:
            if keep_reason:
                await self._transport.connect(f"{addresses[0]}/p2p/{peer}", deadline)
            elif addresses:
                await reach(self._transport.connect, peer, addresses, deadline)
            began = loop_time()
            status = await ask_summary(self._transport, peer, deadline)
        except (BadPayload, ValueError) as error:
            return peer, Helper(name, why=str(error))
        except PeerError as error:
            return peer, Helper(name, why=error.why.removeprefix("cannot be reached: "))
        seconds = loop_time() - began
        name = status.nickname[:MAX_NAME] or short(peer)
        return peer, Helper(name, seconds, "", self._transport.host_of(peer) or "", status.version)
