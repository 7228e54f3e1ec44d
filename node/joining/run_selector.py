"""Which run a peer takes part in: the one that an address leads to, or the one that its directory holds."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Container, Sequence

from node.config.manifest import ManifestError, unseal
from node.config.peer_config import FILE_SIGN, PeerConfig
from node.config.run_config import RunConfig
from node.joining import resume
from node.joining.bootstrap import BootstrapClient, RunInfo
from node.joining.consent import require_consent
from node.runtime.identity import verify
from node.storage.statedir import StateDir, StateError
from protocols.base import PeerId


class RunSelector:
    """What the user gave, what the directory holds and what others answer, put together.

    Attributes:
        alone: no peer answered.
        own: the run is the one in the state directory, and no other peer was heard about it.
    """

    def __init__(self, config: PeerConfig, protocols: Collection[str], say: Callable[[str], None]) -> None:
        """
        Args:
            config: of this machine.
            protocols: names of those that this peer can take part in.
            say: called with one line for the user.
        """
        self.alone = self.own = False
        self._config, self._protocols, self._say = config, protocols, say
        self._expected, self._held = config.run_id, ""

    def held(self, state: StateDir, wanted: RunConfig | None) -> resume.ResumableRun | None:
        """The run that the directory holds, unless another is to be started.

        Args:
            wanted: what the user asked for; None: whatever there is.

        Raises:
            StateError: it holds another than that, or cannot be read.
        """
        held = None if self._config.new else resume.find_resumable(state, asks=bool(self._config.bootstrap))
        if held and wanted not in (None, held.manifest.config):
            raise StateError(
                f"{state.path} is of another run, which is not over: --new starts the one that is asked for"
            )
        return held

    def over(self, state: StateDir, wanted: RunConfig | None) -> str:
        """One line if the run that the user means is the one in the directory, and is over; else empty.

        Args:
            wanted: as of `find_resumable`.

        Raises:
            StateError: another run is asked for, and the directory holds this one.
        """
        held, config = run_id(state.manifest()), self._config
        if config.new or not held or not state.is_over:
            return ""
        if config.run_id and held.startswith(config.run_id):
            return _over(held, state)
        if config.bootstrap:
            return ""
        if config.run_id:
            raise StateError(f"{state.path} is of another run, {held[:12]}: --bootstrap joins run {config.run_id[:12]}")
        if wanted not in (None, unseal(state.manifest(), verify).config):
            raise StateError(f"{state.path} is of another run, which is over: {resume.ANOTHER}")
        return _over(held, state)

    def is_over(self, state: StateDir, run: RunInfo) -> str:
        """The same for a run that other peers are still in."""
        there = unseal(run.sealed, verify).run_id
        return _over(there, state) if state.is_over and there == run_id(state.manifest()) else ""

    def addresses(self, state: StateDir) -> tuple[str, ...]:
        """Where to look for the run: the user's addresses and, for the same run, the last session's peers."""
        config = self._config
        held = self._held = "" if config.new else run_id(state.manifest())
        if config.bootstrap and not (config.run_id and held.startswith(config.run_id)):
            return config.bootstrap
        self._expected = config.run_id or held or None
        return (*config.bootstrap, *(state.addresses() if held else ()))

    def judge(self, run: RunInfo) -> None:
        """Check that this peer may join a run.

        Raises:
            ManifestError: it may not.
        """
        manifest = unseal(run.sealed, verify, self._expected)
        manifest.config.require_protocol(self._protocols)
        require_consent(manifest, self._config.consent, self._held)
        named = hashlib.sha256(run.sample).digest() == manifest.held_out if any(manifest.held_out) else not run.sample
        if not named:
            raise ManifestError("the evaluation sample is not the one that the manifest names: ask another peer")

    async def ask(
        self, entry: BootstrapClient, state: StateDir, addresses: Sequence[str], held: resume.ResumableRun | None
    ) -> RunInfo:
        """Ask the peers at these addresses which run they are in; if none answers, take the run held here.

        Raises:
            ManifestError: all lead into others.
        """
        if not self._config.bootstrap:
            run = f"run {self._expected[:12]}" if self._expected else "the run of before"
            self._say(f"going back to {run}: asking the peers met there; --new starts another")
        elif state.is_over:
            self._say(f"the run in {state.path} is over: waiting for the addresses given to lead into another")
        met = state.peers()

        def is_meant() -> bool:
            if held is None or not held.has_state:
                return False
            return self._is_meant(held.manifest.run_id, met, self.given(entry))

        try:
            async with asyncio.timeout(None) as limit:

                def on_named(named: Sequence[str] = ()) -> None:
                    """From the moment when the user may mean the run held here, others have ten seconds to answer."""
                    if limit.when() is None and is_meant():
                        limit.reschedule(asyncio.get_running_loop().time() + resume.ANSWER_SECONDS)

                entry.set_listener(on_named)
                on_named()
                return await entry.find(addresses, [each for each in addresses if each not in self._config.bootstrap])
        except TimeoutError:
            pass
        except ManifestError as error:  # who was met here is in another run now
            if not is_meant() or self._config.bootstrap:
                raise
            self._say(str(error))
        finally:
            entry.set_listener(lambda named: None)
        assert held is not None
        entry.stop()
        self.alone = True
        return self.resume_held(held)

    def given(self, entry: BootstrapClient) -> tuple[str, ...]:
        """The multiaddrs that the user gave, those in files as they were read last."""
        plain = (each for each in self._config.bootstrap if not each.startswith(FILE_SIGN))
        return (*plain, *(address for named in entry.named.values() for address in named))

    def _is_meant(self, held: str, met: Container[PeerId], given: Sequence[str]) -> bool:
        """Whether the user may mean the run held here: a user that gave addresses may mean another."""
        if self._config.run_id:
            return held.startswith(self._config.run_id)
        return not self._config.bootstrap or any(address.rpartition("/p2p/")[2] in met for address in given)

    def resume_held(self, held: resume.ResumableRun) -> RunInfo:
        """Resume the run held here without an answer from others."""
        self.judge(held.run)
        self.own, why = True, "nobody answers: " if self.alone else ""
        self._say(f"{why}going on with the run {held.manifest.run_id[:12]} that is held here; --new starts another")
        return held.run


def _over(run: str, state: StateDir) -> str:
    return f"the run {run[:12]} in {state.path} is over: {resume.ANOTHER}"


def asks(sources: Sequence[str]) -> str:
    """What a peer does while it asks at addresses, for its status."""
    files = [each.removeprefix(FILE_SIGN) for each in sources if each.startswith(FILE_SIGN)]
    places = [f"{len(sources) - len(files)} addresses"] if len(files) < len(sources) else []
    return f"asking at {' and '.join([*places, *(f'those in {each}' for each in files)])} which run this is"


def run_id(sealed: bytes) -> str:
    """The id of the run that a directory holds; empty if it holds none, or one that cannot be read."""
    try:
        return unseal(sealed, verify).run_id if sealed else ""
    except ManifestError:
        return ""
