"""A training loop of one's own in a swarm: `Swarm.join`, then `swarm.step` after each step of the optimizer.

The peer (network, rounds, disk) is a process of its own, which the script starts or attaches to. The script takes the
place of that peer's worker (`node.training.worker`): the same commands, the same shared memory, carried out in `step`.
Under torch.distributed, all ranks of the script are one worker (`node.library.ranks`).

    off        no swarm was given: every call returns at once
    lost       no connection: `step` tries to attach, at most once a second
    waiting    the peer has the parameters, and has not said yet what to train from
    training   between two rounds: `step` counts, and looks at one word of memory
    over       the run is over, or this peer has left it
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from node.library.child import ChildPeer
from node.library.link import Link, LinkLost
from node.library.parameters import Parameters, SwarmError
from node.runtime.json_file import read_json
from node.runtime.locks import hold
from node.tasks.base import Step
from node.training.shared import Shared, read_only_vector
from node.training.trainer import LocalTraining, as_json, device_name
from protocols.base import Layout, Vector

if TYPE_CHECKING:  # only a script of several ranks loads its code
    from node.library.ranks import Ranks

JOIN_SECONDS, WAIT_SECONDS, LEAVE_SECONDS = 600.0, 600.0, 20.0
LOST_SECONDS = 30.0
"""Longest wait at the end of a round for a peer in place of one that died."""
ATTACH = "NODE_ATTACH"  # variable with the state directory of a peer to attach to
_ATTACH_PAUSE_SECONDS, _LOOK_SECONDS, _REPORT_SHARE = 1.0, 0.05, 0.02
_MAX_STARTS = 5
_UNSTEPPED_CALLS = 3
_MAX_JOURNAL_BYTES = 1 << 18


class State(Enum):
    OFF, LOST, WAITING, TRAINING, OVER = range(5)


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
        self._state, self._pid, self._lock = State.OFF, os.getpid(), threading.Lock()
        self._arguments, self._run, self._attached_to, self._evaluate = arguments, run, attach, evaluate
        self._wait_seconds, self._quiet = wait_seconds, quiet
        self._told: set[str] = set()
        self._ranks: Ranks | None = None
        self._ranks_know: tuple[State, int] | None = None
        self._report_of_round: dict[str, Any] = {}  # with several ranks
        self._link: Link | None = None
        self._problem = ""  # why there is none
        self._child: ChildPeer | None = None
        self._ended: ChildPeer | None = None  # whose end is known
        self._starts, self._next_try, self._next_report = 0, 0.0, 0.0
        self._round, self._leaving = -1, False
        self._uncounted: tuple[Any, Any] = (0, 0)  # tokens, and loss times tokens: on the device, or of this rank
        self._optimizer_steps, self._calls, self._unstepped, self._bar_text = 0, 0, 0, ""
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # of a wrapper, as accelerate's
        if arguments is None and attach is None:
            self._say("no swarm was given (bootstrap, attach or a NODE_* variable): this script trains alone")
            return
        self._parameters = self._of_ranks(model, extra, join_seconds) or Parameters(model, extra, self._optimizer)
        self._steps_are_seen = hasattr(self._optimizer, "register_step_post_hook")
        if self._steps_are_seen:
            self._hook = self._optimizer.register_step_post_hook(self._on_optimizer_step)
        self._state = State.LOST
        atexit.register(self._leave_at_exit)
        try:
            self._together("join", lambda: self._enter(time.monotonic() + join_seconds, join_seconds))
            if self._ranks:
                self._ranks.limit(wait_seconds)
        except BaseException:
            self._close()
            raise

    _shared: Shared
    _inner_steps: int
    _training: LocalTraining
    _completed: bool  # the inner steps of the round are done, and the peer knows
    _surplus: bool  # steps beyond them count, until the round is cut
    _mark: float  # when the last step ended

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
        arguments += [*_options(run_id=run_id, state_dir=state_dir), *options]
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
        run = {**(settings or {}), "task": "loop"}
        run["recipe"] = {**run.get("recipe", {}), "inner_steps": inner_steps, "rounds": rounds}
        arguments = [*_options(state_dir=state_dir), *options]
        return cls(model, optimizer, arguments=arguments, run=_toml(run), **more)

    def _enter(self, deadline: float, seconds: float) -> StepResult:
        while self._state not in (State.TRAINING, State.OVER):
            if time.monotonic() >= deadline:
                what = "found no run" if self._state is State.LOST else "got no state of the run"
                why = self._problem or f"the peer {what}: see its lines{self._where()}, or wait longer"
                raise SwarmError(f"not in a run after {seconds:g} s: {why}")
            self._advance(time.monotonic() + _LOOK_SECONDS)
        if self._round < 0:
            why = self._child.last_line() if self._child else ""
            raise SwarmError(f"the peer has left before this script trained: {why or 'the run is over'}")
        if self._optimizer is not None and getattr(self._optimizer, "state", None):
            self._say("the optimizer's moments are of other parameters than those of the swarm, which were loaded")
        return StepResult(self._round, True)

    @property
    def active(self) -> bool:
        """Whether this script takes part in a run now."""
        return self._state not in (State.OFF, State.OVER)

    @property
    def waits(self) -> bool:
        """Whether the swarm's state for the next round is due: what is trained meanwhile does not count."""
        return self._state in (State.LOST, State.WAITING)

    @property
    def over(self) -> bool:
        return self._state is State.OVER

    @property
    def state_dir(self) -> Path | None:
        """Of the peer; None before the peer has told it, and without a swarm."""
        return self._attached_to or (self._child.find_state_dir() if self._child else None)

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
        if self._state in (State.OFF, State.OVER):
            return StepResult(self._round, over=self.over)
        with self._alone():
            if self._state is State.TRAINING:
                self._count(tokens, loss)
            result = self._together("step", self._step)
        if result.ended:
            self._bar_text = _shown_on_bar(self.metrics(), self._bar_text)
        return result

    def _step(self) -> StepResult:
        before, began = self._round, time.monotonic()
        if self._state is not State.TRAINING:
            return self._step_apart()
        if not self._shared.attention and not self._report():
            return StepResult(self._round)
        self._end_turn(began + self._wait_seconds)
        if self.waits:
            what = "the peer is gone" if self._link is None else f"no mean of the swarm in {self._wait_seconds:g} s"
            self._say_once(f"{what}: this script trains alone until the swarm's state is here again")
        waited, self._mark = time.monotonic() - began, time.perf_counter()
        ended = self._round != before or self.over
        counts = ended and bool(_last_report(self.state_dir).get("weight"))
        return StepResult(self._round, ended, counts, waited, self.over)

    def _step_apart(self) -> StepResult:
        """A step without a part in a round. What it trains is lost once the swarm's state is here again."""
        self._advance(time.monotonic())
        is_back = self._state is State.TRAINING
        if is_back:
            self._say("back in the swarm: its state was loaded, and what was trained alone since is dropped")
            self._told.clear()
        return StepResult(self._round, is_back, over=self.over)

    @contextmanager
    def _alone(self) -> Any:
        if os.getpid() != self._pid:
            raise SwarmError("this process was forked from the one that joined: call step() only there")
        if not self._lock.acquire(blocking=False):
            raise SwarmError("step() runs in another thread: call it from one")
        try:
            yield
        except BaseException:  # whatever it is, the next call begins with a new connection
            self._drop()
            raise
        finally:
            self._lock.release()

    def _on_optimizer_step(self, optimizer: Any, *_: object) -> None:
        found = getattr(optimizer, "found_inf", None)  # a GradScaler lets a fused optimizer skip the step itself
        if found is None or not bool(found):
            self._optimizer_steps += 1

    def _count(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None) -> None:
        taken, self._optimizer_steps = self._optimizer_steps if self._steps_are_seen else 1, 0
        if self._leads:
            self._shared.stepped()  # a sign of life
        self._calls += 1
        if not taken:  # a GradScaler has skipped it, or gradients are still accumulated
            self._unstepped += 1
            if self._unstepped >= _UNSTEPPED_CALLS and 4 * self._unstepped > self._calls:
                self._say_once(
                    "step() is called without an optimizer.step() before it: that counts nothing. Call it once after "
                    "each optimizer.step(), with the tokens of all its batches"
                )
            return
        loss = math.nan if loss is None else loss.detach() if isinstance(loss, torch.Tensor) else loss
        on_device = isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu"  # no wait for the device
        if not on_device:
            tokens, loss = int(tokens), float(loss)
        if on_device or self._ranks:
            counted, losses = self._uncounted
            self._uncounted = (counted + tokens, losses + (tokens * loss if on_device or tokens else 0))
        else:
            self._training.add(Step(float(loss), int(tokens)))
        if self._leads:
            now = time.perf_counter()
            for _ in range(taken):
                self._training.step()
            self._training.spend(now - self._mark)
            self._mark = now

    def _flush(self) -> None:
        """Add what has been counted on the device, and by all ranks, to the work."""
        tokens, loss = self._count_of_all()
        self._training.add(Step(loss / max(1.0, tokens), int(tokens)))

    def _count_of_all(self) -> tuple[float, float]:
        if not self._ranks:
            return self._own_count()
        with self._ranks.operation("count"):
            tokens, losses = zip(*self._ranks.exchange(self._own_count()), strict=True)
        return sum(tokens), sum(losses)

    def _own_count(self) -> tuple[float, float]:
        tokens, loss = self._uncounted
        self._uncounted = (0, 0)
        return float(tokens), float(loss)

    def _report(self) -> bool:
        """Tell the peer of the work so far, seldom enough to cost little. Whether the turn ends with it."""
        training, now = self._training, time.perf_counter()
        completed = training.complete and not self._completed
        if now < self._next_report and not completed:
            return False
        self._flush()
        if training.due() or completed:
            self._completed = training.complete
            self._parameters.copy_out(self._shared.local)
            try:
                self._tell("progress", as_json(training.work()))
            except LinkLost:  # the next call attaches
                self._drop()
                return False
            self._mark = time.perf_counter()
            self._next_report = self._mark + (self._mark - now) / _REPORT_SHARE
        return training.complete and not self._surplus

    def _end_turn(self, deadline: float) -> None:
        """Hand the work to the peer, and wait for what to train from."""
        self._flush()
        self._parameters.copy_out(self._shared.local)
        for line in self._parameters.news():
            self._say_once(line)
        try:
            self._tell("done", as_json(self._training.work()))
            self._state = State.WAITING
        except LinkLost:
            self._drop()
        self._advance(deadline, LOST_SECONDS)

    # -- the peer's commands ------------------------------------------------------------------------------------------

    def _advance(self, deadline: float, lost_seconds: float = math.inf) -> None:
        """Carry out commands until there is one to train, the run is over, or the deadline. Looks at least once.

        Without a peer it gives up after `lost_seconds`.
        """
        alone_at = time.monotonic() + lost_seconds
        while self._state in (State.LOST, State.WAITING):
            try:
                if self._state is State.LOST:
                    self._attach()
                left = deadline - time.monotonic()
                if self._link and (message := self._link.receive(min(_LOOK_SECONDS * 4, max(0.0, left)))):
                    self._carry_out(self._link, message)
                    continue
                if self._link:
                    self._problem = ""
            except LinkLost as error:
                self._problem = str(error)
                self._drop()
            now = time.monotonic()
            if self._link:
                alone_at = now + lost_seconds
            if now >= min(deadline, alone_at):
                return
            if self._link is None:
                time.sleep(_LOOK_SECONDS)

    def _attach(self) -> None:
        """Connect to the peer, or start one; each try after a pause. Raises LinkLost."""
        now = time.monotonic()
        if self._link or now < self._next_try:
            return
        self._next_try = now + _ATTACH_PAUSE_SECONDS
        if self._attached_to is None and (self._child is None or self._child.code is not None):
            self._start_peer(now)
            return
        if directory := self.state_dir:
            self._link = Link.connect(directory)
        else:
            self._next_try = now + 0.1

    def _start_peer(self, now: float) -> None:
        """The first one, or after a pause one in place of a peer that ended by an error."""
        if self._child and self._child is not self._ended:
            self._ended = self._child
            self._next_try = now + 2.0 ** (self._starts - 1)
            return self._judge_end(self._child)
        self._next_try = now + _ATTACH_PAUSE_SECONDS / 10
        arguments = [*(self._arguments or ())]
        if self._held(arguments):
            return
        self._starts += 1
        if self._child and (directory := self._child.state_dir) and "--state-dir" not in arguments:
            arguments += ["--state-dir", str(directory)]
        environment = {name: value for name, value in os.environ.items() if name != ATTACH}
        try:
            self._child = ChildPeer(arguments, environment, self._quiet, self._run)
        except OSError as error:
            self._next_try = now + 2.0**self._starts
            raise LinkLost(f"a peer cannot be started: {error.strerror or error}") from error

    def _judge_end(self, child: ChildPeer) -> None:
        """Whether the run is over, another peer is to be started, or none any more. Raises `SwarmError` at the join."""
        code = child.code
        if code == 0:
            self._state = State.OVER
            return
        what = f"the peer ended with exit code {code}: {child.last_line() or 'it said nothing'}"
        child.end(0)
        if self._starts == 1 and self._round < 0:
            self._state = State.OVER
            raise SwarmError(what)
        if self._starts < _MAX_STARTS:
            return self._say(f"{what}. Another is started")
        self._say(f"{what}. It was started {self._starts} times: this script trains alone from here on")
        self._close()
        self._state = State.OFF

    def _held(self, arguments: Sequence[str]) -> bool:
        """Whether a peer still runs in the state directory, as that of a killed script does while it leaves."""
        given = os.environ.get("NODE_STATE_DIR", "")
        if "--state-dir" in arguments:
            given = arguments[arguments.index("--state-dir") + 1]
        if not given:
            return False
        directory = Path(given).expanduser()
        with suppress(OSError):
            if (held := hold(directory)) is not None:
                os.close(held)
                return False
            self._say_once(f"a peer runs in {directory} and may be leaving: waiting for its end (attach would use it)")
            return True
        return False

    def _carry_out(self, link: Link, message: dict[str, Any]) -> None:
        if "recipe" in message:
            return self._introduce(link, message)
        if message.get("do") == "refuse":
            return self._refused(message["why"])
        if not len(self._shared.anchor):
            self._map_anchor(link)
        match message.get("do"):
            case "train":
                self._take(message.get("carried"))
                self._begin(message)
                return
            case "evaluate":
                self._take(message.get("carried"))
                kind, value = self._evaluated()
            case "end":
                if message["failed"]:  # its exit code says more
                    self._tell("done", None)
                    return self._drop()
                self._take(message.get("carried"))
                kind, value = "done", None
                self._state = State.OVER
            case other:
                kind, value = "refused", f"a script carries out no command {other!r}"
        self._tell(kind, value)

    def _refused(self, why: str) -> None:
        self._drop()
        self._problem = why
        if not why.startswith("not now"):
            raise SwarmError(why)
        self._say_once(f"the peer does not take this script ({why}): trying again")

    def _introduce(self, link: Link, spec: dict[str, Any]) -> None:
        """Tell the peer what is trained. To a peer that knows no model yet, also give the parameters."""
        self._count_of_all()  # it was trained without a link, or for the last one
        parameters, page = self._parameters, link.descriptors[0]
        if known := spec["layout"]:
            parameters.require(known)
        self._shared = Shared(page, parameters.elements, torch.empty(0))
        if not known:
            parameters.copy_out(self._shared.local, fresh=True)
        self._inner_steps = int(spec["recipe"]["inner_steps"])
        known_as, evaluates = device_name(parameters.device), self._evaluate is not None
        self._tell("done", {"layout": parameters.layout.fragments, "evaluates": evaluates, "device": known_as})
        self._state = State.WAITING

    def _map_anchor(self, link: Link) -> None:
        """Once the peer has written it, which is known by its first command."""
        parameters, shared = self._parameters, self._shared
        shared.anchor = read_only_vector(link.descriptors[1], parameters.elements)
        learner = _ScriptLearner(shared.local, parameters.layout)
        self._training = LocalTraining(learner, self._inner_steps, shared.anchor)

    def _take(self, carried: int | None) -> None:
        if carried is not None:
            self._parameters.copy_in(self._shared.local)
            if self._shared.revoked:  # perhaps before it was copied: of no round, then
                raise LinkLost
            self._training.reset(carried)

    def _begin(self, command: dict[str, Any]) -> None:
        self._round, self._surplus = command["round"], command["surplus"]
        self._optimizer_steps = 0  # those since the last round were taken alone
        if command["begin"]:
            self._training.begin(self._round)
        self._completed, self._next_report, self._mark = self._training.complete, 0.0, time.perf_counter()
        self._tell("progress", as_json(self._training.work()))
        self._state = State.TRAINING

    def _evaluated(self) -> tuple[str, Any]:
        """Loss of the outer parameters by the script's own function, and the parameters as they were."""
        if self._evaluate is None:
            return "refused", "the script gave no function that evaluates"
        parameters, shared = self._parameters, self._shared
        parameters.copy_in(shared.anchor)
        try:
            return "done", self._evaluated_by_all()
        except Exception as error:  # noqa: BLE001 - code of the user, who may raise anything
            self._say_once(f"evaluate failed: {type(error).__name__}: {error}")
            return "refused", f"evaluate failed: {type(error).__name__}"
        finally:
            parameters.copy_in(shared.local)

    def _tell(self, kind: str, value: Any) -> None:
        if self._link is None:
            raise LinkLost
        self._link.send(kind, value)

    def _drop(self) -> None:
        """End the connection. The peer starts the next one from the swarm's state."""
        if self._link:
            self._link.close()
            self._link = None
        if self._state in (State.WAITING, State.TRAINING):
            self._state = State.LOST

    # -- several ranks ------------------------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        """Whether this is the process that talks to the swarm."""
        return self._ranks is None or self._ranks.leads

    def _of_ranks(self, model: nn.Module, extra: Sequence[str] | None, seconds: float) -> Parameters | None:
        """The parameters of a script of several ranks, which from now on act together; None if it is one process."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        from node.library.ranked_parameters import RankedParameters
        from node.library.ranks import Ranks

        self._ranks = ranks = Ranks(seconds)
        try:
            parameters = RankedParameters(ranks, model, extra, self._optimizer)
            if len({*ranks.exchange(self._evaluate is not None)}) > 1:
                raise SwarmError("evaluate is given on some ranks only: give it on all, or on none")
        except BaseException:
            ranks.close()
            raise
        ranks.operations |= {"count": self._share_count, "evaluate": self._share_evaluation}
        return parameters

    def _together(self, call: str, act: Callable[[], StepResult]) -> StepResult:
        """Do it, with several ranks on rank 0: the result, and what this object tells, are the same on all ranks."""
        if (ranks := self._ranks) is None:
            return act()

        def lead() -> dict[str, Any] | None:
            result, before = act(), self._ranks_know
            self._ranks_know = (self._state, self._round)
            if result == StepResult(self._round) and self._ranks_know == before:
                return None
            report = _last_report(self.state_dir) if result.ended else self._report_of_round
            return {"result": asdict(result), "state": self._state.value, "report": report}

        try:
            news = ranks.together(call, lead)
        except BaseException:
            self._ranks_know = None
            if ranks.lost:
                self._close()
            raise
        if news is None:
            return StepResult(self._round)
        result = StepResult(**news["result"])
        self._state, self._round, self._report_of_round = State(news["state"]), result.round, news["report"]
        return result

    def _share_count(self) -> None:
        assert self._ranks
        self._ranks.exchange(self._own_count())

    def _evaluated_by_all(self) -> float:
        """The mean over the ranks: each may have evaluated all held-out data, or an equal part of it."""
        assert self._evaluate
        if self._ranks is None:
            return float(self._evaluate())
        with self._ranks.operation("evaluate"):
            return self._share_evaluation()

    def _share_evaluation(self) -> float:
        assert self._evaluate and self._ranks
        loss, why = math.nan, ""
        try:
            loss = float(self._evaluate())
        except Exception as error:  # noqa: BLE001 - code of the user, who may raise anything
            why = f"{type(error).__name__}: {error}"
        losses: list[float] = self._ranks.exchange(loss, why)
        return sum(losses) / len(losses)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Finish the round under way and leave the run; the model gets the last mean. At most some 20 s.

        A peer that this script only attached to stays in the run, and rests. All ranks of a script call it.
        """
        if self._state is State.OFF or os.getpid() != self._pid or self._leaving:
            return
        self._leaving = True
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            if self._state is not State.OVER and not (self._ranks and self._ranks.lost):
                if self._ranks:
                    self._ranks.limit(LEAVE_SECONDS)
                self._together("leave", lambda: self._finish(deadline))
        except SwarmError as error:
            self._say(str(error))
        finally:
            self._close(deadline)

    def _finish(self, deadline: float) -> StepResult:
        if self._child and self._child.code is None:
            _ask_to_finish(self.state_dir)
            while self._state not in (State.OFF, State.OVER) and time.monotonic() < deadline:
                self._leave_by_turns()
        return StepResult(self._round, True, over=True)

    def _leave_by_turns(self) -> None:
        """As in `step`, but without steps: hand over the work when the peer wants it."""
        if self._child and self._child.code is not None:
            self._state = State.OVER
        elif self._state is State.TRAINING:
            if not self._shared.attention:
                time.sleep(_LOOK_SECONDS / 5)
                return
            self._end_turn(time.monotonic() + _LOOK_SECONDS)
        else:
            self._advance(time.monotonic() + _LOOK_SECONDS)

    def _leave_at_exit(self) -> None:
        if os.getpid() == self._pid:
            with suppress(Exception):
                if self._ranks:  # the others may end at another time
                    self._ranks.close()
                self.leave()

    def _close(self, deadline: float = 0.0) -> None:
        if self._ranks:
            self._ranks.close()
        if self._link:
            self._link.close()
            self._link = None
        if self._child:
            if self._child.code is None and self._state is not State.OVER:
                _ask_to_finish(self.state_dir)
            self._child.end(max(5.0, deadline - time.monotonic()))
        if self._state is not State.OFF:
            self._state = State.OVER
            atexit.unregister(self._leave_at_exit)
            if self._steps_are_seen:
                self._hook.remove()

    # -- what is shown ------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The last round's figures, for a logger of one's own. Empty without a swarm, and before the first round."""
        report = self._report_of_round if self._ranks else _last_report(self.state_dir)
        names = ("round", "held_out_loss", "loss", "tokens", "tokens_per_second", "weight")
        found = {name: report[name] for name in names if isinstance(report.get(name), int | float)}
        if report:
            found["peers"] = len(report.get("peers", ()))
        for group in getattr(self._optimizer, "param_groups", ())[:1]:
            found["learning_rate"] = float(group["lr"])
        return {f"swarm/{name}": float(value) for name, value in found.items() if math.isfinite(value)}

    def _where(self) -> str:
        return f" in {self._child.log}" if self._child and self._quiet else ""

    def _say(self, line: str) -> None:
        if not self._quiet and self._leads:
            print(f"starling: {line}", file=sys.stderr, flush=True)

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._say(line)


