"""How this program was started: every command that it prints or writes down can be typed again.

`starling …` if it is installed from a wheel, where no module `node` is to be had, or was started by that name; else
`python -m node …`. A peer that `starling swarm` starts says the same as the command that started it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

NAME, MODULE = "starling", "python -m node"
STARTED_AS = "STARLING_STARTED_AS"
ROOT = Path(__file__).parents[2]
"""The directory of the packages `node` and `protocols`, first on the path of every process of a peer."""
IS_INSTALLED = ROOT.name == "code" and ROOT.parent.name == "starling_node"


def program() -> str:
    """What the user types before the name of a command."""
    by_name = IS_INSTALLED or Path(sys.argv[0]).stem == NAME
    given = os.environ.get(STARTED_AS)
    return given if given in (NAME, MODULE) and not IS_INSTALLED else NAME if by_name else MODULE


def typed(command: str) -> str:
    """The whole line of a command of this program, such as `join --page`."""
    return f"{program()} {command}"


def restart_words() -> tuple[str, ...]:
    """The first words of a command that starts this program again, from any directory."""
    for script in (Path(sys.argv[0]).absolute(), Path(sys.executable).with_name(NAME)):
        if script.name == NAME and script.is_file():
            return (str(script),)
    return (sys.executable, "-m", "starling_node" if IS_INSTALLED else "node")


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables by which a Python that imports nothing from the current directory finds this project."""
    paths = filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths), STARTED_AS: program()}


def install(extra: str) -> str:
    """How an extra of pyproject.toml is installed: hf, data or lightning.

    In a checkout it names the folder: the project's plain name on the package index belongs to another project.
    """
    if not IS_INSTALLED:
        return f"run `make install` in Starling's checkout, or there pip install -e '.[{extra}]'"
    return install_package(f"'{NAME}-node[{extra}]'")


def install_package(wanted: str) -> str:
    """The command that installs a package into this program's environment."""
    if not IS_INSTALLED:
        return f"pip install {wanted}"
    return {
        "pipx": f"pipx runpip {NAME}-node install {wanted}",
        "uv": f"uv pip install --python {quote(sys.executable)} {wanted}",
        "pip": f"{quote(sys.executable)} -m pip install {wanted}",
    }[_installer()]


def upgrade() -> str:
    """How this program is brought up to date."""
    if not IS_INSTALLED:
        return "in Starling's checkout run `git pull` and `make install`"
    return {
        "pipx": f"pipx upgrade {NAME}-node",
        "uv": f"uv tool upgrade {NAME}-node",
        "pip": f"{quote(sys.executable)} -m pip install --upgrade {NAME}-node",
    }[_installer()]


def _installer() -> str:
    prefix = Path(sys.prefix).parts
    return "pipx" if "pipx" in prefix else "uv" if "uv" in prefix and "tools" in prefix else "pip"
