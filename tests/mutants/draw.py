"""Drawing mutants: every small change that could be made to a file, and a sample of them from one seed."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
_CALLS = {"min": "max", "max": "min", "all": "any", "any": "all"}
_SILENT = {"debug", "info", "warning", "error", "log"}
"""Log calls: their messages are not guaranteed."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path below the repository's root.
        line: 1-based, of the change.
        start, end: characters of the file's text that are replaced.
        digest: SHA-256 of the text that the change was drawn for, in hexadecimal.
    """

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    kind: str
    digest: str

    @property
    def name(self) -> str:
        """Names the change among all that can be drawn from a text."""
        return f"{self.file}:{self.start}:{self.kind}"

    def apply(self, text: str) -> str:
        """The mutated text.

        Raises:
            ValueError: the mutant was drawn for another text.
        """
        if hashlib.sha256(text.encode()).hexdigest() != self.digest:
            raise ValueError(f"{self.file} has changed since its mutants were drawn: draw them again")
        return text[: self.start] + self.after + text[self.end :]


def candidates(file: str, text: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    tree, offsets = ast.parse(text), _offsets(text)
    skipped = _skipped(tree)
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for first, last, after, kind in _changes(node, text, offsets):
            line = text.count("\n", 0, first) + 1
            found.append(Mutant(file, line, first, last, text[first:last], after, kind, digest))
    return sorted(found, key=lambda each: (each.start, each.kind))


def draw(root: Path, targets: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """About `count` mutants, as many of each folder or file; the same seed draws the same ones from the same texts."""
    rng, found = random.Random(seed), list[Mutant]()
    for target in targets:
        paths = (root / target).rglob("*.py") if (root / target).is_dir() else [root / target]
        files = sorted(path.relative_to(root).as_posix() for path in paths)
        every = [each for file in files for each in candidates(file, (root / file).read_text())]
        found += rng.sample(every, min(-(-count // len(targets)), len(every)))
    return sorted(found, key=lambda each: each.name)


def _offsets(text: str) -> list[int]:
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _span(node: ast.AST, text: str, offsets: list[int]) -> tuple[int, int]:
    """Where a node stands, in characters; the parser counts bytes of UTF-8."""

    def place(line: int, column: int) -> int:
        whole = text[offsets[line - 1] : offsets[line] - 1]
        return offsets[line - 1] + len(whole.encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _skipped(tree: ast.AST) -> set[int]:
    """Nodes that no test should pin down: annotations, docstrings, log lines, the words of errors, f-strings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        drop: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            drop = [node.returns, *(each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg))]
        elif isinstance(node, ast.AnnAssign):
            drop = [node.annotation]
        elif isinstance(node, ast.JoinedStr):
            drop = [node]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            drop = list(node.exc.args)
        elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SILENT
        ):
            drop = [node]
        found.update(id(inner) for each in drop if each for inner in ast.walk(each))
    return found


def _changes(node: ast.AST, text: str, offsets: list[int]) -> Iterator[tuple[int, int, str, str]]:
    """(start, end, replacement, kind) of the changes that a node offers."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _between(
            node.left, node.comparators[0], _COMPARISONS[type(node.ops[0])], "comparison", text, offsets
        )
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield from _between(node.left, node.right, _ARITHMETIC[type(node.op)], "arithmetic", text, offsets)
    elif isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        yield from _between(node.values[0], node.values[1], other, "boolean", text, offsets)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        (first, last), (inner, _) = _span(node, text, offsets), _span(node.operand, text, offsets)
        yield first, last, text[inner:last], "negation"
    else:
        yield from _other_changes(node, text, offsets)


def _other_changes(node: ast.AST, text: str, offsets: list[int]) -> Iterator[tuple[int, int, str, str]]:
    """Changes of constants, calls and whole statements."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield *_span(node, text, offsets), str(node.value + 1), "number"
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield *_span(node, text, offsets), str(not node.value), "flag"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield *_span(node.func, text, offsets), _CALLS[node.func.id], "call"
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        first, last = _span(node.test, text, offsets)
        yield first, last, f"not ({text[first:last]})", "condition"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield *_span(node, text, offsets), "pass", "statement"
    elif isinstance(node, ast.Raise) and node.exc:
        yield *_span(node, text, offsets), "pass", "raise"


def _between(
    left: ast.AST, right: ast.AST, after: str, kind: str, text: str, offsets: list[int]
) -> Iterator[tuple[int, int, str, str]]:
    """The operator between two operands, if nothing but it stands there."""
    first, last = _span(left, text, offsets)[1], _span(right, text, offsets)[0]
    operator = text[first:last].strip()
    if operator and not set(operator) & set("()[]#\n"):
        start = text.index(operator, first)
        yield start, start + len(operator), after, kind
