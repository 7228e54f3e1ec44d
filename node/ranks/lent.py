"""The ranks of a machine that lends its devices to a peer on another one: this process is the first of them.

python -m node.ranks.lent SOCKET SETTINGS      # an inherited connection to machine 0's worker; JSON

It passes the group's commands on to the other ranks of its machine, and ends with the connection. `node.cli.lend`
starts it for each worker of machine 0.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from node.ranks.cluster import Machines, send
from node.ranks.group import RankGroup, run_to_end
from node.ranks.worker import be_rank, with_windows
from node.runtime.notes import be_quiet
from node.tasks.hf.settings import HfValues
from node.tasks.spec import OwnValues, WorkerSpec
from node.training import shared
from node.training.failure import write_where_it_stands
from node.training.worker import MAX_LINE_BYTES

REFUSED, OVER, DECLINED = 3, 4, 5
"""Exit codes: machine 0 has refused this machine; the peer has ended; this machine's user has not agreed to the run."""


def main(arguments: list[str]) -> int:
    write_where_it_stands()
    with socket.socket(fileno=int(arguments[0])) as link:
        return _serve(link, json.loads(arguments[1]))


def _serve(link: socket.socket, own: dict[str, Any]) -> int:
    ((word, value),) = json.loads(_line(link) or '{"gone": ""}').items()
    if word != "begin":
        print(value, file=sys.stderr, flush=True)
        return {"refused": REFUSED, "over": OVER}.get(word, 0)
    spec = with_windows(spec_here(WorkerSpec.from_json(value["spec"]), own))
    if isinstance(spec.values, OwnValues) and spec.values.name != own["task"]:
        why = f"the user of a machine that lends its devices has to agree to its code by --task {spec.values.name}"
        send(link, {"refused": f"this run trains a user's own task: {why}"})
        _say(why)
        return DECLINED
    machines = Machines.joined(value["machines"], link)
    torch.set_num_threads(spec.threads)
    be_quiet()
    run = partial(be_rank, spec, own_data=bool(own["data"]))
    group = RankGroup.fork(machines, shared.create(), run)

    def fail(word: str, why: str) -> None:
        _say(why)
        send(link, {word: why})

    if group.machines.here > 1:
        group.watch(fail)
    threading.Thread(target=_end_with, args=(link,), name="machine 0", daemon=True).start()
    return run_to_end(group, link, run)


def _say(line: str) -> None:
    print(f"starling: {line}", file=sys.stderr, flush=True)


def _line(link: socket.socket) -> bytes:
    """The first line, and nothing after it."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES and (each := link.recv(1)):
        line += each
    return bytes(line) if line.endswith(b"\n") else b""


def _end_with(link: socket.socket) -> None:
    """End with the connection also during a collective, which would wait for ranks that are gone."""
    poll = select.poll()
    poll.register(link, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(0)


def spec_here(spec: WorkerSpec, own: dict[str, Any]) -> WorkerSpec:
    """Machine 0's specification with this machine's own devices and paths, where it has them."""
    devices = tuple(own["devices"])
    values, data = spec.values, Path(own["data"]) if own["data"] else spec.data
    if isinstance(values, HfValues):
        machine = values.machine
        machine = replace(machine, model=own["model"] or machine.model, template=own["template"] or machine.template)
        values = replace(values, machine=machine)
    usable = replace(spec, threads=own["threads"], peers_here=1).thread_count()
    return replace(
        spec,
        values=values,
        devices=devices,
        device=devices[0],
        data=data,
        record=None,
        windows=None,
        threads=max(1, usable // len(devices)),
        nice=own["nice"],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
