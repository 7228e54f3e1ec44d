"""Which machine of a cluster this one is: by options, or by the variables of torchrun and Slurm."""

from __future__ import annotations

import pytest

from node.config.launcher import machines_of
from node.config.peer_config import PeerConfig
from node.config.peer_sources import load_peer
from node.config.toml import ConfigError
from tests.support.refusals import one_line

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "gpu-a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NODELIST": "gpu[03-05,09],big1",
}
HAND = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"}


def found(flags: dict[str, object], environment: dict[str, str]) -> tuple[PeerConfig, str]:
    return machines_of(load_peer(flags, {}, None), environment)


@pytest.mark.parametrize(
    "flags, environment, numbers, place",
    [
        ({}, TORCHRUN | SLURM, (1, 0), None),
        ({"nodes": "1"}, SLURM, (1, 0), None),
        ({"nodes": "2", "rendezvous": "10.0.0.5:9000"}, TORCHRUN, (2, 0), "10.0.0.5:9000"),
        ({"nodes": "2", "node": 1, "rendezvous": "[fd00::5]:9000"}, {}, (2, 1), "[fd00::5]:9000"),
        ({"nodes": "auto"}, TORCHRUN | SLURM, (3, 1), "gpu-a:29501"),
        ({"nodes": "auto"}, SLURM, (2, 0), "gpu03:24567"),
        ({"nodes": "auto"}, SLURM | {"SLURM_STEP_NODELIST": "n7.cluster,n8.cluster"}, (2, 0), "n7.cluster:24567"),
        ({"nodes": "auto", "rendezvous": "ib0:9000"}, SLURM, (2, 0), "ib0:9000"),
        ({"nodes": "auto"}, HAND, (2, 1), "10.0.0.5:29500"),
        ({"nodes": "auto"}, SLURM | {"SLURM_NNODES": "1", "SLURM_NTASKS": "1"}, (1, 0), None),
    ],
)
def test_machines_are_given_or_launched(
    flags: dict[str, object], environment: dict[str, str], numbers: tuple[int, int], place: str | None
) -> None:
    config, line = found(flags, environment)
    assert (config.nodes, config.node) == numbers
    assert place is None or config.rendezvous == place
    assert bool(line) == (flags.get("nodes") == "auto" and numbers[0] > 1)


@pytest.mark.parametrize(
    "flags, environment, why",
    [
        ({"nodes": "2"}, {}, "flag --nodes: several machines need --rendezvous HOST:PORT"),
        ({"nodes": "2", "node": 2, "rendezvous": "a:9000"}, {}, "flag --node: the last of 2 machines has number 1"),
        ({"node": 1}, {}, "flag --node: this peer has one machine: also give --nodes"),
        ({"rendezvous": "a:9000"}, {}, "flag --rendezvous: this peer has one machine: also give --nodes"),
        ({"nodes": "auto"}, {}, "flag --nodes: auto takes the numbers of torchrun or Slurm, and neither has started"),
        ({"nodes": "auto"}, SLURM | {"SLURM_NTASKS": "8"}, "Slurm has started several processes on each machine: give"),
        ({"nodes": "auto"}, TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "torchrun has started several processes on each"),
        ({"nodes": "auto"}, TORCHRUN | {"GROUP_RANK": "one"}, "--nodes auto: GROUP_RANK is 'one' and not a number"),
        ({"nodes": "auto"}, SLURM | {"SLURM_NODEID": "2"}, "--nodes auto (Slurm): the last of 2 machines has"),
        ({"nodes": "65"}, {}, "flag --nodes: '65' must be \"auto\" or a whole number from 1 to 64"),
        ({"nodes": "2", "rendezvous": "0.0.0.0:9000"}, {}, "0.0.0.0 means every network: name one address of machine"),
        ({"nodes": "2", "rendezvous": "[::]:9000"}, {}, "[::] means every network: name one address of machine 0"),
        ({"nodes": "2", "rendezvous": "a:80"}, {}, "'a:80' is not HOST:PORT with a port from 1024 to 65535"),
        ({"nodes": "2", "rendezvous": "host"}, {}, "'host' is not HOST:PORT"),
    ],
)
def test_wrong_machines_are_refused(flags: dict[str, object], environment: dict[str, str], why: str) -> None:
    assert why in one_line(ConfigError, found, flags, environment)
