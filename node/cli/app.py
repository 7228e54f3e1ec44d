"""The commands `join` and `swarm`, and the program's entry point.

Each command imports heavy modules when it runs: `--help` and `status` do not wait for PyTorch. A command that cannot be
carried out prints one line to stderr.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from node._version import VERSION
from node.cli import doctor, local, options, planning, private_runs, remote, upkeep
from node.cli.private_runs import given_ticket, require_alone, require_good
from node.cli.remote import CommandError
from node.config.launcher import machines_of
from node.config.peer_config import RUN, SETTINGS, PeerConfig, option_name
from node.config.peer_sources import apply_saved, load_peer
from node.config.run_config import RunConfig, load_run
from node.config.toml import ConfigError, plain, read_toml
from node.membership.invitations import Ticket
from node.reporting.status import printable, to_json
from node.runtime.identity import load
from node.runtime.locks import LocksUnsupported
from node.runtime.program import program, typed
from node.session.fatal import FatalPeerError, NotInvited
from node.session.shutdown import exit_on_signal, run_peer
from node.storage.statedir import holds_run, is_over
from node.tasks.hf.settings import ModelError
from node.tasks.name import HUGGING_FACE, LOOP, is_own
from node.ui.control import claimed
from node.ui.encoding import prepare_streams
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS

_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors of a full disk under stdout, and of a terminal that was closed."""

EXAMPLES = f"""\
{typed("join --nickname anna --page"):53}# start a run
{typed("join --bootstrap ADDR --run-id HEX"):53}# join it elsewhere
{typed("join --hours sat-sun --upload-limit 1"):53}# resume, within limits"""

app = typer.Typer(cls=options.CommandGroup, pretty_exceptions_enable=False)
app.add_typer(remote.app)
app.add_typer(doctor.app)
app.add_typer(planning.app)
app.add_typer(local.app)
app.add_typer(private_runs.app)
app.add_typer(upkeep.app)


