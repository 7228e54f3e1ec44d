"""Machine 0 waits for the others: for each until it is there to begin, and no longer than the limit."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from node.ranks.cluster import ClusterError, gather, listen, send, split
from node.tasks.gpt_presets import GptConfig
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, WorkerSpec
from tests.node.ranks.test_cluster_real import a_rendezvous

SECONDS = 20.0


def spec_of(nodes: int, seconds: float) -> WorkerSpec:
    values, recipe = GptValues(GptConfig(1, 8, 1, 8), 1), Recipe(1, 1, 1e-3, 0.9, 0.5)
    more: dict[str, Any] = {"devices": ("cpu",), "nodes": nodes, "rendezvous": a_rendezvous()}
    return WorkerSpec(values, recipe, 0, meeting_seconds=seconds, **more)


def reached(spec: WorkerSpec) -> socket.socket:
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(split(spec.rendezvous), SECONDS)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


def came(spec: WorkerSpec, number: int) -> socket.socket:
    link = reached(spec)
    send(link, {"node": number, "nodes": spec.nodes, "devices": ["cpu"], "torch": str(torch.__version__)})
    return link


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
def test_machine_that_leaves_before_the_last_comes_is_awaited(resets: bool) -> None:
    spec = spec_of(3, SECONDS)
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, spec)
        first = came(spec, 1)
        if resets:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        first.close()
        with came(spec, 2) as second, came(spec, 1) as again:
            for number, link in ((1, again), (2, second)):
                assert json.loads(link.makefile("rb").readline())["begin"]["machines"]["number"] == number
            machines = gathered.result(SECONDS)
    assert machines.firsts == (0, 1, 2) and machines.names == (spec.rendezvous, "127.0.0.1", "127.0.0.1")
    for each in (*machines.links, machines.listener):
        assert each
        each.close()


def test_connection_that_says_little_does_not_delay_the_end() -> None:
    spec, ended = spec_of(2, 0.5), threading.Event()

    def say_little() -> None:
        with reached(spec) as link, suppress(OSError):
            while not ended.wait(0.1):
                link.sendall(b" ")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(say_little)
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"machine 1 of 2 did not come to .* within 0\.5 s"):
            gather(spec)
        ended.set()
    assert time.monotonic() - began < 2.5


def test_address_of_another_machine_is_refused_in_one_line() -> None:
    with pytest.raises(ClusterError) as refused:
        listen("192.0.2.7:20001")
    why = "Cannot assign requested address)" if sys.platform == "linux" else ""
    assert str(refused.value).startswith(f"machine 0 cannot listen at 192.0.2.7:20001 ({why}")
    assert "while" not in str(refused.value)
