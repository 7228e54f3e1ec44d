"""A peer's status: the values that it shows, their JSON, and the join command that follows from them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from node.network.address_scope import Scope, scope
from node.reporting.report import RoundEvaluation, RoundReport
from node.runtime.program import typed
from node.tasks.name import HUGGING_FACE, LOOP, is_own
from protocols.base import SyncStatus

MAX_WORD = 512  # Most characters of a text that are shown; the rest is cut off
MAX_NAME = 16  # Most characters of a nickname that are shown
MAX_LISTED = 4096  # Most peers or addresses in one status
MAX_NUMBER = 1 << 63
OTHERS_REDUCE = "other members reduce"
MAX_BRIEF_NAMES = 8
STATES = (
    *("starting", "joining", "syncing", "training", "averaging"),
    *("waiting", "paused", "moving", "leaving", "finished"),
)
_LATER = frozenset(
    {"version", "device", "move", "backups", "lost", "private"}
)  # Fields of a status that a peer of an earlier version leaves out

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another peer, as this one sees it."""

    peer: str
    nickname: str
    # Whether it is in the roster of this peer's stage; always true with independent state. A peer of another stage
    # counts as a member while it is live.
    member: bool
    live: bool  # otherwise the failure detector suspects it
    round: int
    address: str  # a multiaddr; empty if none is known
    stage: int = 0  # 0 without stages
    # How the latest bulk data went to it: direct, dialled back (directly, but the peer had to dial), punched
    # (directly, both dialled at once) or libp2p; other members reduce if the two exchange none, because that failed;
    # empty if none was sent since the peer was met.
    route: str = ""
    route_reason: str = ""  # why the data did not go directly
    left: bool = False  # not live because it left in good order; a peer that is neither live nor left is lost


@dataclass(frozen=True, slots=True)
class Status:
    """A peer's status, exactly as `status --json` prints it. A figure that is not known is nan, and null in JSON."""

    state: str  # starting, joining, syncing, training, averaging, waiting, paused, moving, leaving or finished
    reason: str  # explains the state
    waiting_for: tuple[str, ...]  # nicknames, short peer ids or other texts
    round: int  # from 0
    rounds: int  # in the whole run
    lineage: str  # of the latest round
    run: str  # name of the run
    run_id: str  # hash of its manifest, hex
    peer: str
    nickname: str
    peers: tuple[PeerStatus, ...]  # the other peers
    addresses: tuple[str, ...]  # multiaddrs at which others can dial this peer
    tokens: int  # that this peer has trained on so far
    tokens_per_second: float
    loss: float  # training loss, nats per token
    held_out_loss: float  # the same on data that no peer trains on
    bytes_sent: int
    bytes_received: int
    rss_bytes: int  # memory of all processes of the peer
    loop_lag_p99_seconds: float  # lag of the event loop
    eta_seconds: float | None  # until the run's last round is done; null if it cannot be estimated
    pid: int
    incarnation: int  # number of this start of the peer
    task: str = ""  # the user's own; empty if the task is built in
    syncing: SyncStatus | None = None  # progress of catching up; null in other states
    clock: str = ""  # warning while this machine's clock differs from the others'
    checkpoint_age_seconds: float | None = None  # of the newest whole checkpoint
    protocol: str = ""  # the run's averaging protocol
    spread: float = math.nan  # as in the last report that has it; null with replicated state
    spread_limit: float = math.nan
    stage: int = 0  # this peer's; 0 without stages
    stages: int = 1  # number of stages; 1 without
    round_seconds: float = math.nan  # time since the last round ended
    round_expected_seconds: float | None = None  # mean duration of the last rounds
    joiners: int = 0  # that download this peer's state now
    checkpoint_problem: str = ""  # why the latest checkpoint failed
    limits: str = ""  # this peer's limits on its traffic, what they cost the run, and its quota
    version: str = ""  # of the peer's code
    device: str = ""  # on which its worker trains; empty if not known yet
    clusters: bool = False  # peers that are no members contribute, too, each through one (`reason` says through whom)
    private: bool = False  # only the invited may take part in its run
    move: str = ""  # with stages: its latest move to another, under way, done, or given up and why; empty without one
    lost: str = ""  # with stages: which ones have lost all their members, or began again, and without which rounds
    backups: str = ""  # with stages: how many peers have a backup of its stage, and which ones it has of others


def public(status: Status) -> Status:
    """The part of a status that any peer may see: without this machine's process id and where the others are.

    A pause is shown as waiting, and without its cause and end: they say when its user is away from home.
    """
    if status.state == "paused":
        status = dataclasses.replace(status, state="waiting", reason="")
    return dataclasses.replace(
        status,
        pid=0,
        checkpoint_problem="",
        limits="",
        move="",
        peers=tuple(dataclasses.replace(each, address="", route_reason="") for each in status.peers),
    )


