"""`join --node K` on a machine that lends its devices to the peer of machine 0.

It has no identity, no state and no part in the run: it starts ranks (`node.ranks.lent`) for each worker of machine 0,
and waits for the next worker when one has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any

from node.cli.remote import CommandError
from node.config.derived import lent_devices
from node.config.peer_config import PeerConfig
from node.runtime.cgroup import bounded_spin

_RETRY_SECONDS, _CONNECT_SECONDS = 0.5, 5.0


def lend(config: PeerConfig, task: str) -> int:
    """`task`: the user's own task that this machine's user agrees to run; empty: none."""
    os.environ.update(bounded_spin(os.environ))  # OpenMP reads it when PyTorch is loaded
    from node.runtime.fork_server import ForkServer

    ForkServer.begin()
    devices = lent_devices(config)  # not earlier, because it asks for GPUs
    return asyncio.run(_lend(config, task, devices))


async def _lend(config: PeerConfig, task: str, devices: tuple[str, ...]) -> int:
    import torch

    from node.ranks.lent import DECLINED, OVER, REFUSED

    me = f"machine {config.node} of {config.nodes}"
    hello: dict[str, Any] = {
        "node": config.node,
        "nodes": config.nodes,
        "devices": devices,
        "torch": str(torch.__version__),
    }
    _say(f"{me} lends {', '.join(devices)} to the peer of machine 0, at {config.rendezvous}; Ctrl-C ends it")
    _say("devices, data, model, template, task, threads and nice are this machine's; all else given is machine 0's")
    while True:
        with await _reach(config) as link:
            code = await _ranks(config, task, devices, link, hello)
        if code == OVER:
            return 0
        if code == REFUSED:
            raise CommandError(f"machine 0 has refused {me}")
        if code == DECLINED:
            raise CommandError(f"{me} does not take part in this run")
        what = "its ranks have failed" if code > 0 else f"its first rank was killed by signal {-code}"
        what = what if code else "machine 0's worker has ended"
        _say(f"{me}: {what}; waiting up to {config.rendezvous_timeout_seconds:g} s for the next worker of machine 0")


async def _reach(config: PeerConfig) -> socket.socket:
    """A connection to machine 0's next worker."""
    from node.ranks.cluster import keep_alive, split

    assert config.rendezvous
    host, port = split(config.rendezvous)
    loop, why = asyncio.get_running_loop(), "no answer"
    end = loop.time() + config.rendezvous_timeout_seconds
    while loop.time() < end:
        await asyncio.sleep(_RETRY_SECONDS)
        try:
            link = await asyncio.to_thread(socket.create_connection, (host, port), _CONNECT_SECONDS)
        except OSError as error:
            why = error.strerror or str(error)
            continue
        keep_alive(link)
        link.settimeout(None)
        return link
    raise CommandError(
        f"machine 0 was not at {config.rendezvous} for {config.rendezvous_timeout_seconds:g} s ({why}): is its peer "
        "running, and its port open? --rendezvous-timeout sets this limit"
    )


async def _ranks(
    config: PeerConfig, task: str, devices: tuple[str, ...], link: socket.socket, hello: dict[str, Any]
) -> int:
    """Be this machine's ranks of one worker; returns the exit code of their process."""
    from node.ranks.cluster import send
    from node.runtime.child_process import ChildProcess

    with suppress(OSError):  # then the ranks find the connection closed
        send(link, hello)
    own = {
        "devices": devices,
        "task": task,
        "data": str(config.data.absolute()) if config.data else "",
        "model": config.model or "",
        "template": str(config.template.absolute()) if config.template else "",
        "threads": 0 if config.threads == "auto" else config.threads,
        "nice": config.nice,
    }
    command = (sys.executable, "-P", "-m", "node.ranks.lent", str(link.fileno()), json.dumps(own))
    child = await ChildProcess.start("ranks", command, _print, bounded_spin(os.environ), (link.fileno(),), 1000, True)
    try:
        await child.ended()
    finally:
        await child.kill()
    return child.code or 0


def _print(line: str | None) -> None:
    if line:
        print(line, file=sys.stderr, flush=True)


def _say(line: str) -> None:
    _print(f"starling: {line}")
