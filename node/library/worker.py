"""A script in the place of its peer's worker: it carries out the commands that `node.training.worker` does.

lost       no connection: tries to connect, at most once a second
waiting    the peer has the parameters, and has not said yet what to train from
training   between two rounds: steps are counted, and one word of memory is looked at
over       the run is over, or this peer has left it
alone      there is no peer any more, and there will be none
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from node.library.counter import UNSTEPPED, StepCounter
from node.library.link import Link, LinkLost
from node.library.parameters import Parameters, SwarmError
from node.library.peer import PeerEnded, ScriptPeer
from node.library.shown import Messages
from node.tasks.base import Step
from node.training.shared import Shared, read_only_vector
from node.training.trainer import REPORT_SHARE, LocalTraining, as_json, device_name
from protocols.base import Layout, Vector

if TYPE_CHECKING:  # only a script of several ranks loads its code
    from node.library.ranks import Ranks

LOST_SECONDS = 30.0
"""Longest wait at the end of a round for a peer in place of one that died."""
LOOK_SECONDS = 0.05
_REPORT_SECONDS = 1.0
"""Between two reports of what has been trained so far, at least."""
NOT_FINITE = (
    "what this script has trained is not finite (NaN or infinity), and does not count: the model gets the swarm's "
    "state, but the optimizer's moments may hold it, too. End the script, and start it with a lower learning rate"
)


class State(Enum):
    LOST, WAITING, TRAINING, OVER, ALONE = range(5)


class ScriptWorker:
    """With several ranks, all have one; only that of rank 0 is connected, and the others do their part in `ranks`."""

    def __init__(
        self,
        peer: ScriptPeer,
        parameters: Parameters,
        counter: StepCounter,
        ranks: Ranks | None,
        evaluate: Callable[[], float] | None,
        messages: Messages,
    ) -> None:
        self.state, self.round, self.problem = State.LOST, -1, ""  # why there is no connection
        self._peer, self.parameters, self._counter, self._ranks = peer, parameters, counter, ranks
        self._evaluate, self._messages = evaluate, messages
        self._link: Link | None = None
        self._lost = ""  # why the connection to a peer that had a part of the work was lost
        if ranks:
            ranks.operations |= {"count": self._share_count, "evaluate": self._share_evaluation}

    training: LocalTraining
    _shared: Shared
    _inner_steps: int
    _steps_to_tell: float  # until the inner steps of the round are done, which the peer is told at once
    _surplus: bool  # steps beyond them count, until the round is cut
    _mark: float  # since when steps are to be counted
    _next_report: float

    # -- between two rounds -------------------------------------------------------------------------------------------

    def count(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None) -> bool:
        """Count a step. Whether there is nothing else to do now."""
        if not self._counter.count(tokens, loss):
            self._messages.say_once(UNSTEPPED)
        if self._ranks:
            if self._ranks.leads:
                self._shared.stepped()  # a sign of life
            return False
        self._shared.stepped()
        return self._is_between

    @property
    def _is_between(self) -> bool:
        completes = self._counter.steps >= self._steps_to_tell
        return not (completes or self._shared.attention or time.perf_counter() >= self._next_report)

    @property
    def alone(self) -> bool:
        return self.state is State.ALONE

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def wanted(self) -> bool:
        """Whether the peer waits for the end of the turn."""
        return self._shared.attention

    def report(self, at_once: bool = False) -> bool:
        """Tell the peer of the work so far, seldom enough to cost little. Whether the turn ends with it."""
        if self.state is not State.TRAINING or (self._is_between and not at_once):
            return False
        began, completed = time.perf_counter(), self._counter.steps >= self._steps_to_tell
        self._flush()
        if self.training.due() or completed or at_once:
            self.parameters.copy_out(self._shared.local)
            try:
                self._tell("progress", as_json(self.training.work()))
            except LinkLost:  # the next call connects again
                self.drop()
                return False
        self._mark = time.perf_counter()
        self._next_report = self._mark + max(_REPORT_SECONDS, (self._mark - began) / REPORT_SHARE)
        return self.training.complete and not self._surplus

    def _flush(self) -> None:
        """Add what has been counted, on the device and by all ranks, to the work."""
        tokens, losses = self._count_of_all()
        now = time.perf_counter()
        self.training.take(self._counter.steps, Step(losses / max(1.0, tokens), int(tokens)), now - self._mark)
        self._counter.steps, self._mark = 0, now
        self._steps_to_tell = math.inf if self.training.complete else self.training.steps_left

    def _count_of_all(self) -> tuple[float, float]:
        if not self._ranks:
            return self._counter.take()
        with self._ranks.operation("count"):
            tokens, losses = zip(*self._ranks.exchange(self._counter.take()), strict=True)
        return sum(tokens), sum(losses)

    def _share_count(self) -> None:
        assert self._ranks
        self._ranks.exchange(self._counter.take())

    def end_turn(self, deadline: float) -> None:
        """Hand the work to the peer, and wait for what to train from."""
        self._hand_over("done")
        self.advance(deadline, LOST_SECONDS)

    def hand_over(self) -> None:
        """Leave the work of this part of a round to the peer, which stays."""
        if self.state is State.TRAINING:
            self._hand_over("leaves")

    def _hand_over(self, kind: str) -> None:
        self._flush()
        self.parameters.copy_out(self._shared.local)
        for line in self.parameters.news():
            self._messages.say_once(line)
        if not all(map(math.isfinite, self._shared.local.aminmax())):  # NaN is the least and the largest
            self._messages.say_once(NOT_FINITE)
        try:
            self._tell(kind, as_json(self.training.work()))
            self.state = State.WAITING
        except LinkLost:
            self.drop()

    # -- the peer's commands ------------------------------------------------------------------------------------------

    def advance(self, deadline: float, lost_seconds: float = math.inf) -> None:
        """Carry out commands until there is one to train, the run is over, or the deadline. Looks at least once.

        Without a peer it gives up after `lost_seconds`.
        """
        alone_at = time.monotonic() + lost_seconds
        while self.state in (State.LOST, State.WAITING):
            try:
                if self._link is None:
                    self._link = self._peer.connect(has_joined=self.round >= 0)
                left = deadline - time.monotonic()
                if self._link and (message := self._link.receive(min(4 * LOOK_SECONDS, max(0.0, left)))):
                    self._carry_out(self._link, message)
                    continue
                if self._link:
                    self.problem = ""
            except LinkLost as error:
                self.problem = str(error)
                self.drop()
            except PeerEnded as ended:
                self.state = State.OVER if ended.over else State.ALONE
                return
            now = time.monotonic()
            if self._link:
                alone_at = now + lost_seconds
            if now >= min(deadline, alone_at):
                return
            if self._link is None:
                time.sleep(LOOK_SECONDS)

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
                    return self.drop()
                self._take(message.get("carried"))
                kind, value = "done", None
                self.state = State.OVER
            case other:
                kind, value = "refused", f"a script carries out no command {other!r}"
        self._tell(kind, value)

    def _refused(self, why: str) -> None:
        self.drop()
        self.problem = why
        if not why.startswith("not now"):
            raise SwarmError(why)
        self._messages.say_once(f"waiting: {why.removeprefix('not now: ')}")

    def _introduce(self, link: Link, spec: dict[str, Any]) -> None:
        """Tell the peer what is trained. To a peer that knows no model yet, also give the parameters."""
        self._count_of_all()  # it was trained without a connection, or for the last one
        parameters, page = self.parameters, link.descriptors[0]
        if known := spec["layout"]:
            parameters.require(known)
        self._shared = Shared(page, parameters.elements, torch.empty(0))
        if not known:
            parameters.copy_out(self._shared.local, fresh=True)
        self._inner_steps, self._fragments = int(spec["recipe"]["inner_steps"]), spec["recipe"]["fragments"] or 1
        device, evaluates = device_name(parameters.device), self._evaluate is not None
        self._tell("done", {"layout": parameters.layout.fragments, "evaluates": evaluates, "device": device})
        self.state = State.WAITING

    def _map_anchor(self, link: Link) -> None:
        """Once the peer has written it, which is known by its first command."""
        shared = self._shared
        shared.anchor = read_only_vector(link.descriptors[1], self.parameters.elements)
        learner = _ScriptLearner(shared.local, self.parameters.layout)
        self.training = LocalTraining(learner, self._inner_steps, shared.anchor, self._fragments)

    def _take(self, carried: int | None) -> None:
        if carried is not None:
            self._copy_in_local()
            self.training.reset(carried)

    def _copy_in_local(self) -> None:
        self.parameters.copy_in(self._shared.local)
        if self._shared.revoked:  # perhaps before it was copied: of no round, then
            raise LinkLost

    def _begin(self, command: dict[str, Any]) -> None:
        self.round, self._surplus = command["round"], command["surplus"]
        self._counter.forget()  # what was trained since the last round was trained alone
        if command["begin"]:
            self.training.begin(self.round, command["fragment"])
        self._next_report, self._mark = 0.0, time.perf_counter()
        self._steps_to_tell = math.inf if self.training.complete else self.training.steps_left
        self._tell("progress", as_json(self.training.work()))
        self.state = State.TRAINING
        if self._lost:
            self._messages.say(
                f"{self._lost}: back in the swarm, its state was loaded, and what was trained alone is dropped"
            )
            self._lost = ""

    def _evaluated(self) -> tuple[str, Any]:
        """Loss of the outer parameters by the script's own function, and the parameters as they were."""
        if self._evaluate is None:
            return "refused", "the script gave no function that evaluates"
        try:
            with self._outer_parameters():
                return "done", self._evaluated_by_all()
        except LinkLost:
            raise
        except Exception as error:  # noqa: BLE001 - code of the user, who may raise anything
            self._messages.say_once(f"evaluate failed: {type(error).__name__}: {error}")
            return "refused", f"evaluate failed: {type(error).__name__}"

    @contextmanager
    def _outer_parameters(self) -> Any:
        self.parameters.copy_in(self._shared.anchor)
        try:
            yield
        except BaseException:
            self.parameters.copy_in(self._shared.local)
            raise
        self._copy_in_local()

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

    def _tell(self, kind: str, value: Any) -> None:
        if self._link is None:
            raise LinkLost
        self._link.send(kind, value)

    def drop(self) -> None:
        """End the connection. The peer starts the next one from the swarm's state."""
        is_late = False
        if self._link:
            is_late = hasattr(self, "_shared") and self._shared.revoked
            self._link.close()
            self._link = None
        if self.state in (State.WAITING, State.TRAINING):
            self._lost = "this script took no step for too long" if is_late else "the peer was away"
            self.state = State.LOST


class _ScriptLearner:
    """What `LocalTraining` needs of a learner. The script takes the steps."""

    position = 0

    def __init__(self, vector: Vector, layout: Layout) -> None:
        self.vector, self.layout = vector, layout

    def step(self, round_number: int, step: int) -> Step:
        raise NotImplementedError

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self) -> float:
        return math.nan
