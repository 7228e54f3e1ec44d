"""`python -m tests.sim`: play a protocol over many seeds and judge every run.

The last line of output is one JSON object; with `--json` it is the only line on stdout. After a violation the exit code
is 1, and the command that replays its seed is printed. A run of one seed prints its trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.vectors.codec import CODECS
from protocols.vectors.robust import RULES
from tests.sim.arguments import Parser, at_least_one, seeds
from tests.sim.byzantine.independent import INDEPENDENT_LIES
from tests.sim.families import BREAKING, CALM, FAULTS
from tests.sim.independent_world import world_of
from tests.sim.process import prepare
from tests.sim.scenario import Scenario
from tests.sim.trace import Trace
from tests.sim.world import Outcome, play
from tests.support.checkers import Violation

MAX_VIOLATIONS = 50
MAX_PEERS = 1024
LIES, DIRECTORY, CHAINS = "lies", "directory", "chains"
GROUPS = {"calm": CALM, "breaking": tuple(BREAKING), "all": FAULTS}


def _peers(text: str) -> int:
    if at_least_one(text) > MAX_PEERS:
        raise argparse.ArgumentTypeError(f"at most {MAX_PEERS} peers are played, not {text}")
    return int(text)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m tests.sim", description="Simulated swarms under faults, from seeds.")
    parser.add_argument(
        "--protocol", choices=sorted([*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS]), default="butterfly"
    )
    parser.add_argument("--peers", type=_peers, default=5)
    parser.add_argument("--voters", type=int, default=0, help="in the first roster; the others observe until admitted")
    parser.add_argument("--clusters", action="store_true", help="the others' work counts, through the voters")
    parser.add_argument("--robust", choices=RULES, default="mean", help="the rule by which reducers average")
    parser.add_argument("--rounds", type=at_least_one, default=6)
    parser.add_argument("--seeds", type=seeds, default=range(1), help="one seed, or a range like 0:300")
    parser.add_argument("--faults", choices=(*FAULTS, *GROUPS), default="none", help="a family, or a group of them")
    parser.add_argument("--codec", choices=sorted(CODECS), help="default: the seed decides")
    parser.add_argument("--inner-steps", type=at_least_one, default=10)
    parser.add_argument("--directory", action="store_true", help="Moshpit: in pairs, found in the directory")
    parser.add_argument("--pull", type=float, help="gossip by NoLoCo's rule, with this as its gamma")
    parser.add_argument("--stages", type=at_least_one, default=1, help="of a pipeline: peer i is in stage i mod stages")
    parser.add_argument("--batches", type=at_least_one, default=4, help="microbatches of a step, with stages")
    parser.add_argument("--lookahead", type=int, default=0, help="microbatches of the next step, with stages")
    parser.add_argument("--chains", action="store_true", help="stages pass activations on to each other")
    parser.add_argument("--overlap", action="store_true", dest="overlaps", help="train on while a round averages")
    parser.add_argument("--fragments", type=at_least_one, default=1, help="of the vector, averaged in turn")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object on stdout")
    options = parser.parse_args(arguments)
    try:
        _scenario(options, "none", 0)
    except ValueError as error:
        parser.error(str(error))
    if options.stages > 1 and options.faults == LIES:
        parser.error(f"argument --faults: with stages, nothing is promised under {LIES}")
    if options.faults == LIES and options.protocol not in (*REPLICATED_PROTOCOLS, *INDEPENDENT_LIES):
        parser.error(f"argument --faults: {options.protocol} does not tolerate {LIES}")
    return options


def _scenarios(options: argparse.Namespace) -> Iterable[Scenario]:
    for fault in GROUPS.get(options.faults, (options.faults,)):
        if fault != options.faults and not _felt(fault, options):
            continue  # these seeds would test nothing
        for seed in options.seeds:
            yield _scenario(options, fault, seed)


def _scenario(options: argparse.Namespace, fault: str, seed: int) -> Scenario:
    names = ["protocol", "peers", "rounds", "codec", "inner_steps", "directory", "pull", "stages", "batches"]
    names += ["lookahead", "chains", "overlaps", "fragments", "voters", "clusters", "robust"]
    return Scenario(**{name: getattr(options, name) for name in names}, seed=seed, fault=fault)


def _felt(fault: str, options: argparse.Namespace) -> bool:
    """Whether a fault family tests anything that the others do not, with these options."""
    if fault == LIES and options.stages > 1:
        return False
    if fault == LIES:
        return options.protocol in (*REPLICATED_PROTOCOLS, *INDEPENDENT_LIES)
    if fault == CHAINS:
        return bool(options.chains)
    return fault != DIRECTORY or options.directory  # without directory, these are the faults of `crash`


def replay(scenario: Scenario) -> str:
    codec = f" --codec {scenario.codec}" if scenario.codec else ""
    rest = (" --directory" if scenario.directory else "") + (f" --pull {scenario.pull:g}" if scenario.pull else "")
    if scenario.stages > 1:
        rest += f" --stages {scenario.stages} --batches {scenario.batches} --lookahead {scenario.lookahead}"
    rest += " --chains" * scenario.chains + " --overlap" * scenario.overlaps
    rest += f" --fragments {scenario.fragments}" if scenario.fragments > 1 else ""
    rest += f" --voters {scenario.voters}" * bool(scenario.voters) + " --clusters" * scenario.clusters
    rest += f" --robust {scenario.robust}" * (scenario.robust != "mean")
    return (
        f"python -m tests.sim --protocol {scenario.protocol} --peers {scenario.peers} --rounds {scenario.rounds}"
        f" --seeds {scenario.seed} --faults {scenario.fault} --inner-steps {scenario.inner_steps}{codec}{rest}"
    )


def _committed(outcome: Outcome) -> tuple[int, int]:
    rounds = {name: {r["round"] for r in outcome.reports(name)} for name in ("committed", "alone", "skipped")}
    return len(rounds["committed"] | rounds["alone"]), len(rounds["skipped"])


def _played(scenario: Scenario) -> Outcome:
    try:
        return play(scenario, world_of(scenario.protocol, scenario.stages))
    except Exception as error:  # noqa: BLE001 - any error must be reported with its seed
        traceback.print_exc()
        crash = Violation("crash", "", 0, f"{type(error).__name__}: {error}")
        return Outcome(scenario, {}, [crash], 0.0, Trace(), {})


def _tell(outcome: Outcome, asked: Scenario, single: bool) -> None:
    if outcome.violations or single:
        lines = list(outcome.trace.lines)[-60:] if outcome.violations else list(outcome.trace.lines)[-20:]
        print("\n".join(lines), file=sys.stderr)
    for violation in outcome.violations[:5]:
        print(f"seed {asked.seed}: {violation}", file=sys.stderr)
    if outcome.violations:
        print(f"replay: {replay(asked)}", file=sys.stderr)


def _nothing(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "protocol": options.protocol,
        "peers": options.peers,
        "seeds": f"{options.seeds.start}:{options.seeds.stop}",
        "faults": options.faults,
        "rounds_committed": 0,
        "rounds_skipped": 0,
        "rounds_could_commit": 0,
        "rounds_did_commit": 0,
        "violations": [],
        "virtual_seconds": 0.0,
    }


def _result(asked: Scenario, outcome: Outcome) -> dict[str, Any]:
    committed, skipped = _committed(outcome)
    return {
        "rounds_committed": committed,
        "rounds_skipped": skipped,
        "rounds_could_commit": outcome.rounds_could,
        "rounds_did_commit": outcome.rounds_did,
        "virtual_seconds": outcome.virtual_seconds,
        "violations": [{"seed": asked.seed, "faults": asked.fault, **v.as_dict()} for v in outcome.violations],
    }


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    prepare()
    began = time.monotonic()
    total, played, failed = _nothing(options), 0, 0
    for asked in _scenarios(options):
        outcome = _played(asked)
        for name, value in _result(asked, outcome).items():
            total[name] += value
        del total["violations"][MAX_VIOLATIONS:]
        played += 1
        failed += bool(outcome.violations)
        if failed <= 3 and not options.json:
            _tell(outcome, asked, len(options.seeds) == 1 and options.faults not in GROUPS)
        elif outcome.violations and failed <= 3:
            print(f"replay: {replay(asked)}", file=sys.stderr)
    seconds = time.monotonic() - began
    total["commit_share"] = round(total["rounds_did_commit"] / max(1, total["rounds_could_commit"]), 4)
    total["seeds_per_minute"] = round(60.0 * played / seconds, 1)
    total["real_seconds"] = round(seconds, 3)
    total["virtual_seconds"] = round(total["virtual_seconds"], 3)
    print(json.dumps(total))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
