"""The run that a peer takes part in: the one that other peers are in, the one that its directory holds, or a new one.

The founder of a run alone initialises the parameters; all other peers download them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Container, Sequence
from typing import TYPE_CHECKING

import torch

from node.config.manifest import Manifest, ManifestError, layout_digest, seal, unseal
from node.config.multiaddrs import FILE_SIGN
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.joining import resume
from node.joining.bootstrap import BootstrapClient, RunInfo
from node.runtime.identity import Identity, verify
from node.storage.statedir import StateDir, StateError
from node.training.remote import RemoteTrainer
from protocols.base import Compute, Member, PeerId
from protocols.sync.snapshot import SnapshotIndex

if TYPE_CHECKING:
    from node.joining.stage_plan import StagePlan


class RunSelector:
    def __init__(
        self, config: PeerConfig, state: StateDir, protocols: Collection[str], say: Callable[[str], None]
    ) -> None:
        self.alone = False  # no peer answered
        self.own = False  # the run is the one in the state directory, resumed without an answer from others
        self._config, self._state, self._protocols, self._say = config, state, protocols, say
        self._expected, self._held = config.run_id, ""

    def held(self, wanted: RunConfig | None) -> resume.ResumableRun | None:
        """The run that the directory holds, if not to be replaced; `StateError` if it is not the `wanted` one."""
        held = None if self._config.new else resume.find_resumable(self._state, asks=bool(self._config.bootstrap))
        if held and wanted not in (None, held.manifest.config):
            raise StateError(
                f"{self._state.path} holds another run, which is not over: --new starts the run that you asked for"
            )
        return held

    def over(self, wanted: RunConfig | None) -> str:
        """A user-facing line if the user means the directory's run, and it is over; `StateError` for another run."""
        state, config = self._state, self._config
        held = run_id(state.manifest())
        if config.new or not held or not state.is_over:
            return ""
        if config.run_id and held.startswith(config.run_id):
            return _over(held, state)
        if config.bootstrap:
            return ""
        if config.run_id:
            raise StateError(f"{state.path} holds another run, {held[:12]}: --bootstrap joins run {config.run_id[:12]}")
        if wanted not in (None, unseal(state.manifest(), verify).config):
            raise StateError(f"{state.path} holds another run, which is over: {resume.ANOTHER}")
        return _over(held, state)

    def is_over(self, run: RunInfo) -> str:
        """A user-facing line if `run`, by which a peer answered, is the one in the directory, which is over."""
        there, state = unseal(run.sealed, verify).run_id, self._state
        return _over(there, state) if state.is_over and there == run_id(state.manifest()) else ""

    def addresses(self) -> tuple[str, ...]:
        """Addresses to ask: those that the user gave and, if they may be of the same run, those of peers met before."""
        config, state = self._config, self._state
        held = self._held = "" if config.new else run_id(state.manifest())
        if config.bootstrap and not (config.run_id and held.startswith(config.run_id)):
            return config.bootstrap
        self._expected = config.run_id or held or None
        return (*config.bootstrap, *(state.addresses() if held else ()))

    def judge(self, run: RunInfo) -> None:
        """Check that this peer may join a run; else raise `ManifestError`."""
        manifest = unseal(run.sealed, verify, self._expected)
        manifest.config.require_protocol(self._protocols)
        if not self._config.own_loop:  # the script is the user's, whatever the run's task is
            require_consent(manifest, self._config.consent, self._held)
        genuine = hashlib.sha256(run.sample).digest() == manifest.held_out if any(manifest.held_out) else not run.sample
        if not genuine:
            raise ManifestError("the evaluation sample is not the one that the manifest names: ask another peer")

    async def ask(self, entry: BootstrapClient, addresses: Sequence[str], held: resume.ResumableRun | None) -> RunInfo:
        """Ask the peers at these addresses for the run. If none answers in time, resume the one in the directory."""
        if not self._config.bootstrap:
            run = f"run {self._expected[:12]}" if self._expected else "the earlier run"
            self._say(f"rejoining {run} (use --new to start a new run)")
        elif self._state.is_over:
            self._say(f"the run in {self._state.path} is over: asking at the given addresses for another")
        met = self._state.peers()

        def is_meant() -> bool:
            if held is None or not held.has_state:
                return False
            return self._is_meant(held.manifest.run_id, met, self.given(entry))

        try:
            async with asyncio.timeout(None) as limit:

                def on_named(named: Sequence[str] = ()) -> None:
                    """From the moment when the user may mean the directory's run, others have ten seconds to answer."""
                    if limit.when() is None and is_meant():
                        limit.reschedule(asyncio.get_running_loop().time() + resume.ANSWER_SECONDS)

                entry.on_named = on_named
                on_named()
                return await entry.find(addresses, [each for each in addresses if each not in self._config.bootstrap])
        except TimeoutError:
            pass
        except ManifestError as error:  # the peers met before are in another run now
            if not is_meant() or self._config.bootstrap:
                raise
            self._say(str(error))
        finally:
            entry.on_named = lambda named: None
        assert held is not None
        entry.stop()
        self.alone = True
        return self.resume_held(held)

    def given(self, entry: BootstrapClient) -> tuple[str, ...]:
        """The multiaddrs that the user gave, including those that files held when they were read last."""
        plain = (each for each in self._config.bootstrap if not each.startswith(FILE_SIGN))
        return (*plain, *(address for named in entry.named.values() for address in named))

    def _is_meant(self, held: str, met: Container[PeerId], given: Sequence[str]) -> bool:
        """Whether the user may mean the run held here: addresses that the user gave may belong to another."""
        if self._config.run_id:
            return held.startswith(self._config.run_id)
        return not self._config.bootstrap or any(address.rpartition("/p2p/")[2] in met for address in given)

    def resume_held(self, held: resume.ResumableRun) -> RunInfo:
        self.judge(held.run)
        self.own, why = True, "no peer answers: " if self.alone else ""
        self._say(f"{why}resuming run {held.manifest.run_id[:12]} from the state directory; --new starts another")
        return held.run


