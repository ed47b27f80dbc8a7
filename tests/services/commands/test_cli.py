"""The command line: help, commands that need no run, and bad input.

Bad input gives exit code 2, one line with fault, place and remedy, and leaves no process. There is one case per kind;
tests/services/run/test_preflight.py has all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.services.cli import app
from tandem.services.config import dump_recipe, parse_recipe
from tests.services.test_imports import COMMANDS
from tests.support.paths import ROOT
from tests.support.processes import MARK, carriers
from tests.support.run_inputs import recipe_of, small_values, write_dataset

TANDEM = (sys.executable, "-m", "tandem.services.cli")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that would run; its run folder is `run` in the same folder."""
    file = tmp_path / "recipe.json"
    file.write_text(dump_recipe(recipe_of(small_values(tmp_path))))
    return file


PLAIN = {"TANDEM_REDIS_URL": "", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": ""}
Done = subprocess.CompletedProcess[str]
Tandem = Callable[..., Done]


def started(*command: str, cwd: Path = ROOT, stdout: int = subprocess.PIPE) -> Done:
    """Runs a command as a process to its end; fails if a process that it started is left."""
    mark = uuid.uuid4().hex
    variables = {**os.environ, **PLAIN, "PYTHONPATH": str(ROOT), MARK: mark}
    done = subprocess.run(
        command, cwd=cwd, env=variables, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60.0, check=False
    )
    assert list(carriers(mark)) == []
    return done


@pytest.fixture
def tandem(monkeypatch: pytest.MonkeyPatch) -> Tandem:
    """Runs a command of `tandem` in this process; fails if a process that it started is left."""
    mark = uuid.uuid4().hex
    for name, value in {**PLAIN, MARK: mark}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, cwd: Path = ROOT) -> Done:
        monkeypatch.chdir(cwd)
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert list(carriers(mark)) == []
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    return run


