"""Rules of the source: which module may import which, how many parameters a function takes, one name for one class."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.paths import REPOSITORY

SOURCES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text()
    for package in ("protocols", "node")
    for path in (REPOSITORY / package).rglob("*.py")
}
PEER = {
    f"node/session/{name}.py" for name in ("build", "examination", "peer", "processes", "remote_queries", "transport")
}
"""The composition root, and its smaller siblings, which only ask."""
FORKS = {"node/runtime/fork_server.py"}
"""Its other side is a process without an event loop."""
AHEAD = {"node/tasks/hf/streamed.py"}
"""It fetches ahead in the worker, which has no event loop."""
RANKS = {f"node/ranks/{name}.py" for name in ("cluster", "group", "lent")} | {"node/cli/lend.py"}
"""The processes of a worker, which has no event loop."""
LIBRARY = {f"node/library/{name}.py" for name in ("child", "link", "peer", "ranks", "swarm", "worker")}
"""The process of a user's script, which has no event loop of ours."""
ONLY_IN: dict[str, set[str]] = {
    "time": LIBRARY
    | {"node/runtime/clock.py", "node/training/worker.py", "node/training/stage_worker.py"}
    | AHEAD
    | RANKS,
    "socket": LIBRARY
    | {"node/training/script.py", "node/training/process.py", "node/training/worker.py"}
    | {f"node/direct/{name}.py" for name in ("connection", "handshake", "inbound", "pacing", "punch")}
    | {"node/page/server.py", "node/runtime/child_process.py", "node/runtime/listening.py"}
    | FORKS
    | RANKS,
    "threading": LIBRARY | AHEAD | FORKS | RANKS,
    "concurrent": {"node/runtime/compute.py"} | AHEAD,
    "subprocess": LIBRARY | {"node/runtime/child_process.py", "node/network/libp2p.py"},
    "asyncio.subprocess": {"node/runtime/child_process.py", "node/network/libp2p.py"},
    "multiprocessing": set(),
    "pickle": set(),
    "blake3": {"protocols/allreduce/parts.py"},
    "hivemind": {"node/network/daemon_connection.py", "node/network/kademlia.py"},
    "protocols.registry.load_averager": PEER,
    "psutil": {"node/runtime/metrics.py", "node/runtime/listening.py", "node/machine/probes.py"},
    # the way out; ending a child, and what it has started; a worker that is asked where it stands
    "signal": LIBRARY
    | {"node/session/shutdown.py", "node/training/failure.py"}
    | {f"node/runtime/{name}.py" for name in ("child_process", "reaper")}
    | FORKS,
    "protocols.butterfly.averager": PEER,
    "node.network.libp2p": PEER | {"node/session/status_tracker.py"},  # reads it
    "node.network.dht": PEER,
    "node.runtime.compute": PEER,
    "node.runtime.clock": PEER | {"node/cli/planning.py"},
}
TEXTS = [
    each
    for pattern in ("*.md", "Makefile", "pyproject.toml", "docs/**/*.md", "docker/**/*", "node/**/*", "benchmarks/*.md")
    for each in REPOSITORY.glob(pattern)
    if each.suffix not in {".pyc", ".whl"} and each.is_file()
]
"""What a user reads: documents, messages, examples."""
INSTALLS_A_STRANGER = re.compile(
    r"\b(install|add|uvx|download|wheel)\b[^\n]*['\"\s]starling(\[|==|['\"`]?\s*$)", re.MULTILINE
)
"""Installs by the project's name, which belongs to another project on the package index."""
MIN_MODULE_LINES = 60
MAX_KEYWORDS = 12
"""Parameters of a constructor, or of a function that composes, if all but two of them are keyword-only."""
MAX_CONSTRUCTOR_ARGUMENTS, MAX_PARAMETERS = 6, 7
ALIAS = re.compile("[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
"""The name of a type that is assigned, not a constant."""
# The stream handler's boundary; the root; a worker's, and code of users, who may raise anything.
BROAD_EXCEPT = {
    "node/streams/serving.py",
    "node/network/libp2p.py",
    "node/session/peer.py",
    "node/tasks/user_task.py",
    "node/tasks/hf/settings.py",
    "node/export/load_again.py",
    "node/training/worker.py",
    "node/runtime/fork_server.py",
    "node/ranks/group.py",
    "node/library/worker.py",
}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(source)))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported; `from a import b` is a.b, whether b is a module or not."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def allowed(file: str, name: str) -> bool:
    top, package = name.split(".")[0], file.split("/")[0]
    if package == "protocols" and top not in sys.stdlib_module_names | {"torch", "msgpack", "blake3", "protocols"}:
        return False
    if top in {"tests", "benchmarks", ""} or (top == "random" and name not in {"random", "random.Random"}):
        return False
    return all(file in files for only, files in ONLY_IN.items() if f"{name}.".startswith(f"{only}."))


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything and does not end by raising it again."""
    names = (
        {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)} if handler.type else {"Exception"}
    )
    last = handler.body[-1]
    return bool(names & {"Exception", "BaseException"}) and not (isinstance(last, ast.Raise) and last.exc is None)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many it takes, `self` and `cls` not counted."""
    given = function.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + (given.vararg is not None) + (given.kwarg is not None)


