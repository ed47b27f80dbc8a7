"""`tandem demo` around the run: its task, an earlier demo is kept, a running one is left alone, errors are one line."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.errors import ConfigError, EnvironmentLackError, RunExistsError, TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.command_line import run_service
from tandem.services.commands import demo, demo_model
from tandem.services.commands.data_check import check_file
from tandem.services.commands.demo_tasks import ARITHMETIC, GUESS_NUMBER
from tandem.services.config import Recipe, dump_recipe, load_recipe, load_resolved
from tandem.services.data import guessing
from tandem.services.data.arithmetic import EVALUATION_ROWS, right_sum, sloppy_sum, write_task
from tandem.services.data.chat import ChatEncoder
from tandem.services.run.folder import CONFIG_FILE, LOCK_FILE, RunAddress, RunLock
from tests.support.processes import run_python, run_tandem
from tests.support.redis_ring import running_redis

STOPPED = 130


class Stage:
    """Stand-ins for the demo's children and its run: each checks whether the folder is locked and writes the real one's
    files.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.runs = 0
        self.launcher = ""
        self.exit_code = 0
        self.summary: dict[str, Any] | None = None

    def child(self, command: list[str], **_options: Any) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(command)
        if self.exit_code == 0:
            base, _seed, task, *overrides = command[command.index(demo.MODEL_MAKER) + 1 :]
            recipe = load_recipe(demo.TASKS[task].recipe, overrides)
            assert held(recipe.folder) and recipe.model.path == base
            Path(recipe.sft.output).mkdir()
            Path(recipe.sft.output, "model.safetensors").write_text(f"of demo {len(self.commands)}")
        return subprocess.CompletedProcess(command, self.exit_code)

    def run(self, recipe: Recipe, resume: bool, *, console: object, lock: RunLock, launcher_name: str) -> int:
        assert held(recipe.folder) and not resume
        self.runs += 1
        self.launcher = launcher_name
        (recipe.folder / CONFIG_FILE).write_text(dump_recipe(recipe))
        if self.summary is None:
            return STOPPED
        (recipe.folder / "summary.json").write_text(json.dumps(self.summary))
        return 0