def complaint(done: Done) -> str:
    """The one line with which a command refused bad input."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: ") and not done.stdout
    return line.removeprefix("tandem: ")


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in ([], ["data"], ["reward"])], ids=" ".join
)
def test_help_of_every_command_has_an_example(command: list[str]) -> None:
    said = CliRunner().invoke(app, [*command, "--help"])
    assert said.exit_code == 0
    assert f"Example: tandem {' '.join(command)}" in " ".join(said.stdout.split())


def test_help_lists_every_command_and_is_printed_without_arguments() -> None:
    listed = started(*TANDEM, "--help").stdout
    for command in COMMANDS:
        assert not command or f"  {command[0]} " in listed
    assert "Usage: tandem" in CliRunner().invoke(app, []).output


def test_a_missing_recipe_is_a_one_line_error(tandem: Tandem, tmp_path: Path) -> None:
    for command in ("run", "sft", "eval", "config"):
        assert "no such file" in complaint(tandem(command, str(tmp_path / "gone.toml")))
    assert "no such file" in complaint(started(*TANDEM, "serve", "feed", str(tmp_path / "gone.toml")))


def test_a_service_started_by_hand_needs_a_run_or_a_redis(recipe: Path) -> None:
    line = complaint(started(*TANDEM, "serve", "reward", str(recipe)))
    assert "tandem run" in line and "TANDEM_REDIS_URL" in line


def test_an_unknown_service_is_refused_with_the_known_ones(tandem: Tandem, recipe: Path) -> None:
    done = tandem("serve", "trainr", str(recipe))
    assert done.returncode == 2
    assert all(service in done.stderr for service in ("feed", "rollout", "reward", "trainer"))


@pytest.mark.parametrize("command", ["status", "ledger", "replay"])
def test_a_folder_without_a_run_is_a_one_line_error(tandem: Tandem, command: str, tmp_path: Path) -> None:
    assert "is not a run folder" in complaint(tandem(command, str(tmp_path)))
    assert "no run found under runs/" in complaint(tandem(command, cwd=tmp_path))


def test_status_of_a_finished_run_prints_the_summary_of_the_run_started_last(tandem: Tandem, tmp_path: Path) -> None:
    values = small_values(tmp_path)
    for age, name in enumerate(("older", "newer")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(dump_recipe(recipe_of(values, run={"folder": str(folder)})))
        (folder / "summary.json").write_text(
            json.dumps(
                {"final_accuracy": 0.875, "groups": {"trained": 80}, "set_aside": {"0-7": "crashed: ValueError"}}
            )
        )
        os.utime(folder / "config.json", (age, age))
    done = tandem("status", cwd=tmp_path)
    assert done.returncode == 0 and "older" not in done.stdout
    assert all(words in done.stdout for words in ("runs/newer: finished", "0.875", "trained", "80"))
    assert "set aside: group 0-7: crashed: ValueError\n" in done.stdout


def test_config_prints_the_resolved_recipe_or_explains_every_key(tandem: Tandem, recipe: Path) -> None:
    done = tandem("config", str(recipe), "run.staleness_budget=4")
    assert done.returncode == 0
    assert "staleness_budget = 4  # default: 2" in done.stdout
    as_json = tandem("config", str(recipe), "run.staleness_budget=4", "--json")
    assert parse_recipe(tomllib.loads(done.stdout)) == parse_recipe(json.loads(as_json.stdout))
    said = tandem("config").stdout
    assert "trainer.learning_rate (number ≥ 0.0; default 1e-06)" in said
    assert "model.path (text; must be given)" in said


def test_data_check_reports_the_faults_of_a_file(tandem: Tandem, tmp_path: Path) -> None:
    file = write_dataset(tmp_path / "rows.jsonl")
    assert tandem("data", "check", str(file)).returncode == 0
    file.write_text(file.read_text() + "{}\n")
    assert tandem("data", "check", str(file)).returncode == 1
    assert "no such file" in complaint(tandem("data", "check", str(tmp_path / "gone")))


# --- bad input


def write(text: str, *names: str) -> Callable[[Path], object]:
    """Writes the text to the file of that name below the folder."""

    def damage(folder: Path) -> None:
        file = folder.joinpath(*names)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    return damage


def old_run(folder: Path) -> None:
    """A run with one recorded batch is in the run folder."""
    (folder / "run" / "batches" / "000001").mkdir(parents=True)
    (folder / "run" / "config.json").write_text("{}")


def files_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if "__pycache__" not in file.parts)


def nothing(folder: Path) -> None:
    """Only the override is bad."""


BAD_TEMPLATE, BAD_FUNCTION = "a\n{% for m in %}", "raise RuntimeError('not today')"
CASES: list[tuple[Callable[[Path], object], str, list[str]]] = [
    (nothing, "trainer.learningrate=1", ["did you mean trainer.learning_rate?"]),
    (old_run, "", ["/run already holds a run", "--resume"]),
    (nothing, "data.train_file=gone.parquet", ["gone.parquet", "no such file"]),
    (write(BAD_TEMPLATE, "chat.jinja"), "model.chat_template=chat.jinja", ["chat.jinja, line 2", "mend"]),
    (nothing, "model.path=models/gone", ["model.path models/gone", "no such folder"]),
    (nothing, "data.max_prompt_tokens=2", ["train.jsonl has no usable row", "has 7 tokens"]),
    (nothing, f"rollout.kv_cache_bytes={1 << 50}", ["memory", "lower rollout.kv"]),
    (write(BAD_FUNCTION, "mine.py"), "reward.scorer=mine.py:score", ["mine.py", "not today"]),
    (nothing, "run.redis_url=unix:///nowhere/redis.sock", ["/nowhere/redis.sock", "start it"]),
]


@pytest.mark.parametrize(("damage", "override", "says"), CASES)
def test_bad_input_is_refused(
    tandem: Tandem, recipe: Path, damage: Callable[[Path], object], override: str, says: list[str]
) -> None:
    damage(recipe.parent)
    before = files_below(recipe.parent)
    line = complaint(tandem("run", "recipe.json", *filter(None, [override]), cwd=recipe.parent))
    assert all(words in line for words in says), line
    assert files_below(recipe.parent) == before, "it wrote something"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("reward.scorer=exakt", ["exakt", "did you mean exact?"]),
        ("reward.scorer=gone.py:score", ["gone.py is no file"]),
        ("data.train_file=gone.parquet", ["gone.parquet: no such file"]),
        ("model.path=models/gone/for/good", ["models/gone/for/good: no such folder"]),
    ],
)
def test_config_refuses_the_recipes_that_run_refuses(
    tandem: Tandem, recipe: Path, override: str, says: list[str]
) -> None:
    done = tandem("config", "recipe.json", override, cwd=recipe.parent)
    assert done.returncode == 2 and "[run]" in done.stdout, "the resolved recipe is printed first"
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: ") and all(words in line for words in says), line


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@contextmanager
def web_server() -> Iterator[int]:
    """The port of a web server, which is no Redis."""
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(timeout=10.0)


def test_a_port_in_use_by_another_program_is_refused(tandem: Tandem, recipe: Path) -> None:
    with web_server() as port:
        line = complaint(tandem("run", "recipe.json", f"reward.port={port}", cwd=recipe.parent))
        assert f"reward.port: cannot listen on 127.0.0.1:{port}" in line and "choose another reward.port" in line
        url = f"redis://127.0.0.1:{port}"
        line = complaint(tandem("run", "recipe.json", f"run.redis_url={url}", cwd=recipe.parent))
        assert line.startswith(f"what answers at {url} is no Redis") and "name another one" in line


def test_a_run_on_a_full_disk_is_refused(recipe: Path) -> None:
    disk = recipe.parent / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(disk)]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux) to mount a small disk")
    tried = subprocess.run([*alone, "true"], capture_output=True, text=True, timeout=60.0, check=False)
    if tried.returncode:
        pytest.skip(f"no small disk can be mounted here: {tried.stderr.strip()}")
    line = complaint(started(*alone, *TANDEM, "run", "recipe.json", f"run.folder={disk}/run", cwd=recipe.parent))
    assert line.startswith(f"{disk}: the disk is full") and "free space there" in line


# --- faults during the run -------------------------------------------------------------------------------------

FILLS = """
import sys
from pathlib import Path
from tandem.services.command_line import run_service_command, full_disk_named