def _over(run: str, state: StateDir) -> str:
    return f"the run {run[:12]} in {state.path} is over: {resume.ANOTHER}"


def asks(sources: Sequence[str]) -> str:
    files = [each.removeprefix(FILE_SIGN) for each in sources if each.startswith(FILE_SIGN)]
    places = [f"{len(sources) - len(files)} addresses"] if len(files) < len(sources) else []
    return f"asking at {' and '.join([*places, *(f'those in {each}' for each in files)])} which run this is"


def run_id(sealed: bytes) -> str:
    """Run id in a sealed manifest; empty if there is no manifest, or if it cannot be read."""
    try:
        return unseal(sealed, verify).run_id if sealed else ""
    except ManifestError:
        return ""


def require_consent(manifest: Manifest, named: str | None, held: str) -> None:
    """Check that the user of this machine agrees to the run's task: `named` by --task, or before, to the run `held`.

    The manifest, and with it the task's name, comes from any peer that answers. Importing the task's module
    runs its code, and a model may be a download of many gigabytes. So the user must name the same task, and a model.
    """
    task = manifest.config.consent_task
    if named is None and (not task or manifest.run_id == held):
        return
    if not task:
        raise ManifestError(f"this run trains {manifest.config.task}, not {named}: join it without --task")
    if manifest.model and named != task:
        wrong = f", not {named}" if named else ""
        base, size = manifest.model.base, manifest.model.size / 1e9
        raise ManifestError(
            f"this run fine-tunes a model of Hugging Face{wrong}, which its founder calls {base} ({size:.2f} GB): if "
            "you have it, or want it downloaded, join with --task hf --model FOLDER_OR_ORG/NAME@REVISION --data FILE"
        )
    if named != task:
        wrong = f", not {named}" if named else ""
        raise ManifestError(
            f"this run trains a task of its founder's own, {task}{wrong}: its code never comes from peers; if you have "
            f"its module {task.partition(':')[0]} from a source that you trust, join with --task {task}"
        )


async def found_run(
    config: RunConfig,
    trainer: RemoteTrainer,
    *,
    me: Member,
    identity: Identity,
    created: float,
    compute: Compute,
    plan: StagePlan | None = None,
) -> tuple[Manifest, RunInfo]:
    """Make the manifest of a new run, `created` at this wall time, and what joiners get of it.

    `trainer` holds the initial parameters, with stages those of stage 0; it has taken no step yet.
    """
    sample = await trainer.held_out()
    anchor = torch.empty(trainer.layout.sizes()[0])
    await trainer.read(anchor)
    index = await compute.run(lambda: SnapshotIndex.of(anchor, torch.zeros_like(anchor)), 8 * len(anchor))
    root = index.state_root(0)  # of the initial parameters, and no momentum
    if plan and root != plan.entries[0].state_root:
        raise ManifestError("this machine has drawn two different initial states: its memory may be damaged")
    count, fragments = sum(trainer.layout.sizes()), config.recipe.fragment_count
    if not plan and count < fragments:
        raise ManifestError(
            f"the model has {count} parameters, which cannot be averaged in {fragments} fragments: set fewer fragments "
            "in [recipe], or leave them out"
        )
    if config.elements not in (None, count) and not plan:
        raise ManifestError(
            f"task {config.task} has {config.elements} parameters, the script's model {count}: "
            "train the same model, or start a run of task loop"
        )
    manifest = Manifest(
        config=config,
        founder=me,
        elements=plan.elements if plan else trainer.layout.sizes(),
        state_root=root,
        held_out=hashlib.sha256(sample).digest() if sample else bytes(32),
        created=created,
        layout=None if plan else layout_digest(trainer.layout),
        stages=plan.entries if plan else None,
        model=await trainer.pins() if config.hf else None,
    )
    return manifest, RunInfo(seal(manifest, identity), sample)