class _ScriptLearner:
    """What `LocalTraining` needs of a learner. The script takes the steps, and counts their tokens apart."""

    position = 0

    def __init__(self, vector: Vector, layout: Layout) -> None:
        self.vector, self.layout = vector, layout

    def step(self, round_number: int, step: int) -> Step:
        return Step(math.nan, 0)

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self) -> float:
        return math.nan


def _options(**values: object) -> list[str]:
    return [part for name, value in values.items() if value for part in (f"--{name.replace('_', '-')}", str(value))]


def _toml(run: Mapping[str, Any]) -> str:
    tables = {name: value for name, value in run.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in run.items() if name not in tables]
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _last_report(state_dir: Path | None) -> dict[str, Any]:
    """The last whole line of the peer's `rounds.jsonl`; empty if there is none."""
    if state_dir is not None:
        with suppress(OSError, ValueError, IndexError), (state_dir / "rounds.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_JOURNAL_BYTES))
            report: dict[str, Any] = json.loads(file.read().rpartition(b"\n")[0].splitlines()[-1])
            return report
    return {}


def _shown_on_bar(metrics: Mapping[str, float], before: str) -> str:
    """Show the round on the script's outermost tqdm bar, unless its postfix is the script's own. What is shown now."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    bars = sorted(getattr(tqdm, "_instances", ()), key=lambda bar: abs(bar.pos))
    if not bars or (bars[0].postfix or before) != before:
        return before
    shown = [
        f"{name}={metrics[f'swarm/{name}']:.6g}" for name in ("round", "peers", "loss") if f"swarm/{name}" in metrics
    ]
    bars[0].set_postfix_str(", ".join(shown))
    return str(bars[0].postfix)


def _ask_to_finish(state_dir: Path | None) -> None:
    """Ask the peer to finish its round and leave. It also ends when this script does."""
    if state_dir is None:
        return
    with suppress(OSError, ValueError, TypeError, KeyError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2.0)
        sock.connect(read_json(state_dir / "control.json")["socket"])
        sock.sendall(b'{"do": "finish"}\n')
        sock.recv(1 << 12)