def held(folder: Path) -> bool:
    """Whether a process holds the lock of the run folder."""
    with open(folder / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    stage = Stage()
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=stage.child, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(demo, "run_recipe", stage.run)
    return stage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "demo"


def play(folder: Path, *overrides: str) -> int:
    return demo.main(0, [f"run.folder={folder}", *overrides])


def test_the_demo_runs_under_the_launcher_that_is_asked_for(stage: Stage, folder: Path) -> None:
    assert demo.main(0, [f"run.folder={folder}"], launcher_name="ray") == STOPPED and stage.launcher == "ray"


def test_every_file_is_in_the_run_folder(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_recipe(ARITHMETIC.recipe, demo.demo_settings(ARITHMETIC, 0, []))
    assert plain == load_recipe(ARITHMETIC.recipe), "the recipe as it is shipped"
    monkeypatch.chdir(tmp_path)
    assert demo.main(0, ["run.run_id=mine"]) == STOPPED and stage.launcher == "local"
    assert sorted(os.listdir("runs")) == ["mine"]
    assert {"data", "model", CONFIG_FILE} <= set(os.listdir("runs/mine"))


def test_an_earlier_demo_is_moved_and_its_recipe_still_names_its_own_files(stage: Stage, folder: Path) -> None:
    neighbour = str(folder) + "-2/reward.py"  # starts with the folder's name but is not inside it
    assert play(folder, f"reward.scorer={neighbour}:score") == STOPPED
    kept = folder.with_name("demo.1")
    models = []
    for _ in range(2):
        assert play(folder) == STOPPED
        recipe = load_resolved(kept / CONFIG_FILE)
        assert recipe.folder == kept
        for path in (recipe.model.path, recipe.data.train_file, recipe.data.eval_file, recipe.sft.train_file):
            assert kept in Path(path).parents and Path(path).exists()
        assert recipe.reward.scorer == f"{neighbour}:score"
        models.append(Path(recipe.model.path, "model.safetensors").read_text())
    assert sorted(os.listdir(folder.parent)) == ["demo", "demo.1", "demo.2"]
    assert models == ["of demo 1", "of demo 1"]
    assert Path(load_resolved(folder / CONFIG_FILE).model.path) == folder / "model"


@pytest.mark.parametrize("moment", ["warm-up", "run"])
def test_a_running_demo_is_left_alone(stage: Stage, folder: Path, moment: str) -> None:
    with RunLock(folder) as lock:
        if moment == "run":
            (folder / CONFIG_FILE).write_text("{}")
            lock.publish(RunAddress(pid=os.getpid(), redis_url="unix://nowhere", control="", token=""))
        before = sorted(os.listdir(folder))
        told = r"demo: another supervisor.* runs in it; .* choose another run\.folder"
        with pytest.raises(RunExistsError, match=told):
            play(folder)
        assert sorted(os.listdir(folder)) == before and os.listdir(folder.parent) == ["demo"]
    assert not stage.commands


def test_a_demo_that_ended_before_its_run_is_kept_too(stage: Stage, folder: Path) -> None:
    stage.exit_code = 2
    play(folder)
    stage.exit_code = 0
    assert play(folder) == STOPPED
    assert not (folder.with_name("demo.1") / CONFIG_FILE).exists()


def test_a_folder_with_other_files_is_refused(stage: Stage, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"not empty and holds no run; .* run\.folder"):
        play(folder)
    assert os.listdir(folder) == ["thesis.tex"]


def test_a_run_of_that_id_in_a_shared_redis_is_found_before_the_warm_up(
    stage: Stage, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_redis(tmp_path / "redis") as url:
        monkeypatch.setenv("TANDEM_REDIS_URL", url)
        with closing(Buffer(url, "demo")) as buffer:
            budget = {"infrastructure": 1, "data": 1}
            buffer.create(groups_per_batch=2, staleness_budget=0, target_groups=2, failure_budget=budget, resume=False)
        with pytest.raises(RunExistsError, match=r"run demo in Redis .* tandem demo run\.run_id=demo-2") as caught:
            play(folder)
        assert "--resume" not in str(caught.value)
        assert not folder.exists() and not stage.commands
        assert play(folder, "run.run_id=demo-2") == STOPPED
    with pytest.raises(EnvironmentLackError, match="cannot be reached"):
        play(folder)


def test_an_error_line_printed_by_a_child_is_not_repeated(
    stage: Stage, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.exit_code = 2
    assert play(folder) == 2
    assert len(stage.commands) == 1 and stage.runs == 0
    assert capfd.readouterr().err == ""
    stage.exit_code = 1
    with pytest.raises(TandemError, match="the warm-up failed with exit code 1"):
        play(folder)


def test_a_full_disk_while_model_or_data_are_written_is_a_one_line_error(
    stage: Stage, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(demo_model, "build_tiny_model", full)
    with pytest.raises(SystemExit) as ended:
        run_service(lambda: demo_model.make_model(tmp_path / "base", 0))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem: no space left on the disk of ")
    assert os.listdir(tmp_path) == []
    monkeypatch.setitem(demo.TASKS, "arithmetic", replace(ARITHMETIC, write_data=full))
    with pytest.raises(EnvironmentLackError, match=r"no space left on the disk of .*data"):
        play(folder)


def test_the_process_that_makes_the_model_ends_as_every_service_does(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_python("-m", "tandem.services.commands.demo_model", tmp_path / "file", 0)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"tandem: {tmp_path}/file: a file stands where a folder is needed; move it away, or write elsewhere"


FIGURES = {
    "initial_accuracy": 0.394,
    "final_accuracy": 0.998,
    "train_steps": 200,
    "weight_updates": 200,
    "weight_stall_seconds_mean": 0.0156,
    "mean_staleness": 1.99,
    "sampler_tokens_per_second": 2002.4,
    "trainer_tokens_per_second": 4758.0,
    "sampler_idle_fraction": 0.59,
    "trainer_idle_fraction": 0.02,
}


def test_the_table_shows_measured_and_missing_figures(
    stage: Stage, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for absent, expected in (
        (set(), ["39.4%", "99.8%", "200", "15.6 ms", "1.99", "2,002 · 4,758", "59% · 2%"]),
        ({"initial_accuracy", "sampler_idle_fraction"}, ["– ", "99.8%", "– · 2%"]),
    ):
        stage.summary = {name: None if name in absent else value for name, value in FIGURES.items()}
        assert play(folder) == 0
        said = capsys.readouterr().out
        assert all(words in said for words in expected), said
        assert f"tandem replay {folder} " in said and f"open {folder / 'report.html'} in a browser" in said


@pytest.mark.deploy
@pytest.mark.timeout(400)
def test_without_vllm_the_demo_samples_with_transformers_and_reports_it(tmp_path: Path) -> None:
    """vLLM is hidden from the demo's process and its children."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(lambda _, name, *rest: None if name == 'vllm' else find(name, *rest))\n"
    )
    warm_up = ["sft.max_steps=20", "sft.validate_every=20", "sft.target_accuracy=0"]
    small = ["run.total_batches=2", "run.groups_per_batch=4", *warm_up]
    done = run_tandem("demo", *small, cwd=tmp_path, seconds=300, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "sampling with transformers: vllm is not installed here (pip install 'tandem-rl[cpu]'" in done.stdout
    config = load_resolved(tmp_path / "runs" / "demo" / CONFIG_FILE)
    assert config.rollout.engine == "transformers"
    assert json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())["train_steps"] == 2


# ---- the task ----

digits = st.integers(0, 99)


@given(digits, digits)
def test_answers_that_ignore_the_carry_are_right_where_nothing_carries(a: int, b: int) -> None:
    carries = a % 10 + b % 10 >= 10 or a // 10 + b // 10 >= 10
    assert (sloppy_sum(a, b) == right_sum(a, b)) == (not carries)
    assert len(sloppy_sum(a, b)) == len(right_sum(a, b)) == 3


def test_the_sets_are_disjoint_and_determined_by_the_seed(tmp_path: Path) -> None:
    write_task(tmp_path / "a", seed=0)
    write_task(tmp_path / "b", seed=0)
    write_task(tmp_path / "c", seed=1)
    names = ("demonstrations", "train", "eval")
    tables = {name: pq.read_table(tmp_path / "a" / f"{name}.parquet") for name in names}
    questions = {name: {row["prompt"][0]["content"] for row in table.to_pylist()} for name, table in tables.items()}
    splits = {name: {row["extra_info"]["split"] for row in table.to_pylist()} for name, table in tables.items()}
    assert splits == {"demonstrations": {"train"}, "train": {"train"}, "eval": {"test"}}
    assert len(questions["eval"]) == EVALUATION_ROWS
    assert sum(map(len, questions.values())) == len(set().union(*questions.values())) == 10_000
    for name in names:
        assert tables[name].equals(pq.read_table(tmp_path / "b" / f"{name}.parquet"))
        assert not tables[name].equals(pq.read_table(tmp_path / "c" / f"{name}.parquet"))


def test_the_data_passes_the_check(tmp_path: Path) -> None:
    write_task(tmp_path, seed=0)
    report = check_file(tmp_path / "train.parquet")
    assert report.faults == []
    assert report.num_usable == report.num_rows


def test_demonstrated_games_are_random_and_each_guess_is_one_token(tmp_path: Path) -> None:
    guessing.write_task(tmp_path, seed=0)
    turns = pq.read_table(tmp_path / "demonstrations.parquet").to_pylist()
    said = [[message["content"] for message in turn["prompt"]] for turn in turns]
    truths = [turn["reward_model"]["ground_truth"] for turn in turns]
    for messages, truth in zip(said, truths, strict=True):
        assert truth not in messages[1::2], "a game guesses no number twice"
    numbers = Counter(truths)
    assert sorted(map(int, numbers)) == list(range(1, 16)) and max(numbers.values()) < 1.3 * min(numbers.values())
    after = {tuple(messages[1:]) for messages in said if messages[1:2] == ["8"] and len(messages) == 3}
    assert after == {("8", "higher"), ("8", "lower")}
    demo_model.make_model(tmp_path / "model", 0, GUESS_NUMBER)
    encoder = ChatEncoder(str(tmp_path / "model"))
    encoder.check_replies()
    longest = max(turns, key=lambda turn: len(turn["prompt"]))
    assert len(encoder.encode(longest["prompt"])) == 1 + 3 * 3, "each turn: a guess, its end, and the answer to it"
    assert check_file(tmp_path / "train.parquet").num_usable == 3000
