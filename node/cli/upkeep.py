"""Commands about this machine rather than a run: `completion`, `service`, `clean`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from node.cli import options
from node.cli.remote import CommandError, PeerUnreachable
from node.config.peer_config import SETTINGS
from node.config.peer_sources import PREFIX, load_peer
from node.machine.service import Service, service
from node.network.sockets import dead_socket_directories
from node.runtime.locks import hold
from node.runtime.program import NAME, restart_words, typed
from node.storage.statedir import holds_run
from node.ui.control import home

_PLACED = ("bootstrap", "run_id", "new", "state_dir")  # Options of `join` that a service has no use for, or sets itself

_STATE_DIR = "NODE_STATE_DIR"
IDENTITY = "identity.key"

app = typer.Typer()
service_app = typer.Typer(cls=options.CommandGroup, help="Start a peer with this machine (systemd, launchd).")
app.add_typer(service_app, name="service")


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell that shall complete.")],
) -> int:
    """Print a script by which a shell completes commands and options: source <(starling completion bash)."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name=NAME, complete_var=f"_{NAME.upper()}_COMPLETE", shell=shell))
    return 0


# -- service ----------------------------------------------------------------------------------------------------------


@service_app.callback()
def service_commands() -> None:
    """Start a peer with this machine: a unit of systemd for this user, or a job of launchd."""


@service_app.command(context_settings={"ignore_unknown_options": True})  # which are of join, also without `--`
def install(
    ctx: typer.Context,
    join_options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options of join, all but --state-dir.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        options.option(
            None,
            "State directory with the run to continue. Default: the only one that holds a run.",
            metavar="DIR",
            parser=options.path,
            envvar=_STATE_DIR,
        ),
    ] = None,
) -> int:
    """Write the service's file, and print the commands that start it. It starts nothing."""
    try:
        here = Path.cwd()
    except OSError as error:
        raise CommandError(
            f"the present directory cannot be used ({error.strerror}): go to the one in which the peer shall run"
        ) from None
    place, directory = _service(), here / (state_dir or _only_state_dir())
    if not holds_run(directory):
        raise CommandError(f"{directory} holds no run to continue: join once by hand first, then install the service")
    _check_join_options(ctx, join_options or (), directory)
    try:
        command = (*restart_words(), "join", "--state-dir", str(directory), *(join_options or ()))
        content = place.content(command, here)
        if place.file.exists() and place.file.read_bytes() != content:
            raise CommandError(f"{place.file} has other content: look at it, then `{typed('service remove')}`")
        place.file.parent.mkdir(parents=True, exist_ok=True)
        place.file.write_bytes(content)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be written ({error.strerror}): free space, or see to it") from None
    ours = {f"{PREFIX}{key.upper()}" for key in SETTINGS} - {_STATE_DIR}
    if unused := sorted(ours & os.environ.keys()):
        print(f"{', '.join(unused)}: of this shell only, the service will not have that: give options instead")
    print("\n".join((f"wrote {place.file}: nothing is started yet. Start it with", *place.start)))
    return 0


@service_app.command()
def show() -> int:
    """Print the service's file."""
    place = _service()
    try:
        text = place.file.read_text(errors="replace")
    except OSError as error:
        raise PeerUnreachable(
            f"no service ({place.file}: {error.strerror}): write one by `{typed('service install')}`"
        ) from None
    print(f"# {place.file}\n{text}", end="")
    return 0


@service_app.command()
def remove() -> int:
    """Delete the service's file, and print the command that stops what it has started."""
    place, gone = _service(), False
    for file in (place.file, *place.links):
        try:
            file.unlink()
            gone = True
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CommandError(f"{file} cannot be removed ({error.strerror}): see to it") from None
    if not gone:
        print("there is no service to remove")
        return 0
    print("\n".join((f"removed {place.file}. Stop what it has started with", *place.stop)))
    return 0


def _service() -> Service:
    try:
        found = service()
    except (FileNotFoundError, RuntimeError) as error:
        raise CommandError(f"{error}: a service is a file in this user's home directory") from None
    if found is None:
        raise CommandError(
            "neither systemd nor launchd runs this machine, so there is no service to write: "
            f"let the program that does start `{typed('join --state-dir DIR')}`"
        )
    return found


