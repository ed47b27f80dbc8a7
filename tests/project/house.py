"""Measures the house rules of the source tree; `make check` runs it.

The rules are in CONTRIBUTING.md under "House rules". `[tool.house]` in pyproject.toml holds the limit for `Any` and the
pending findings: a finding that is listed there is tolerated, one that is listed and no longer found is an error.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MAX_FILE_LINES = 400
MAX_RECORD_LINES = 200
MAX_FUNCTION_LINES = 60
MAX_COLUMNS = 120

PRODUCT = ("protos", "reward", "rollout", "services", "trainer", "tandem")
IGNORED = {"build", "dist", "runs", "data", "shared"}  # top-level folders that .gitignore ignores
CODE = {".py", ".lua", ".proto", ".sh"}
TEXT = CODE | {".md", ".toml", ".yaml", ".yml"}
TEXT_NAMES = {"Makefile", "Dockerfile", "run"}
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    rule: str
    where: str
    text: str

    @property
    def key(self) -> str:
        """How `[tool.house] pending` names the finding: without line numbers, which change."""
        return f"{self.rule} {self.where}"


@dataclass
class Tree:
    """The files of one checkout. The files of each folder are read and parsed once."""

    root: Path

    @cached_property
    def files(self) -> list[Path]:
        return sorted(self._walk(self.root))

    def _walk(self, folder: Path) -> Iterator[Path]:
        for path in folder.iterdir():
            if path.is_symlink() or (folder == self.root and path.name in IGNORED):
                continue
            if path.is_dir():
                if path.name == ".ci" or not path.name.startswith((".", "__")):
                    yield from self._walk(path)
            elif (path.suffix in TEXT or path.name in TEXT_NAMES) and not GENERATED.search(path.name):
                yield path

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def in_product(self, path: Path) -> bool:
        return path.relative_to(self.root).parts[0] in PRODUCT

    @cached_property
    def python(self) -> dict[Path, ast.Module]:
        return {path: ast.parse(path.read_text("utf-8")) for path in self.files if path.suffix == ".py"}

    def module(self, path: Path) -> str:
        parts = list(path.relative_to(self.root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        prefix = ["tandem"] if parts[0] in PRODUCT and parts[0] != "tandem" else []
        return ".".join(prefix + parts)


def long_files(tree: Tree) -> Iterator[Finding]:
    """Code files have at most 400 lines, benchmark records at most 200."""
    records = tree.root / "benchmarks" / "records"
    limits = {path: MAX_FILE_LINES for path in tree.files if path.suffix in CODE}
    limits |= {path: MAX_RECORD_LINES for path in sorted(records.glob("*"))}
    for path, limit in limits.items():
        count = len(path.read_text("utf-8").splitlines())
        if count > limit:
            yield Finding("long-file", tree.name(path), f"{count} lines, at most {limit}")


def long_lines(tree: Tree) -> Iterator[Finding]:
    for path in tree.files:
        lines = path.read_text("utf-8").splitlines()
        too_long = [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
        if too_long:
            shown = ", ".join(map(str, too_long[:5])) + (", …" if len(too_long) > 5 else "")
            yield Finding("long-line", tree.name(path), f"over {MAX_COLUMNS} columns in line {shown}")


def long_functions(tree: Tree) -> Iterator[Finding]:
    for path, module in tree.python.items():
        for node in ast.walk(module):
            if isinstance(node, Function) and node.end_lineno is not None:
                count = node.end_lineno - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    where = f"{tree.name(path)}:{node.name}"
                    yield Finding("long-function", where, f"{count} lines, at most {MAX_FUNCTION_LINES}")


def untyped_functions(tree: Tree) -> Iterator[Finding]:
    """Every public function of the product and the benchmarks has typed parameters and a typed result."""
    for path, module in tree.python.items():
        if not tree.in_product(path) and path.relative_to(tree.root).parts[0] != "benchmarks":
            continue
        for node in ast.walk(module):
            if not isinstance(node, Function) or node.name.startswith("_"):
                continue
            spec = node.args
            given = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
            missing = [one.arg for one in given if one.annotation is None and one.arg not in ("self", "cls")]
            if node.returns is None:
                missing.append("return")
            if missing:
                yield Finding("untyped", f"{tree.name(path)}:{node.name}", f"no type for {', '.join(missing)}")


def count_any(tree: Tree) -> int:
    """Counts the uses of `Any` in product code, without imports and prose."""
    return sum(
        (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for path, module in tree.python.items()
        if tree.in_product(path)
        for node in ast.walk(module)
    )


def import_cycles(tree: Tree) -> Iterator[Finding]:
    """Modules import each other without cycles, including imports inside functions and under TYPE_CHECKING."""
    names = {tree.module(path) for path in tree.python}
    graph = {tree.module(path): _imports(module, names) - {tree.module(path)} for path, module in tree.python.items()}
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1][::-1]  # graphlib lists the imported module first
            yield Finding("import-cycle", f"{cycle[0]} -> {cycle[1]}", " -> ".join(cycle))
            graph[cycle[0]].discard(cycle[1])
        else:
            return


def _imports(module: ast.Module, names: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in names else node.module)
    return found & names


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the table whose first head cell is `heading`, without the head and the rule."""
    _, found, rest = page.partition(f"\n| {heading} |")
    lines = rest.partition("\n\n")[0].splitlines() if found else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _names(cell: str) -> list[str]:
    """`cli.py`, `commands/` → cli, commands"""
    return [name.strip("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell)]


def house_tables(tree: Tree) -> Iterator[Finding]:
    """The tables in docs/architecture.md, import-linter's layers and the folders name the same layers and packages."""
    page = (tree.root / "docs" / "architecture.md").read_text("utf-8")
    contracts = tomllib.loads((tree.root / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = {contract["id"]: contract["layers"] for contract in contracts if "layers" in contract}
    floors: dict[str, list[str]] = {}
    for floor, folder, *_ in table(page, "floor"):
        floors.setdefault(floor, []).extend(_names(folder))
    said = [sorted(floors[floor]) for floor in sorted(floors, reverse=True)]
    yield from _compare("floors", said, layers.get("floors", []), "tandem.")
    said = [sorted(_names(row[0])) for row in table(page, "layer of `services/`")]
    yield from _compare("rooms", said, layers.get("rooms", []), "tandem.services.")
    folder = tree.root / "services"
    there = {path.stem for path in folder.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))} - {"__init__"}
    for name in sorted(there.symmetric_difference({name for row in said for name in row})):
        yield Finding("house-table", f"services/{name}", "is in only one of folder and table of docs/architecture.md")
    rooms = {name for row in table(page, "room") for name in _names(row[0])}
    for floor in ("protos", "reward", "rollout", "trainer"):
        for path in (tree.root / floor).rglob("*"):
            if path.is_dir() and any(path.glob("*.py")) and tree.name(path) not in rooms:
                yield Finding("house-table", tree.name(path), "is no room in docs/architecture.md")
    for name in sorted(rooms):
        if not (tree.root / name).is_dir():
            yield Finding("house-table", name, "is a room in docs/architecture.md, but no folder")


def _compare(what: str, said: list[list[str]], layers: list[str], prefix: str) -> Iterator[Finding]:
    linted = [sorted(name.strip().removeprefix(prefix) for name in layer.split("|")) for layer in layers]
    if said != linted:
        yield Finding("house-table", what, f"docs/architecture.md says {said}, import-linter {linted}")


RULES = (long_files, long_lines, long_functions, untyped_functions, import_cycles, house_tables)


def findings(root: Path) -> list[str]:
    """One line for each violation that pyproject.toml does not list as pending."""
    tree = Tree(root)
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["house"]
    pending = set(settings.get("pending", ()))
    found = [finding for rule in RULES for finding in rule(tree)]
    lines = [f"{one.where}: {one.rule}: {one.text}" for one in found if one.key not in pending]
    for key in sorted(pending - {one.key for one in found}):
        lines.append(f"pyproject.toml: [tool.house] pending lists '{key}', which is no longer found: remove it")
    count = count_any(tree)
    if count > settings["max_any"]:
        lines.append(f"Any: {count} times in product code, at most {settings['max_any']}")
    return lines


if __name__ == "__main__":
    complaints = findings(Path(__file__).resolve().parents[2])
    print("\n".join(complaints), end="\n" if complaints else "")
    sys.exit(1 if complaints else 0)