@app.callback(invoke_without_command=True)
def starling(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Train one model together with other machines, over ordinary internet links."""
    if version:
        typer.echo(f"starling {VERSION}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(cls=options.JoinCommand, epilog=EXAMPLES)
@options.with_settings
def join(
    ctx: typer.Context,
    *,
    ticket: options.TicketArgument = None,
    ticket_file: options.TicketFileOption = None,
    run: options.RunFileOption = None,
    private: options.PrivateOption = None,
    task: options.TaskOption = None,
    protocol: options.ProtocolOption = None,
    stages: options.StagesOption = None,
    train: options.TrainOption = None,
    lora: options.LoraOption = None,
    inner: options.InnerOption = None,
    **of_machine: Any,
) -> int:
    """Start a run, resume one, or join one by a ticket or an address. Ctrl-C finishes the round and leaves."""
    gc.disable()  # it would take a fifth of the time in which modules are loaded; `run_peer` turns it on again
    try:
        with exit_on_signal():
            given = {name: value for name, value in ctx.params.items() if value not in (None, (), [])}
            of_run = {name: given.pop(name) for name in options.OF_RUN if name in given}
            typed_in, file = given.pop("ticket", None), given.pop("ticket_file", None)
            ticket_given = given_ticket(typed_in, file, os.environ, [*given, *of_run])
            return _join(given, of_run, ticket_given)
    finally:
        gc.enable()


@app.command()
def swarm(
    *,
    peers: Annotated[
        int, typer.Option(min=1, max=32, metavar="N", help="Number of peers, each with processes of its own.")
    ] = 4,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of rounds in the run.", show_default=False)
    ] = None,
    protocol: options.ProtocolOption = None,
    stages: options.StagesOption = None,
    task: Annotated[
        str | None,
        options.option(
            RUN,
            "What the swarm trains: gpt (the default), paced, hf, or your own as module:factory.",
            metavar="NAME",
        ),
    ] = None,
    inner: options.InnerOption = None,
    run: options.RunFileOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Where all peers train: auto, cpu, cuda or mps. Default: auto.", show_default=False
        ),
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for the peers' state directories and logs. Default: a new one in the temporary directory.",
            parser=options.path,
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Serve a web page of the first peer, on this machine only.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object at the end.")] = False,
) -> int:
    """Run a whole swarm on this machine, and check at the end that all peers agree."""
    with exit_on_signal():
        from node.cli.swarm_command import LocalSwarm, swarm_directory

        of_run = {"run": run, "task": task, "protocol": protocol, "stages": stages, "inner": inner}
        if device:  # refused before anything is started
            load_peer({"device": device}, os.environ, run)
        stages = _check(of_run, rounds) if any(of_run.values()) else 1  # before anything is started
        if peers < stages:
            raise CommandError(f"{stages} stages need as many peers, not {peers}: give --peers {stages} or more")
        return LocalSwarm(
            swarm_directory(dir),
            peers=peers,
            stages=stages,
            run=run,
            device=device,
            founder_options={"--rounds": rounds, "--protocol": protocol, "--task": task, "--inner": inner},
            page=page,
            as_json=json,
        ).run_to_end()


# -- join -------------------------------------------------------------------------------------------------------------


def _join(of_machine: Mapping[str, Any], of_run: Mapping[str, Any], ticket: Ticket | None = None) -> int:
    config, line = machines_of(load_peer(of_machine, os.environ, of_run.get("run")), os.environ)
    if line:
        print(f"starling: {line}", file=sys.stderr)
    if ticket:
        require_alone(config)
    if config.node:
        from node.cli.lend import lend

        return lend(config, str(of_run.get("task", "")))
    with _claim_state_dir(config.state_dir) as state_dir:
        config, lines = apply_saved(replace(config, state_dir=state_dir), state_dir)
        if ticket:
            require_good(ticket, state_dir)
            config = replace(config, bootstrap=ticket.addresses, run_id=ticket.run.hex())
        for line in lines:
            print(f"starling: {line}", file=sys.stderr)
        config, run = _resolve_run(config, of_run, state_dir, "a ticket" if ticket else "--bootstrap")
        lost = [option_name(key) for key in of_machine if SETTINGS[key].only_hf]
        if run is not None and lost and "run" not in of_run and of_run.get("task") != HUGGING_FACE:
            raise CommandError(f"{lost[0]} is for --task hf: add that, or leave this out")
        try:
            return run_peer(config, run, ticket)
        except NotInvited:
            own = load(state_dir / "identity.key").peer_id
            print(f"starling: this peer is {own}; its identity stays in {state_dir}", file=sys.stderr)
            raise
        finally:
            if config.nodes != 1 and config.rendezvous:
                from node.ranks.cluster import say_over

                say_over(config.rendezvous)


@contextmanager
def _claim_state_dir(state_dir: Path | None) -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(claimed(state_dir))
        except BlockingIOError as error:
            raise CommandError(f"{error}: give another --state-dir, or leave it out to use a free one") from None
        except LocksUnsupported as error:
            raise CommandError(
                f"the file system of {error.filename} has no locks, by which a peer keeps others out of its state "
                "directory: give one on a local disk with --state-dir"
            ) from None
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.filename else error
            raise CommandError(
                f"cannot use a state directory ({why}): give a writable directory with --state-dir"
            ) from None
        yield directory


def _resolve_run(
    config: PeerConfig, of_run: Mapping[str, Any], state_dir: Path, joins_by: str
) -> tuple[PeerConfig, RunConfig | None]:
    """The run to start; None if the peer joins a swarm's run, or resumes the one in its directory.

    `of_run` are options that describe a run to start: a joiner cannot set them. A run that is given together with a
    directory that holds one has to be the same run.
    """
    given = " and ".join(f"--{name}" for name in of_run)
    if config.bootstrap:
        task = of_run.get("task", "")
        if [*of_run] == ["task"] and (is_own(task) or task == HUGGING_FACE):  # consent: it does not set the task
            return replace(config, consent=of_run["task"]), None
        if of_run:
            raise CommandError(
                f"{given} cannot be given with {joins_by}: the swarm decides all settings of the run; "
                "set this machine's settings by options or by NODE_* variables"
            )
        return config, None
    held, over = not config.new and holds_run(state_dir), not config.new and is_over(state_dir)
    if not of_run and (held or (over and config.rounds is None)):
        return config, None
    if config.run_id and not held:
        raise CommandError(
            f"{state_dir} holds no run to resume: to join run {config.run_id[:12]}, give the address of one of its "
            "peers with --bootstrap; to start a new run, leave --run-id out"
        )
    file = read_toml(of_run["run"]) if config.own_loop and "run" in of_run else {}
    if config.own_loop and "task" not in {*of_run, *file}:
        of_run = {**of_run, "task": LOOP}
    run = _load_run(of_run, config.rounds)
    if config.own_loop and run.hf:
        raise CommandError("a run of a model of Hugging Face is started by a peer that has it: leave out --own-loop")
    return replace(config, rounds=None), run


def _load_run(of_run: Mapping[str, Any], rounds: int | None) -> RunConfig:
    overrides = {name: of_run.get(name) for name in ("task", "protocol", "stages")} | {
        "admission": "invited" if of_run.get("private") else None,
        "recipe.rounds": rounds,
        "recipe.inner_optimizer": of_run.get("inner"),
        "hf.train": of_run.get("train") or ("lora" if "lora" in of_run else None),
        "hf.lora_rank": of_run.get("lora"),
    }
    if (overrides["hf.train"] is not None) and of_run.get("task") != HUGGING_FACE and not of_run.get("run"):
        raise CommandError("--lora and --train are for --task hf")
    if "lora" in of_run and overrides["hf.train"] == "full":
        raise CommandError("--lora trains adapters, --train full the whole model: give one of them")
    return load_run(of_run.get("run"), overrides, (*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS))


def _check(of_run: Mapping[str, Any], rounds: int | None) -> int:
    """Check the configuration that a swarm's peers will get; return its number of stages."""
    mine, run = load_peer({}, os.environ, of_run["run"]), _load_run(of_run, rounds)
    if run.hf and mine.model is None:
        raise CommandError("task hf needs a model: name it by the variable NODE_MODEL, or by model in [peer]")
    return run.stages


# -- the entry point --------------------------------------------------------------------------------------------------


_OF_JOIN = ("join", "service")  # whose --json asks for lines, which are reports


def _refusal(words: Sequence[str]) -> Callable[..., int]:
    """What says why a command failed: a line and, if `words` ask for an object, that, with `error` in it."""
    own = words[: words.index("--")] if "--" in words else words
    as_json = "--json" in own and own[0] not in _OF_JOIN

    def refused(why: str, code: int, found: Mapping[str, object] | None = None) -> int:
        line = printable(why, 2000)
        with suppress(OSError):
            print(f"starling: {line}", file=sys.stderr)
        if as_json:
            with suppress(OSError):
                print(to_json({**(found or {}), "code": code, "error": line}), flush=True)
        return code

    return refused


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    prepare_streams()
    refused = _refusal(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(arguments, prog_name=program(), standalone_mode=False)
        sys.stdout.flush()
    except FatalPeerError as error:
        return refused(str(error), error.code)
    except (ConfigError, ModelError) as error:
        return refused(str(error), 2)
    except typer.TyperException as error:
        text = error.format_message()
        if isinstance(error, CommandError):
            return refused(text, error.exit_code, error.found)
        return refused(plain(text), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has left (`| head`): leave nothing that Python would flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename:
            raise
        return refused(f"the output cannot be written ({error.strerror}): give another", 1)
    return int(code or 0)
