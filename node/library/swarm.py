"""A training loop of one's own in a swarm: `Swarm.join`, then `swarm.step` after each step of the optimizer.

The peer (network, rounds, disk) is a process of its own, which the script starts or attaches to. The script takes the
place of that peer's worker: the same commands, the same shared memory, carried out in `step`. Under torch.distributed,
all ranks of the script are one worker.

    swarm.py        what a script calls
    worker.py       the commands of the peer; between two rounds it only counts (`counter.py`)
    peer.py         finds, starts and asks the peer (`child.py`: its process, `link.py`: the connection)
    parameters.py   the model as one flat vector (`ranked_parameters.py`, `ranks.py`: of several ranks)
    shown.py        figures for a logger and a progress bar
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from node.library.counter import StepCounter, TokensError
from node.library.parameters import Parameters, SwarmError, keeping_modes
from node.library.peer import ATTACH, ScriptPeer, given_state_dir, named, run_file, with_settings
from node.library.shown import BarPostfix, Messages, figures, last_report
from node.library.worker import LOOK_SECONDS, ScriptWorker, State

if TYPE_CHECKING:  # only a script of several ranks loads its code
    from node.library.ranks import Ranks

JOIN_SECONDS, WAIT_SECONDS, LEAVE_SECONDS = 600.0, 600.0, 20.0
_joined: weakref.WeakSet[Swarm] = weakref.WeakSet()  # of this process, that have not left


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a call of `step` did. Between rounds it only counts."""

    round: int  # that the script trains for now; -1 without a swarm
    ended: bool = False  # a round ended in this call: the parameters are those of the swarm
    contributed: bool = False  # with what this script had trained in it
    waited_seconds: float = 0.0
    over: bool = False  # the run is over, or this peer has left it: what follows is only local