def too_many_parameters(file: str, source: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            most = MAX_CONSTRUCTOR_ARGUMENTS if node.name == "__init__" else MAX_PARAMETERS
            count = parameters(node)
            if count - len(node.args.kwonlyargs) <= 2:
                most = MAX_KEYWORDS + count - len(node.args.kwonlyargs)
            if count > most:
                yield f"{file}:{node.lineno}: {node.name} takes {count} parameters, at most {most} are allowed"


def public_types(source: str) -> Iterator[str]:
    """Names of the classes that a file defines, and of the types that it assigns."""
    yield from (node.name for node in nodes(source) if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    for node in parsed(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (each.id for each in targets if isinstance(each, ast.Name) and ALIAS.fullmatch(each.id))


def named_twice(sources: dict[str, str]) -> list[str]:
    """Types of which there are several."""
    names = Counter(name for source in sources.values() for name in public_types(source))
    return sorted(name for name, count in names.items() if count > 1)


def violations(file: str, source: str) -> Iterator[str]:
    yield from (f"{file}:{line}: imports {name}" for line, name in imports(source) if not allowed(file, name))
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            if node.attr != "Random":
                yield f"{file}:{node.lineno}: random.{node.attr} has no seed of ours"
        elif isinstance(node, ast.ExceptHandler) and is_broad(node) and file not in BROAD_EXCEPT:
            yield f"{file}:{node.lineno}: a broad except"


def imported(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports."""
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in sources}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        names = {name for _, name in imports(sources[file])}
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & set(modules)
    return graph


def cycle(sources: dict[str, str]) -> list[str]:
    """The modules of an import cycle, or none."""
    try:
        TopologicalSorter(imported(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def mutual_packages(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Pairs of packages that import each other."""
    pairs = set()
    for module, others in imported(sources).items():
        for other in others:
            pairs.add((".".join(module.split(".")[:2]), ".".join(other.split(".")[:2])))
    return sorted((one, two) for one, two in pairs if one < two and (two, one) in pairs)


def lonely_modules(sources: dict[str, str]) -> list[str]:
    """Short modules that only one other module imports: they belong to their user."""
    users = Counter(other for others in imported(sources).values() for other in others)
    return [
        file
        for file, source in sources.items()
        if source.count("\n") < MIN_MODULE_LINES and users[file.removesuffix(".py").replace("/", ".")] == 1
    ]


def test_sources_keep_the_architecture_rules() -> None:
    assert len(SOURCES) > 10
    assert [each for file, source in SOURCES.items() for each in violations(file, source)] == []
    assert cycle(SOURCES) == []
    assert mutual_packages(SOURCES) == []
    assert lonely_modules(SOURCES) == []
    assert [each for file, source in SOURCES.items() for each in too_many_parameters(file, source)] == []
    assert named_twice(SOURCES) == []


def test_no_text_installs_by_a_strangers_name() -> None:
    assert [str(each) for each in TEXTS if INSTALLS_A_STRANGER.search(each.read_text())] == []
    for planted in (
        "pip install 'starling[hf]'",
        'uv add "starling"',
        "pipx install starling",
        "pip install starling==1",
    ):
        assert INSTALLS_A_STRANGER.search(f"{planted}\n"), planted
    assert not INSTALLS_A_STRANGER.search("make install, or pip install -e '.[hf]' in the checkout of starling/\n")


def test_only_one_module_words_how_commands_are_typed() -> None:
    found = {file for file, source in SOURCES.items() if re.search(r"python -m node\b(?!\.)", source)}
    assert found == {"node/__main__.py", "node/runtime/program.py"}


@pytest.mark.parametrize(
    "file, source",
    [
        ("protocols/pairwise/gossip.py", "import node.training.trainer"),
        ("protocols/pairwise/gossip.py", "def late():\n    from numpy import array"),
        ("protocols/pairwise/gossip.py", "import time"),
        ("protocols/vectors/views.py", "from blake3 import blake3"),
        ("protocols/pairwise/gossip.py", "from tests.sim import loop"),
        ("node/outer/replicated_loop.py", "from node.network import libp2p"),
        ("node/outer/replicated_loop.py", "from protocols.registry import load_averager"),
        ("node/outer/replicated_loop.py", "from protocols.butterfly.averager import Butterfly"),
        ("node/outer/replicated_loop.py", "from time import monotonic as now"),
        ("node/outer/replicated_loop.py", "import concurrent.futures"),
        ("node/outer/replicated_loop.py", "from asyncio import subprocess"),
        ("node/session/peer.py", "import hivemind.p2p"),
        ("node/session/peer.py", "from . import libp2p"),
        ("node/session/peer.py", "from random import shuffle"),
        ("node/session/peer.py", "import random\nrandom.seed(1)"),
        ("node/outer/replicated_loop.py", "try:\n    pass\nexcept (OSError, Exception):\n    pass"),
        ("node/outer/replicated_loop.py", "try:\n    pass\nexcept:\n    raise ValueError from None"),
    ],
)
def test_planted_violation_is_caught(file: str, source: str) -> None:
    assert len(list(violations(file, source))) == 1


@pytest.mark.parametrize(
    "file, source",
    [
        ("node/runtime/clock.py", "import time"),
        (
            "node/session/peer.py",
            "from node.network.libp2p import LibP2P\nfrom protocols.registry import load_averager",
        ),
        (
            "node/outer/replicated_loop.py",
            "import random\ndef pick(rng: random.Random): ...\nfrom protocols import vectors",
        ),
        ("node/outer/replicated_loop.py", "try:\n    pass\nexcept BaseException:\n    undo()\n    raise"),
    ],
)
def test_allowed_import_passes(file: str, source: str) -> None:
    assert list(violations(file, source)) == []


def test_planted_cycle_is_caught() -> None:
    planted = {"node/a.py": "from node import b", "node/b.py": "from node.c import x", "node/c.py": "import node.a"}
    assert set(cycle(planted)) == {"node.a", "node.b", "node.c"}
    assert cycle({"node/__init__.py": "from node.a import x", "node/a.py": "from node import b", "node/b.py": ""}) == []


def test_planted_pair_of_packages_and_lonely_module_are_caught() -> None:
    planted = {
        "node/a/x.py": "from node.b import y",
        "node/a/z.py": "\n" * 70,
        "node/b/y.py": "",
        "node/b/w.py": "from node.a.z import v\nfrom node.b import y\n" + "\n" * 70,
    }
    assert mutual_packages(planted) == [("node.a", "node.b")] and lonely_modules(planted) == []
    del planted["node/a/x.py"]
    assert mutual_packages(planted) == [] and lonely_modules(planted) == ["node/b/y.py"]


SEVEN = "a, b, c, d, e, f, g"


@pytest.mark.parametrize(
    "file, source",
    [
        ("node/outer/state.py", f"class A:\n    def __init__(self, {SEVEN}): ..."),
        ("node/outer/state.py", f"class A:\n    def step(self, {SEVEN}, h): ..."),
        ("protocols/aio.py", f"async def late({SEVEN}, *, h): ..."),
        ("protocols/aio.py", f"class A:\n    def __init__(self, *, {SEVEN}, h, i, j, k, l, m): ..."),
        ("protocols/aio.py", f"def outer():\n    def inner({SEVEN}, **more): ..."),
        ("node/cli/app.py", f"def helper({SEVEN}, h): ..."),
    ],
)
def test_a_planted_crowd_of_parameters_is_caught(file: str, source: str) -> None:
    assert len(list(too_many_parameters(file, source))) == 1


@pytest.mark.parametrize(
    "file, source",
    [
        ("node/outer/state.py", "class A:\n    def __init__(self, a, b, c, d, e, f): ..."),
        ("node/outer/state.py", f"class A:\n    def step(self, {SEVEN}): ..."),
    ],
)
def test_as_many_parameters_as_allowed_pass(file: str, source: str) -> None:
    assert list(too_many_parameters(file, source)) == []


def test_a_planted_second_class_of_one_name_is_caught() -> None:
    planted = {
        "node/a.py": "class Peer: ...\nclass _Task: ...\nReach = Callable[[], None]\nLIMIT = 1\nT = TypeVar('T')",
        "node/b.py": "def make():\n    class Peer: ...",
        "protocols/c.py": "Reach: TypeAlias = int\nclass _Task: ...\nLIMIT = 1\nT = TypeVar('T')",
        "protocols/d.py": "class Gate: ...",
    }
    assert named_twice(planted) == ["Peer", "Reach"]
    assert named_twice({"node/a.py": planted["node/a.py"], "protocols/d.py": planted["protocols/d.py"]}) == []
