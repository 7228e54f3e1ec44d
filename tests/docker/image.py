"""The image under test: its base, its wheels, its build, and the checks of its content."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.docker.engine import Engine, NotHere
from tests.support.paths import REPOSITORY

MOST_BYTES = 1_100_000_000
_USUAL_BASE, _OWN_BASE = "python:3.11-slim-bookworm", "starling-base:bookworm"
_SUITE, _PACKAGES = "bookworm", "python3,python3-venv,ca-certificates"
_UNUSED = ("var/cache/apt/archives/*.deb", "var/cache/apt/*.bin", "var/lib/apt/lists/*", "usr/share/doc/*",
           "usr/share/man/*", "usr/share/locale/*")  # fmt: skip
_PULL_SECONDS, _BASE_SECONDS, _WHEELS_SECONDS, _BUILD_SECONDS = 60.0, 600.0, 600.0, 1800.0
_SOURCES = ("pyproject.toml", "constraints.txt", "LICENSE", ".dockerignore", "node", "protocols",
            "starling_node", "docker")  # fmt: skip
_LOOK = (
    "ls -d /wheels /build /root/.config/pip /root/.cache/pip /etc/pip.conf 2>/dev/null; "
    "env | grep -E '^(PIP_|.*_CERT|.*PROXY)'; find /opt /root /home /state /tmp /var -name '*.whl' 2>/dev/null; "
    "python3 -m pip --version 2>/dev/null; exit 0"
)
"""A shell command that prints what the image should not hold."""


def base(engine: Engine, given: str, home: Path) -> str:
    """The given image, the usual one, or one made from Debian's packages if that is not available."""
    if given:
        if _has(engine, given) or _pulled(engine, given):
            return given
        raise NotHere(f"BASE {given} is neither here nor can it be pulled")
    if _has(engine, _USUAL_BASE) or (
        not engine.own and _pulled(engine, _USUAL_BASE)
    ):  # an engine of the test cannot reach a registry
        return _USUAL_BASE
    if not _has(engine, _OWN_BASE):
        _debootstrap(engine, home / "base")
    return _OWN_BASE


def _has(engine: Engine, image: str) -> bool:
    return bool(engine.run("image", "ls", "--quiet", image).strip())


def _pulled(engine: Engine, image: str) -> bool:
    try:
        engine.run("pull", "--quiet", image, seconds=_PULL_SECONDS)
    except subprocess.SubprocessError:
        return False
    return True


def _debootstrap(engine: Engine, root: Path) -> None:
    if not shutil.which("debootstrap"):
        raise NotHere(f"{_USUAL_BASE} cannot be pulled, and there is no debootstrap to make a base with: give BASE")
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(root)]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BASE_SECONDS, check=True)
        excluded = [f"--exclude=./{each}" for each in _UNUSED]
        with subprocess.Popen(["tar", "-C", str(root), "-c", *excluded, "."], stdout=subprocess.PIPE) as tar:
            engine.run("import", "-", _OWN_BASE, seconds=_BASE_SECONDS, stdin=tar.stdout)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stdout", b"") or b"").decode(errors="replace").strip().splitlines()
        raise NotHere(f"no base can be made of Debian's packages: {said[-1] if said else error}") from None
    finally:
        shutil.rmtree(root, ignore_errors=True)


def pip_arguments(engine: Engine, base: str, given: str | None, context: Path) -> str | None:
    """The arguments of pip in the build: the given ones, or those for wheels that are now put into the context.

    None, which means the Dockerfile's own arguments, if this Python's version differs from that of the base.
    """
    if given is not None:
        return given
    version = "import sys; print(*sys.version_info[:2])"
    theirs = engine.run("run", "--rm", "--network=none", "--entrypoint=python3", base, "-c", version).split()
    if theirs != [str(each) for each in sys.version_info[:2]]:
        return None
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    needed = project["dependencies"]
    pinned = (REPOSITORY / "constraints.txt").read_text().splitlines()
    torch = next(line for line in pinned if line.startswith("torch=="))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(context / "docker" / "wheels")]
    command += ["--constraint", str(REPOSITORY / "constraints.txt"), torch, *needed]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_WHEELS_SECONDS, check=True)
    return "--no-index --find-links /wheels"


def context(place: Path) -> Path:
    """A copy, so that nothing is written into the repository."""
    place.mkdir()
    for name in _SOURCES:
        source, target = REPOSITORY / name, place / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.whl", ".env"))
        else:
            shutil.copy2(source, target)
    return place


def build(engine: Engine, tag: str, base: str, pip_arguments: str | None, place: Path) -> float:
    arguments = {"BASE": base} | ({} if pip_arguments is None else {"PIP_ARGS": pip_arguments})
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    began = time.monotonic()
    engine.run(
        "build", "--tag", tag, "--file", str(place / "docker/Dockerfile"), *given, str(place), seconds=_BUILD_SECONDS
    )
    return time.monotonic() - began


def size_bytes(engine: Engine, tag: str) -> int:
    return int(engine.run("image", "inspect", "--format", "{{.Size}}", tag))


def faults(engine: Engine, tag: str) -> Iterator[str]:
    if (size := size_bytes(engine, tag)) > MOST_BYTES:
        yield f"it takes {size / 1e9:.2f} GB, more than {MOST_BYTES / 1e9:.2f}"
    config = json.loads(engine.run("image", "inspect", "--format", "{{json .Config}}", tag))
    if config["User"].partition(":")[0] in ("", "0", "root"):
        yield "it runs as root"
    if not config.get("Healthcheck"):
        yield "it has no health check"
    if leaked := engine.run("run", "--rm", "--network=none", "--user=0", "--entrypoint=sh", tag, "-c", _LOOK).split():
        yield f"it holds what only its build needs: {' '.join(leaked)[:200]}"