class Swarm:
    """A script's place in a run. Make it by `join` or `start`; it is a context manager that leaves at its end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        arguments: Sequence[str] | None = None,
        run: str = "",
        attach: Path | None = None,
        evaluate: Callable[[], float] | None = None,
        extra: Sequence[str] | None = None,
        join_seconds: float = JOIN_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        quiet: bool = False,
    ) -> None:
        """`arguments` are those of `node join` for a peer of this script's own, `run` the text of a run file to start;
        without arguments and `attach` there is no swarm, and all calls return at once.
        """
        self._is_forked, self._lock, self._leaving = False, threading.Lock(), False
        self._wait_seconds, self._messages = wait_seconds, Messages(quiet)
        self._ranks: Ranks | None = None
        self._ranks_know: tuple[State, int] | None = None
        self._report_of_round: dict[str, Any] = {}  # with several ranks
        self._bar = BarPostfix()
        self._between = StepResult(-1)
        self._worker: ScriptWorker | None = None
        self._peer = ScriptPeer(arguments, run, attach, self._messages)
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # of a wrapper, as accelerate's
        if arguments is None and attach is None:
            self._messages.say("no swarm was given (bootstrap, attach or a NODE_* variable): this script trains alone")
            return
        self._leave_earlier(attach or given_state_dir(arguments or ()))
        parameters = self._of_ranks(model, extra, evaluate is not None, join_seconds)
        parameters = parameters or Parameters(model, extra, self._optimizer)
        evaluate = evaluate and keeping_modes(model, evaluate)
        self._counter = StepCounter(self._optimizer)
        self._worker = worker = ScriptWorker(
            self._peer, parameters, self._counter, self._ranks, evaluate, self._messages
        )
        atexit.register(self._leave_at_exit)
        _joined.add(self)
        try:
            self._together("join", lambda: self._enter(worker, time.monotonic() + join_seconds, join_seconds))
            if self._ranks:
                self._ranks.limit(wait_seconds)
        except BaseException:
            self._close()
            raise

    # -- into a run ---------------------------------------------------------------------------------------------------

    @classmethod
    def join(
        cls,
        model: nn.Module,
        optimizer: Any = None,
        *,
        bootstrap: str | Sequence[str] = (),
        run_id: str = "",
        attach: str | Path | None = None,
        state_dir: str | Path | None = None,
        options: Sequence[str] = (),
        evaluate: Callable[[], float] | None = None,
        extra: Sequence[str] | None = None,
        join_seconds: float = JOIN_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        quiet: bool = False,
    ) -> Self:
        """Take part in a run: its state is loaded into the model, in place. The optimizer keeps its own state.

        `bootstrap` are addresses of peers, `options` further options of `node join`. With `attach`, a peer that runs
        already (`node join --own-loop --state-dir DIR`) is used. Without any of them the variables NODE_BOOTSTRAP and
        NODE_ATTACH decide; without these, there is no swarm.

        `evaluate` returns the loss of the model's present parameters on held-out data: it is called where a round ends.
        `extra` names buffers to average; None means BatchNorm's statistics. Raises `SwarmError`.
        """
        more: dict[str, Any] = {"evaluate": evaluate, "extra": extra, "quiet": quiet}
        more |= {"join_seconds": join_seconds, "wait_seconds": wait_seconds}
        given = [bootstrap] if isinstance(bootstrap, str) and bootstrap else [*bootstrap]
        attach = attach or os.environ.get(ATTACH)
        if attach:
            if given or run_id or state_dir or options:
                raise SwarmError("with attach, the peer that runs has its settings: leave out all others")
            return cls(model, optimizer, attach=Path(attach), **more)
        if not given and not os.environ.get("NODE_BOOTSTRAP") and not options:
            return cls(model, optimizer, **more)
        arguments = [part for each in given for part in ("--bootstrap", each)]
        arguments += [*named(run_id=run_id, state_dir=state_dir), *options]
        return cls(model, optimizer, arguments=arguments, **more)

    @classmethod
    def start(
        cls,
        model: nn.Module,
        optimizer: Any = None,
        *,
        inner_steps: int,
        rounds: int,
        settings: Mapping[str, Any] | None = None,
        state_dir: str | Path | None = None,
        options: Sequence[str] = (),
        evaluate: Callable[[], float] | None = None,
        extra: Sequence[str] | None = None,
        join_seconds: float = JOIN_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        quiet: bool = False,
    ) -> Self:
        """Start a run from the model's present parameters; or continue it, if the state directory holds it.

        `settings` are further keys of a run file, such as {"name": "mine", "codec": "fp32", "recipe": {…}}.
        """
        more: dict[str, Any] = {"evaluate": evaluate, "extra": extra, "quiet": quiet}
        more |= {"join_seconds": join_seconds, "wait_seconds": wait_seconds}
        given = {"task": "loop", "recipe": {"inner_steps": inner_steps, "rounds": rounds}}
        run = with_settings(given, settings or {})
        arguments = [*named(state_dir=state_dir), *options]
        return cls(model, optimizer, arguments=arguments, run=run_file(run), **more)

    def _leave_earlier(self, directory: Path | None) -> None:
        """A cell of a notebook that joins may be run again: its first peer must not keep the state directory."""
        for other in [each for each in _joined if each.active and not each._ranks]:
            if directory and other.state_dir and directory.absolute() == other.state_dir.absolute():
                self._messages.say(f"this process had joined from {directory} already: it leaves there first")
                other.leave()
            elif other.has_own_peer:
                self._messages.say_once(
                    "this process has joined another swarm already, and is still in it: leave() ends that"
                )

    def _enter(self, worker: ScriptWorker, deadline: float, seconds: float) -> StepResult:
        while self.waits:
            if time.monotonic() >= deadline:
                what = "found no run" if worker.state is State.LOST else "got no state of the run"
                why = worker.problem or f"the peer {what}: see its lines{self._peer.where}, or wait longer"
                raise SwarmError(f"not in a run after {seconds:g} s: {why}")
            worker.advance(time.monotonic() + LOOK_SECONDS)
            if worker.problem and self._peer.child is None:
                self._messages.say_once(f"waiting: {worker.problem}")
        if worker.round < 0:
            why = self._peer.child.last_line() if self._peer.child else ""
            raise SwarmError(f"the peer has left before this script trained: {why or 'the run is over'}")
        if getattr(self._optimizer, "state", None):
            self._messages.say(
                "the optimizer's moments are of other parameters than those of the swarm, which were loaded"
            )
        return StepResult(worker.round, True)

    @property
    def active(self) -> bool:
        """Whether this script takes part in a run now."""
        return self._worker is not None and self._worker.state not in (State.OVER, State.ALONE)

    @property
    def waits(self) -> bool:
        """Whether the swarm's state for the next round is due: what is trained meanwhile does not count."""
        return self._worker is not None and self._worker.state in (State.LOST, State.WAITING)

    @property
    def over(self) -> bool:
        return self._worker is not None and self._worker.state is State.OVER

    @property
    def state_dir(self) -> Path | None:
        """Of the peer; None before the peer has told it, and without a swarm."""
        return self._peer.state_dir

    @property
    def has_own_peer(self) -> bool:
        """Whether the script has started its peer, and not attached to one."""
        return self._peer.child is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error and self._ranks:  # the others are elsewhere
            self._ranks.close()
        self.leave()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None = None) -> StepResult:
        """Call it once after each `optimizer.step()`, with what the step has learnt from: tokens, or samples.

        It returns at once, except where a round ends: then it waits for the swarm's mean, at most `wait_seconds`, and
        writes it into the parameters. Raises `SwarmError` if the model's parameters are others than at the join.
        """
        if (worker := self._worker) is None or worker.state in (State.OVER, State.ALONE):
            return StepResult(self._between.round, over=self.over)
        if self._is_forked:
            raise SwarmError("this process was forked from the one that joined: call step() only there")
        if not self._lock.acquire(False):
            raise SwarmError("step() runs in another thread: call it from one")
        try:
            if worker.state is State.TRAINING and worker.count(tokens, loss):
                return self._between
            result = self._together("step", lambda: self._step(worker))
        except TokensError:
            raise
        except BaseException:  # whatever it is, the next call begins with a new connection
            worker.drop()
            raise
        finally:
            self._lock.release()
        if result.ended:
            self._bar.show(self.metrics())
        return result

    def _step(self, worker: ScriptWorker) -> StepResult:
        before, began = worker.round, time.monotonic()
        if worker.state is not State.TRAINING:
            return self._step_apart(worker)
        if not worker.wanted and not worker.report():
            return StepResult(worker.round)
        worker.end_turn(began + self._wait_seconds)
        if worker.alone:
            self._close()
        elif self.waits:
            what = f"no mean of the swarm in {self._wait_seconds:g} s" if worker.connected else "the peer is gone"
            self._messages.say_once(f"{what}: this script trains alone until the swarm's state is here again")
        ended = worker.round != before or self.over
        counts = ended and bool(last_report(self.state_dir, before).get("weight"))
        return StepResult(worker.round, ended, counts, time.monotonic() - began, self.over)

    def _step_apart(self, worker: ScriptWorker) -> StepResult:
        """A step without a part in a round. What it trains is lost once the swarm's state is here again."""
        worker.advance(time.monotonic())
        if worker.alone:
            self._close()
        is_back = worker.state is State.TRAINING
        if is_back:
            self._messages.forget()
        return StepResult(worker.round, is_back, over=self.over)

    # -- several ranks ------------------------------------------------------------------------------------------------

    def _of_ranks(
        self, model: nn.Module, extra: Sequence[str] | None, evaluates: bool, seconds: float
    ) -> Parameters | None:
        """The parameters of a script of several ranks, which from now on act together; None if it is one process."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        from node.library.ranked_parameters import RankedParameters
        from node.library.ranks import Ranks

        self._ranks = ranks = Ranks(seconds)
        self._messages.quiet |= not ranks.leads
        try:
            parameters = RankedParameters(ranks, model, extra, self._optimizer)
            if len({*ranks.exchange(evaluates)}) > 1:
                raise SwarmError("evaluate is given on some ranks only: give it on all, or on none")
        except BaseException:
            ranks.close()
            raise
        return parameters

    def _together(self, call: str, act: Callable[[], StepResult]) -> StepResult:
        """Do it, with several ranks on rank 0: the result, and what this object tells, are the same on all ranks."""
        worker = self._worker
        assert worker
        if (ranks := self._ranks) is None:
            result = act()
            self._between = StepResult(worker.round)
            return result

        def lead() -> dict[str, Any] | None:
            result, before = act(), self._ranks_know
            self._ranks_know = (worker.state, worker.round)
            if result == StepResult(worker.round) and self._ranks_know == before:
                return None
            report = last_report(self.state_dir) if result.ended else self._report_of_round
            return {"result": asdict(result), "state": worker.state.value, "report": report}

        try:
            news = ranks.together(call, lead)
        except BaseException:
            self._ranks_know = None
            if ranks.lost:
                self._close()
            raise
        if news is not None:
            result = StepResult(**news["result"])
            worker.state, worker.round, self._report_of_round = State(news["state"]), result.round, news["report"]
            self._between = StepResult(result.round)
            return result
        return self._between

    # -- leaving ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Finish the round under way and leave the run; the model gets the last mean. At most some 20 s.

        A peer that this script only attached to stays in the run: it has what was trained in this round, and rests.
        All ranks of a script call it.
        """
        if (worker := self._worker) is None or self._is_forked or self._leaving:
            return
        self._leaving = True
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            if self.active and not (self._ranks and self._ranks.lost):
                if self._ranks:
                    self._ranks.limit(LEAVE_SECONDS)
                self._together("leave", lambda: self._finish(worker, deadline))
        except SwarmError as error:
            self._messages.say(str(error))
        finally:
            try:
                self._close(deadline)
            finally:
                self._leaving = False  # Ctrl-C may have ended it: it can be called again

    def _finish(self, worker: ScriptWorker, deadline: float) -> StepResult:
        if self._peer.child is None:
            worker.hand_over()
        elif self._peer.runs:
            worker.report(at_once=True)  # the others count what they know of
            self._peer.finish()
            while self.active and time.monotonic() < deadline:
                self._leave_by_turns(worker)
        return StepResult(worker.round, True, over=True)

    def _leave_by_turns(self, worker: ScriptWorker) -> None:
        """As in `step`, but without steps: hand over the work when the peer wants it."""
        if not self._peer.runs:
            worker.state = State.OVER
        elif worker.state is not State.TRAINING:
            worker.advance(time.monotonic() + LOOK_SECONDS)
        elif worker.wanted:
            worker.end_turn(time.monotonic() + LOOK_SECONDS)
        else:
            time.sleep(LOOK_SECONDS / 5)

    def _leave_at_exit(self) -> None:
        if not self._is_forked:
            with suppress(Exception):
                if self._ranks:  # the others may end at another time
                    self._ranks.close()
                self.leave()

    def _close(self, deadline: float = 0.0) -> None:
        if self._ranks:
            self._ranks.close()
        if (worker := self._worker) is None:
            return
        was_over, was_alone = self.over, worker.alone
        worker.drop()
        if not was_over:
            self._peer.finish()
        worker.state = State.ALONE if was_alone else State.OVER
        self._peer.end(max(5.0, deadline - time.monotonic()))
        _joined.discard(self)
        self._counter.close()
        atexit.unregister(self._leave_at_exit)

    # -- what is shown ------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The last round's figures, for a logger of one's own. Empty without a swarm, and before the first round."""
        return figures(self._report_of_round if self._ranks else last_report(self.state_dir), self._optimizer)


def _mark_forked() -> None:
    for swarm in _joined:
        swarm._is_forked = True


os.register_at_fork(after_in_child=_mark_forked)
