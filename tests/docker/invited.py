"""The profile `private` of docker/compose.yaml: a private run, whose guests join by a ticket in a file.

Two guests are admitted by one ticket. A stranger with the founder's address alone is refused. One guest is removed, and
its container ends; the others go on. After each case all that are left must be in one mean that began after it.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from node.membership.pass_exchange import PRIVATE
from tests.docker import verdict
from tests.docker.cases import Cases
from tests.docker.engine import Engine
from tests.docker.staged import Play
from tests.docker.swarm import FOUNDER, POLL_SECONDS, Swarm
from tests.support.real_swarm import wait

GUESTS = ("guest-1", "guest-2")
UP_SECONDS = TOGETHER_SECONDS = 120.0
COMMAND_SECONDS = REFUSED_SECONDS = 60.0
REMOVED_SECONDS = 15.0
REFUSED = 2  # exit code
ADDRESSES = "/addresses/founder"
RUN = """name = "docker-test-private"
admission = "invited"
[recipe]
rounds = 10000
inner_steps = 10
[gpt]
preset = "w64"
"""


def plays(engine: Engine, variables: Mapping[str, str], place: Path, say: Callable[[str], None]) -> Iterator[Play]:
    home = place / "private"
    tickets = home / "tickets"
    tickets.mkdir(parents=True)
    (home / "private.toml").write_text(RUN)
    variables = {**variables, "RUN_FILE": str(home / "private.toml"), "TICKETS": str(tickets), "WAIT_FOR": "1"}
    swarm = Swarm(engine, f"starling-private-{uuid.uuid4().hex[:8]}", variables, home, profile="private")
    try:
        cases = PrivateCases(swarm, say)
        cases.up(tickets / "guests")
        calm = time.time()
        for case in (cases.refuse_a_stranger, cases.remove_a_guest):
            if not cases.struck[-1].failed:
                case()
        failed = swarm.privileges()
        leaving, _ = cases.leave()
        swarm.keep_logs()
        recorded = verdict.play(swarm, cases.events, cases.struck, (calm, calm), leaving)
        judged = verdict.judged(recorded, swarm, cases.struck, swarm.home / "timeline.txt", say)
        yield Play(verdict.cases(cases.struck), failed + verdict.broken(judged))
    finally:
        swarm.remove()


class PrivateCases(Cases):
    def up(self, ticket: Path) -> None:  # type: ignore[override]
        swarm = self._swarm
        with self._case(f"private: {len(GUESTS)} guests with one ticket", UP_SECONDS) as case:
            swarm.launch(FOUNDER, count=1)
            ticket.write_text(wait("the founder makes a ticket", self._ticket, COMMAND_SECONDS, 1.0))
            case.over = swarm.launch("--no-deps", *GUESTS, count=1 + len(GUESTS))
            case.targets = tuple(swarm.names)
            self._tell("start", "compose up", *case.targets, at=case.over)

    def _ticket(self) -> str:
        """Empty as long as the founder has not begun its run."""
        try:
            return self._at_founder("invite", "--uses", str(len(GUESTS)))
        except subprocess.SubprocessError:
            return ""

    def _at_founder(self, *command: str) -> str:
        words = ("exec", "-T", FOUNDER, "python", "-m", "node", *command)
        return self._swarm.compose(*words, seconds=COMMAND_SECONDS)

    def refuse_a_stranger(self) -> None:
        swarm = self._swarm
        with self._case("private: a stranger is refused", TOGETHER_SECONDS) as case:
            case.over = time.time()
            address = swarm.compose("exec", "-T", FOUNDER, "cat", ADDRESSES, seconds=COMMAND_SECONDS).split()[0]
            name, image = f"{swarm.project}_stranger", swarm.variables["STARLING_IMAGE"]
            words = ("run", "--name", name, "--network", f"{swarm.project}_default", image)
            try:
                swarm.engine.run(*words, "join", "--bootstrap", address, "--no-nat", seconds=REFUSED_SECONDS)
                case.failed.append("a stranger takes part")
            except subprocess.CalledProcessError as error:
                if error.returncode != REFUSED or PRIVATE not in error.stderr:
                    case.failed.append(f"a stranger ends with {error.returncode}: {error.stderr[-200:]}")
            except subprocess.TimeoutExpired:
                case.failed.append(f"a stranger is not refused within {REFUSED_SECONDS:g} s")
            finally:
                swarm.engine.run("rm", "--force", "--volumes", name)

    def remove_a_guest(self) -> None:
        """The engine would start its container again and again, and it would be refused each time."""
        swarm, guest = self._swarm, GUESTS[0]
        with self._case("private: a guest is removed", TOGETHER_SECONDS, guest) as case:
            swarm.engine.run("update", "--restart", "no", swarm.container(guest))
            swarm.expect([guest], REFUSED)
            self._at_founder("revoke", swarm.peer(guest).id)
            removed = self._tell("fault", "removed by the founder", guest)
            wait(f"{guest} has left", lambda: guest not in swarm.names, REMOVED_SECONDS, POLL_SECONDS)
            case.figures["next_round_seconds"] = self._next_round(removed, guest)
            case.over = removed
