"""A peer's directory: who it is, which run it is in, whom it met, what it reported.

identity.key    the Ed25519 key                     peers.json     whom it met, and where
incarnation     how often it was started            rounds.jsonl   one report a line; rounds.1.jsonl … before that
manifest.bin    the sealed manifest of its run      held-out.bin   the sample that everybody evaluates on
sample.txt      what the model wrote at the end     certificates.bin   its chain (`node.storage.certificate_log`)
checkpoints/    its state before some rounds (`node.storage.checkpoint`)
listen.json     where it listened, and where it was asked to
over            there if the run is                 scratch/       parts of past rounds, of this life
past/<run>/     the files of runs that it was in before; past/<run>-unused/: checkpoints that its chain did not lead to
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from node.membership.addresses import sound
from node.membership.hello import MAX_RUN_BYTES, MAX_SAMPLE_BYTES
from node.runtime.identity import Identity, load_or_create, sync_directory
from node.storage.rotation import KEEP_FILES
from node.storage.scratch import DIRECTORY as SCRATCH
from protocols.base import PeerId

MAX_CACHED_PEERS = 64
MAX_INCARNATION = 1 << 40
"""As `protocols.wire` has it: nobody would listen to a member of a higher one."""
_OF_A_RUN = (
    "manifest.bin", "held-out.bin", "peers.json", "rounds.jsonl", "sample.txt", "over", "totals.json",
    "certificates.bin", "checkpoints", *(f"rounds.{number}.jsonl" for number in range(1, KEEP_FILES + 1)),
)  # fmt: skip
_MAX_CACHE_BYTES = 1 << 20


class StateError(Exception):
    """The directory cannot be used; the message says what, why and what to do."""


class StateDir:
    """The directory in one life of the peer; whoever starts the peer sees to it that there is one at a time."""

    def __init__(self, path: Path, identity: Identity, incarnation: int) -> None:
        self.path, self.identity, self.incarnation = path, identity, incarnation
        self._moved: Sequence[tuple[Path, Path]] | None = None  # what `begin` put aside: from where, to where

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the directory if there is none, and begin a life of its own number.

        Raises:
            StateError: it cannot be written.
            IdentityError: the identity in it cannot be used.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(path, load_or_create(path / "identity.key"), _next_incarnation(path / "incarnation"))
        except OSError as error:
            raise StateError(
                f"cannot write {error.filename or path} ({error.strerror}): "
                "give a directory that can be written, with space left, by --state-dir"
            ) from None

    @property
    def rounds(self) -> Path:
        return self.path / "rounds.jsonl"

    @property
    def sample(self) -> Path:
        """Where the run's evaluation sample is; it may be missing."""
        return self.path / "held-out.bin"

    @property
    def certificates(self) -> Path:
        """Where the chain is; it may be missing."""
        return self.path / "certificates.bin"

    # -- the run ------------------------------------------------------------------------------------------------------

    def manifest(self) -> bytes:
        """The sealed manifest of the run that this directory is of; empty if it is of none."""
        return _read(self.path / "manifest.bin", MAX_RUN_BYTES)

    def held_out(self) -> bytes:
        """The run's evaluation sample; empty if there is none."""
        return _read(self.sample, MAX_SAMPLE_BYTES)

    @property
    def is_over(self) -> bool:
        """Whether the run that this directory is of is over, as far as was seen here."""
        return is_over(self.path)

    def begin(self, run_id: str, before: str, sealed: bytes, sample: bytes) -> None:
        """Make it the directory of a run. The files of another, `before`, are moved aside, never deleted.

        Raises:
            StateError: it cannot be written.
        """
        try:
            if before != run_id:
                self._moved = self._put_aside(before)
            if self.manifest() != sealed:
                write_atomically(self.path / "manifest.bin", sealed)
            if sample and self.held_out() != sample:
                write_atomically(self.sample, sample)
        except OSError as error:
            raise StateError(
                f"cannot write {error.filename or self.path} ({error.strerror}): free space there"
            ) from None

    def withdraw(self) -> None:
        """Undo `begin`, before anything was trained: this peer cannot take part in that run after all.

        What was moved aside for it is back in its place. Does nothing where the directory was of that run before.

        Raises:
            StateError: it cannot be written; nothing is lost.
        """
        if self._moved is None:
            return
        try:
            for name in _OF_A_RUN:
                if (self.path / name).is_file():
                    (self.path / name).unlink()
            for place, aside in self._moved:
                aside.rename(place)
            sync_directory(self.path)
            for past in {aside.parent for _, aside in self._moved}:
                past.rmdir()
        except OSError as error:
            raise StateError(f"cannot write {self.path} ({error.strerror}): what was there is in past/") from None
        self._moved = None

    def _put_aside(self, run_id: str) -> list[tuple[Path, Path]]:
        """Returns what was moved: from where, to where."""
        there = [self.path / name for name in _OF_A_RUN if (self.path / name).exists()]
        if not there:
            return []
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)  # nobody will need it
        past = self._past(run_id[:16] or "unknown")
        for file in there:
            file.rename(past / file.name)
        sync_directory(past)
        sync_directory(self.path)
        return [(file, past / file.name) for file in there]

    def quarantine(self, run_id: str, checkpoints: Collection[Path]) -> Path:
        """Move checkpoints aside, with a copy of the chain as it is, as of a directory of their own; returns that.

        Raises:
            OSError: it cannot be written.
        """
        past = self._past(f"{run_id[:16]}-unused")
        if self.certificates.exists():
            shutil.copyfile(self.certificates, past / self.certificates.name)
            _sync_file(past / self.certificates.name)
        for path in checkpoints:
            (past / path.parent.name).mkdir(exist_ok=True)
            path.rename(past / path.parent.name / path.name)
        for each in {past, *(past / path.parent.name for path in checkpoints), *(path.parent for path in checkpoints)}:
            sync_directory(each)
        return past

    def _past(self, name: str) -> Path:
        past, number = self.path / "past" / name, 1
        while past.exists():
            number += 1
            past = past.with_name(f"{name}-{number}")
        past.mkdir(parents=True)
        sync_directory(past.parent)
        return past

    def keep_text(self, text: bytes) -> None:
        """Note what the run's model wrote; off the event loop, as `remember`."""
        with suppress(OSError):
            write_atomically(self.path / "sample.txt", text)

    # -- whom it met --------------------------------------------------------------------------------------------------

    def peers(self) -> dict[PeerId, tuple[str, ...]]:
        """Peers that were live when this was last in the run, and their addresses; what cannot be read is left out."""
        try:
            entries = json.loads(_read(self.path / "peers.json", _MAX_CACHE_BYTES) or b"{}")
        except (ValueError, RecursionError):
            return {}
        if not isinstance(entries, dict):
            return {}
        found = {peer: sound(said) for peer, said in entries.items() if isinstance(said, list)}
        return dict(list(found.items())[:MAX_CACHED_PEERS])

    def remember(self, peers: Mapping[PeerId, Sequence[str]]) -> None:
        """Note whom we see now; those noted before come after them, as many as there is room for.

        It waits for the disk, as long as that takes: to be called off the event loop.
        """
        merged = {peer: sound(addresses) for peer, addresses in peers.items()}
        for peer, addresses in self.peers().items():
            merged.setdefault(peer, addresses)
        kept = {peer: merged[peer] for peer in list(merged)[:MAX_CACHED_PEERS]}
        if kept != self.peers():
            with suppress(OSError):  # a full disk must not end a round
                write_atomically(self.path / "peers.json", json.dumps(kept, indent=1).encode())

    def forget(self) -> None:
        """The run is over: there is nobody to go back to, nothing to go on with; off the event loop, as `remember`."""
        with suppress(OSError):
            (self.path / "over").touch()
            (self.path / "peers.json").unlink(missing_ok=True)
            sync_directory(self.path)

    def listening(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Where the last life listened, ports and all, if it was asked to listen at the same addresses."""
        try:
            kept = json.loads(_read(self.path / "listen.json", _MAX_CACHE_BYTES) or b"{}")
            took = kept["took"] if kept["asked"] == [*asked] else []
        except (ValueError, RecursionError, KeyError, TypeError):
            return ()
        fits = isinstance(took, list) and len(took) == len(asked) and all(isinstance(each, str) for each in took)
        return sound(took) if fits and len(sound(took)) == len(asked) else ()

    def listens(self, asked: Sequence[str], took: Sequence[str]) -> None:
        """Note where this life listens: those who knew it will look for it there."""
        if self.listening(asked) != tuple(took):
            with suppress(OSError):
                write_atomically(self.path / "listen.json", json.dumps({"asked": [*asked], "took": [*took]}).encode())

    def addresses(self) -> Iterable[str]:
        """Multiaddrs with peer ids of those who were live."""
        for peer, addresses in self.peers().items():
            yield from (f"{address}/p2p/{peer}" for address in addresses[:4])


def holds_run(directory: Path) -> bool:
    """Whether a directory is of a run to go on with: not over, and with somebody to ask, or a state of its own."""
    if not (directory / "manifest.bin").exists() or is_over(directory):
        return False
    return (directory / "peers.json").exists() or (directory / "checkpoints").exists()


def is_over(directory: Path) -> bool:
    """Whether a directory is of a run that is over, as far as was seen there."""
    return (directory / "over").exists()


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, so that after a crash there is the old one or the new one, once this is over the new.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _next_incarnation(path: Path) -> int:
    """One more than in any life before: a member that came back under its old number could vote twice.

    So only a file that was never there counts as none; one that is empty, or cannot be read, does not.
    """
    try:
        with path.open("rb") as file:
            text = file.read(32).decode(errors="replace").strip()
    except FileNotFoundError:
        text = "0"
    if not text.isdecimal() or int(text) >= MAX_INCARNATION:
        raise StateError(f"{path} is damaged: write a number into it that is higher than any that others have seen")
    incarnation = int(text) + 1
    write_atomically(path, f"{incarnation}\n".encode())
    return incarnation