class EventSink(Protocol):
    """Takes a peer's messages and reports. Never raises, never blocks."""

    def say(self, line: str) -> None:
        """Print a user-facing line."""

    def report(self, report: RoundReport) -> None:
        """Take the report of a round that has ended."""

    def evaluated(self, evaluation: RoundEvaluation) -> None:
        """Take the held-out loss of a round that was reported before."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


def to_json(value: _Dataclass | Mapping[str, object]) -> str:
    """Encode as one line of strict JSON. Floats that are not finite become null."""
    plain = value if isinstance(value, Mapping) else dataclasses.asdict(value)
    return json.dumps(_finite(plain), allow_nan=False, separators=(",", ":"))


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def brief(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status, as a dictionary, without what grows with the swarm."""
    return {**status, "peers": (), "addresses": (), "waiting_for": status["waiting_for"][:MAX_BRIEF_NAMES]}


def parse(data: object) -> Status:
    """Read a status from untrusted JSON. The result is bounded and safe to print. Raises ValueError."""
    return parse_as(Status, data, "status")


def parse_as(kind: type[T], data: object, where: str) -> T:
    """Read a dataclass of plain fields, as `parse` does; `where` names it in errors."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is not an object")
    kinds = {name: of for name, of in _kinds(cast(Hashable, kind)).items() if name in data or name not in _LATER}
    return kind(**{name: _value(of, data.get(name), f"{where}.{name}") for name, of in kinds.items()})


_kinds = cache(get_type_hints)


def _value(kind: Any, value: object, where: str) -> object:
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or len(value) > MAX_LISTED:
            raise ValueError(f"{where} is not a list of at most {MAX_LISTED}")
        return tuple(_value(get_args(kind)[0], each, where) for each in value)
    if type(None) in get_args(kind):
        return None if value is None else _value(get_args(kind)[0], value, where)
    if dataclasses.is_dataclass(kind):
        return parse_as(kind, value, where)  # type: ignore[arg-type]
    if value is None and kind is float:
        return math.nan
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is missing, or not a {kind.__name__}")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
        raise ValueError(f"{where} is too large a number")
    return value


_CONTROL = re.compile(r"[^\S ]+|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def printable(text: str, limit: int = MAX_WORD) -> str:
    """Make untrusted text safe to print: one line of at most `limit` characters, without terminal control codes."""
    return _CONTROL.sub(" ", text[:limit]).strip()


def short(peer: str) -> str:
    """A short form of a peer id: its last characters, because all ids begin alike."""
    return peer if len(peer) <= 8 else f"…{peer[-6:]}"


def join_command(status: Status) -> tuple[str, Scope] | None:
    """The command with which others join, and from where it works; None while no address is known, and in a private
    run, where others need a ticket.
    """
    if not status.addresses or status.private:
        return None
    best = min(status.addresses, key=scope)
    command = typed(f"join --bootstrap {best}")
    if status.run_id:
        command += f" --run-id {status.run_id}"
    if is_own(status.task):  # checked, because the name may be a stranger's, and users paste this line into a shell
        command += f" --task {status.task}"
    if status.task == LOOP:
        command += " --own-loop"
    if status.task == HUGGING_FACE:
        command += f" --task {status.task} --model MODEL --data FILE"
    return command, scope(best)


def who_joins(where: Scope) -> str:
    """The line before a join command: from where others can use it."""
    if where == Scope.ANYWHERE:
        return "Others join with:"
    which = "the same network" if where == Scope.NETWORK else "this machine"
    return f"Others join, from {which} only, with:"


def not_direct(peers: Sequence[PeerStatus]) -> str:
    """To which live peer bulk data takes the slower way, and why: the first of them; empty if there is none."""
    slow = [each for each in peers if each.live and each.route_reason]
    if not slow:
        return ""
    name = printable(slow[0].nickname)[:MAX_NAME] or short(slow[0].peer)
    more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    way = "by way of other members" if slow[0].route == OTHERS_REDUCE else "over libp2p"
    return f"{name} {way}{more}: {printable(slow[0].route_reason, 200)}"


def narrow(where: Scope, announced: bool) -> str:
    """A hint if others cannot dial this peer's best address from everywhere; empty if they can.

    `announced`: whether the user chose the announced addresses, so that a private one is meant.
    """
    if where >= Scope.MACHINE:
        return "this address works on this machine only: give another with --listen, so that others can join"
    if where == Scope.NETWORK and not announced:
        return (
            "this address is private, and works in its own network only: for others, forward or publish a fixed port "
            "(--listen /ip4/0.0.0.0/tcp/4001), and announce its public address (--announce)"
        )
    return ""
