"""House rules on a small tree that keeps them, and on one violation of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.house import findings

PAGE = """
| floor | folder | what |
|---|---|---|
| 1 | `services/` | processes |
| 0 | `reward/`, `trainer/` | work |

| layer of `services/` | what |
|---|---|
| `cli.py` | commands |
| `buffer/` | Redis |

| room | what |
|---|---|
| `reward/scorers` | scorers |
"""
SETTINGS = """
[tool.house]
max_any = 1
[[tool.importlinter.contracts]]
id = "floors"
layers = ["tandem.services", "tandem.reward | tandem.trainer"]
[[tool.importlinter.contracts]]
id = "rooms"
layers = ["tandem.services.cli", "tandem.services.buffer"]
"""
TREE = {
    "docs/architecture.md": PAGE,
    "pyproject.toml": SETTINGS,
    "services/__init__.py": "",
    "services/cli.py": "from typing import Any\n\n\ndef main(argv: Any) -> None: ...\n",
    "services/buffer/keys.py": "",
    "reward/scorers/exact.py": "class Exact:\n    def judge(self, answer: str) -> float: ...\n",
    "trainer/loop.py": "def _step(batch): ...\n",
    "benchmarks/records/speed.json": "{}\n" * 200,
    "protos/wire_pb2.py": "#" * 200,
    "build/copy.py": "#" * 200,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        write(tmp_path, name, text)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_tree_that_keeps_the_rules_has_no_findings(tree: Path) -> None:
    assert findings(tree) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("trainer/loop.py", "#\n" * 401, "trainer/loop.py: long-file: 401 lines, at most 400"),
        ("benchmarks/speed.py", "#\n" * 401, "benchmarks/speed.py: long-file: 401 lines, at most 400"),
        ("tests/test_loop.py", "#\n" * 401, "tests/test_loop.py: long-file: 401 lines, at most 400"),
        ("benchmarks/records/speed.json", "{}\n" * 201, "records/speed.json: long-file: 201 lines, at most 200"),
        ("trainer/loop.py", "#\n#" + "x" * 120, "trainer/loop.py: long-line: over 120 columns in line 2"),
        ("docs/page.md", "x" * 121, "docs/page.md: long-line: over 120 columns in line 1"),
        ("services/buffer/claim.lua", "-" * 121, "services/buffer/claim.lua: long-line"),
        ("protos/wire.proto", "/" * 121, "protos/wire.proto: long-line"),
        ("examples/recipe.toml", "#" * 121, "examples/recipe.toml: long-line"),
        ("deploy/setup.sh", "#" * 121, "deploy/setup.sh: long-line"),
        ("Makefile", "#" * 121, "Makefile: long-line"),
        (
            "trainer/loop.py",
            "class A:\n    def _f(self):\n" + "        pass\n" * 60,
            "trainer/loop.py:_f: long-function: 61 lines, at most 60",
        ),
        ("trainer/loop.py", "def step(batch) -> None: ...", "trainer/loop.py:step: untyped: no type for batch"),
        ("trainer/loop.py", "def step(*, n: int): ...", "trainer/loop.py:step: untyped: no type for return"),
        ("benchmarks/speed.py", "async def run(*a) -> int: ...", "benchmarks/speed.py:run: untyped: no type for a"),
        ("trainer/loop.py", "import typing\nx: typing.Any", "Any: 2 times in product code, at most 1"),
        (
            "trainer/loop.py",
            "def _f() -> None:\n    from tandem.services import cli",
            "tandem.services.cli -> tandem.trainer.loop -> tandem.services.cli",
        ),
        ("services/logs.py", "", "services/logs: house-table: is in only one of folder and table"),
        ("docs/architecture.md", PAGE.replace("| `cli.py` | commands |\n", ""), "rooms: house-table"),
        ("docs/architecture.md", PAGE.replace("| 0 | `reward/`, `trainer/`", "| 0 | `reward/`"), "floors: house-table"),
        ("reward/rubric/rubric.py", "", "reward/rubric: house-table: is no room in docs/architecture.md"),
        (
            "docs/architecture.md",
            PAGE + "| `trainer/losses` | losses |\n",
            "trainer/losses: house-table: is a room in docs/architecture.md, but no folder",
        ),
        (
            "pyproject.toml",
            SETTINGS.replace("max_any = 1", 'max_any = 1\npending = ["long-file trainer/loop.py"]'),
            "pending lists 'long-file trainer/loop.py', which is no longer found",
        ),
    ],
)
def test_a_violation_is_found(tree: Path, name: str, text: str, expected: str) -> None:
    write(tree, "services/cli.py", TREE["services/cli.py"] + "from tandem.trainer import loop\n")
    write(tree, name, text)
    assert any(expected in line for line in findings(tree)), findings(tree)


def test_a_pending_finding_is_tolerated(tree: Path) -> None:
    write(tree, "trainer/loop.py", "#\n" * 401)
    pending = 'max_any = 1\npending = ["long-file trainer/loop.py"]'
    write(tree, "pyproject.toml", SETTINGS.replace("max_any = 1", pending))
    assert findings(tree) == []
