"""The machines of one peer, from what the user says or from the variables of torchrun or Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from node.config.peer_config import PeerConfig
from node.config.toml import ConfigError

SLURM_PORTS = 20_000, 10_000
"""Under Slurm the port follows from the job's number: the first one, and how many there are."""


def machines_of(config: PeerConfig, environment: Mapping[str, str]) -> tuple[PeerConfig, str]:
    """With plain numbers for `nodes` and `node`, and a line that says where they come from, if not from the user.

    Raises ConfigError if they do not fit each other.
    """
    line = ""
    if config.nodes == "auto":
        config, source = _launched(config, environment)
        line = f"machine {config.node} of {config.nodes}, which meet at {config.rendezvous} (from {source})"
    if not isinstance(config.nodes, int) or config.nodes == 1:
        for key in ("node", "rendezvous"):
            if getattr(config, key) and not line:
                raise ConfigError(f"{config.origins[key]}: this peer has one machine: also give --nodes", key)
        return config, ""
    if config.node >= config.nodes:
        raise ConfigError(
            f"{config.origins['node']}: the last of {config.nodes} machines has number {config.nodes - 1}",
            "node",
        )
    if not config.rendezvous:
        raise ConfigError(
            f"{config.origins['nodes']}: several machines need --rendezvous HOST:PORT, an address of machine 0 that "
            "the others reach",
            "rendezvous",
        )
    return config, line


def _launched(config: PeerConfig, environment: Mapping[str, str]) -> tuple[PeerConfig, str]:
    if "GROUP_RANK" in environment and "MASTER_ADDR" in environment:
        # the store of torchrun itself may be at its port
        place = f"{environment['MASTER_ADDR']}:{_number(environment, 'MASTER_PORT') + 1}"
        nodes, node = _number(environment, "GROUP_WORLD_SIZE"), _number(environment, "GROUP_RANK")
        several, source = _number(environment, "LOCAL_WORLD_SIZE") > 1, "torchrun"
        remedy = "--nproc-per-node 1"
    elif "SLURM_NODEID" in environment:
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        first, count = SLURM_PORTS
        place = f"{_first_host(hosts)}:{first + _number(environment, 'SLURM_JOB_ID') % count}"
        nodes, node = _number(environment, "SLURM_NNODES"), _number(environment, "SLURM_NODEID")
        several, source = _number(environment, "SLURM_NTASKS") > nodes, "Slurm"
        remedy = "--ntasks-per-node=1"
    elif "NODE_RANK" in environment and "MASTER_ADDR" in environment:
        place = f"{environment['MASTER_ADDR']}:{_number(environment, 'MASTER_PORT')}"
        nodes, node = _number(environment, "NNODES"), _number(environment, "NODE_RANK")
        several, source, remedy = False, "NODE_RANK, NNODES, MASTER_ADDR and MASTER_PORT", ""
    else:
        raise ConfigError(
            f"{config.origins['nodes']}: auto takes the numbers of torchrun or Slurm, and neither has started this: "
            "give --nodes N --node K --rendezvous HOST:PORT",
            "nodes",
        )
    if several:
        raise ConfigError(f"{source} has started several processes on each machine: give it {remedy}", "nodes")
    origins = {**config.origins, "node": f"--nodes auto ({source})"}
    return replace(config, nodes=nodes, node=node, rendezvous=config.rendezvous or place, origins=origins), source


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"--nodes auto: {name} is {text[:40]!r} and not a number: give --nodes, --node, --rendezvous")
    return int(text)


def _first_host(names: str) -> str:
    """Of Slurm's list of nodes, such as gpu[03-05,09],big1."""
    found = re.match(r"([\w.-]+)(?:\[(\w+)[^\]]*\]([\w.-]*))?", names)
    return "".join(filter(None, found.groups())) if found else "localhost"