def writes():
    with full_disk_named(Path("runs/mine")), open("/dev/full", "w") as file:
        file.write("a line")

def says():
    print("a line", flush=True)

def opens():
    raise OSError(122, "Disk quota exceeded", "some/file")

def breaks():
    raise OSError(5, "Input/output error")

run_service_command({"writes": writes, "says": says, "opens": opens, "breaks": breaks}[sys.argv[1]])
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
@pytest.mark.parametrize(("does", "names"), [("writes", "runs/mine"), ("says", "/dev/stdout"), ("opens", "some/file")])
def test_a_service_whose_disk_fills_ends_with_one_line(does: str, names: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = started(sys.executable, "-c", FILLS, does, cwd=tmp_path, stdout=full.fileno())
    assert complaint(done) == f"{names}: the disk is full; free space there and try again"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
def test_a_command_whose_output_does_not_fit_ends_with_one_line(recipe: Path) -> None:
    with open("/dev/full", "w") as full:
        done = started(*TANDEM, "config", "recipe.json", cwd=recipe.parent, stdout=full.fileno())
    assert complaint(done).startswith("/dev/stdout: the disk is full")


def test_another_disk_error_keeps_its_traceback(tmp_path: Path) -> None:
    done = started(sys.executable, "-c", FILLS, "breaks", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr and "Input/output error" in done.stderr


def test_a_redis_outage_is_not_reported_as_a_ledger_violation(tandem: Tandem, recipe: Path) -> None:
    values = json.loads(recipe.read_text())
    values["run"]["redis_url"] = "unix:///nowhere/redis.sock"
    write(json.dumps(values), "run", "config.json")(recipe.parent)
    line = complaint(tandem("ledger", "run", cwd=recipe.parent))
    assert "Redis at unix:///nowhere/redis.sock cannot be reached" in line and "start it" in line