def _only_state_dir() -> Path:
    found = [each for each in sorted(home().glob("peer-*")) if holds_run(each)]
    if not found:
        raise CommandError(f"no state directory in {home()} holds a run to continue: join once by hand first")
    if len(found) > 1:
        shown = " or ".join(map(str, found[:8]))
        raise CommandError(f"{len(found)} state directories hold a run: choose one with --state-dir {shown}")
    return found[0]


def _check_join_options(ctx: typer.Context, given: Sequence[str], directory: Path) -> None:
    """Refuse now what `join` would refuse at each start of the service."""
    root = ctx.find_root()
    join: Any = cast(Any, root.command).get_command(root, "join")
    params: Mapping[str, Any] = join.make_context("join", [*given], parent=root).params
    values = {name: value for name, value in params.items() if value not in (None, (), [])}
    if placed := next((f"--{name.replace('_', '-')}" for name in _PLACED if name in values), ""):
        raise CommandError(f"{placed} has no place in a service, which continues the run of {directory}: leave it out")
    load_peer({name: value for name, value in values.items() if name not in options.OF_RUN}, {}, values.get("run"))


# -- clean ------------------------------------------------------------------------------------------------------------


@app.command()
def clean(
    state_dir: Annotated[
        Path | None,
        options.option(
            None,
            "State directory to clean. Default: all on this machine.",
            metavar="DIR",
            parser=options.path,
            envvar=_STATE_DIR,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete what is listed.")] = False,
) -> int:
    """List what no run needs any more: files of past runs, checkpoints that were put aside, dead sockets."""
    from node.ui.terminal import size

    past = [each for directory in _directories(state_dir) for each in _past(directory)]
    dead = dead_socket_directories()
    for each in (*past, *dead):
        print(f"{size(_bytes(each)):>8}  {each}")
    if not (past or dead):
        print("nothing to delete")
    elif not yes:
        print("nothing is deleted yet: give --yes")
    else:
        _delete(past, dead)
    return 0


def _directories(given: Path | None) -> list[Path]:
    """State directories of no running peer, whose files may just be moving."""
    free = []
    for directory in [given] if given else sorted(home().glob("peer-*")):
        try:
            held = hold(directory)
        except OSError as error:
            raise CommandError(f"{directory} cannot be used ({error.strerror}): give another --state-dir") from None
        if held is None:
            print(f"{directory}: left alone, its peer runs: `{typed('finish')}` first")
            continue
        os.close(held)
        free.append(directory)
    return free


def _past(directory: Path) -> list[Path]:
    """Directories of past runs in a state directory. What may be another's is left alone, and said so."""
    past = directory / "past"
    if not os.path.lexists(past):
        return []
    if not os.path.lexists(directory / IDENTITY):
        why = f"there is no {IDENTITY} beside it, so this is no state directory"
    elif not (why := _not_ours(past)):
        found = {each: _not_ours(each) or _identity(each) for each in sorted(past.iterdir())}
        for each, why in found.items():
            if why:
                print(f"{each}: left alone, {why}")
        return [each for each, why in found.items() if not why]
    print(f"{past}: left alone, {why}")
    return []


def _not_ours(path: Path) -> str:
    """Why this is no directory that a peer has made; empty if it may be one."""
    return "it is a link" if path.is_symlink() else "" if path.is_dir() else "it is no directory"


def _identity(path: Path) -> str:
    key = next(path.rglob(IDENTITY), None)
    return f"{key.parent} holds an identity" if key else ""


def _bytes(path: Path) -> int:
    return sum(each.lstat().st_size for each in (path, *path.rglob("*")) if not each.is_dir())


def _delete(past: Sequence[Path], dead: Sequence[Path]) -> None:
    for each in (*past, *dead):
        try:
            _delete_one(each) if each in past else shutil.rmtree(each)
        except OSError as error:
            raise CommandError(f"{each} cannot be deleted ({error.strerror or error}): see to it") from None
    print("deleted")


def _delete_one(past_run: Path) -> None:
    """By a descriptor: a link that has taken the place of `past` meanwhile is not followed."""
    past = os.open(past_run.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        shutil.rmtree(past_run.name, dir_fd=past)
    finally:
        os.close(past)
