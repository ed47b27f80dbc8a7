"""Users' functions see the variables that they may need, and none of the service's secrets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.protos.child_environment import child_environment, drop_secrets
from tandem.protos.contracts import Scored, ScoreItem
from tandem.protos.errors import ConfigError
from tandem.protos.secret_values import is_secret_name
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore, validate
from tandem.reward.workers.child_process import LineProcess
from tandem.services.launchers.children import LocalChild
from tandem.services.launchers.supervisor import child_specs
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.run_inputs import recipe_of, small_values
from tests.support.waiting import eventually

SECRETS = {
    "TANDEM_TOKEN": "secret-1",
    "TANDEM_REDIS_URL": "redis://127.0.0.1:1/0",
    "TANDEM_JUDGE_API_KEY": "secret-2",
    "OPENAI_API_KEY": "secret-3",
    "HF_TOKEN": "secret-4",
    "AWS_SECRET_ACCESS_KEY": "secret-5",
    "DB_PASSWORD": "secret-6",
    "PYTHON_SIGNING_SECRET": "secret-7",
    "https_proxy": "http://user:secret-8@127.0.0.1:1",
    "SOME_COMPANY_SETTING": "secret-9",
}
NEEDED = {
    "OMP_NUM_THREADS": "1",
    "HF_HOME": "/nowhere",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "LC_ALL": "C.UTF-8",
    "http_proxy": "http://127.0.0.1:1",
    "TANDEM_LOG_LEVEL": "INFO",
    "TANDEM_PROCESS_MARK": "a:b",
}
SCORER = """
import json, os, subprocess, sys
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
def compute_score(data_source, solution_str, ground_truth, extra_info, file):
    child = json.loads(subprocess.run([sys.executable, "-c", SHOW], capture_output=True, check=True).stdout)
    own = open("/proc/self/environ").read().split("\\0")
    with open(file, "w") as out:
        json.dump([dict(os.environ), dict(one.split("=", 1) for one in own if one), child], out)
    return 1.0
"""


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECRETS | NEEDED).items():
        monkeypatch.setenv(name, value)


def seen_by_a_scorer(folder: Path, *declared: str) -> list[Mapping[str, str]]:
    """The variables of a user's function, those its process was started with, and those of its own child."""
    (folder / "scorer.py").write_text(SCORER)
    arguments = {"file": str(folder / "seen.json")}
    scorer = f"{folder / 'scorer.py'}:compute_score"
    with closing(ScoringCore(RewardConfig(scorer=scorer, arguments=arguments, environment=declared))) as core:
        assert core.score(core.default, [ScoreItem("", "", "")], "ring") == [Scored(1.0)]
    seen: list[Mapping[str, str]] = json.loads((folder / "seen.json").read_text())
    return seen


def test_a_scorer_sees_no_secret_and_all_it_needs(tmp_path: Path) -> None:
    for seen in seen_by_a_scorer(tmp_path):
        assert not set(SECRETS.values()) & set(seen.values())
        assert {name: seen.get(name) for name in NEEDED} == NEEDED
        assert seen["PATH"] == os.environ["PATH"]


def test_a_scorer_sees_what_the_recipe_declares(tmp_path: Path) -> None:
    for seen in seen_by_a_scorer(tmp_path, "OPENAI_API_KEY", "SOME_COMPANY_SETTING"):
        shown = {name for name, value in SECRETS.items() if seen.get(name) == value}
        assert shown == {"OPENAI_API_KEY", "SOME_COMPANY_SETTING"}


@pytest.mark.parametrize("name", ["SURELY_NOT_SET", "", "A=B"])
def test_a_declared_variable_that_is_not_set_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.environment: the environment variable .* is not set"):
        validate(RewardConfig(environment=(name,)))


def test_the_process_of_a_reward_model_sees_no_secret(tmp_path: Path) -> None:
    (tmp_path / "shows_environment.py").write_text(
        "import json, os, socket\n"
        "def main(descriptor, parent):\n"
        "    with socket.socket(fileno=descriptor) as channel:\n"
        "        channel.sendall(json.dumps(dict(os.environ)).encode() + b'\\n')\n"
    )
    with closing(LineProcess("shows_environment", {"PYTHONPATH": str(tmp_path), "ADDED": "yes"})) as process:
        (seen,) = process.receive(30.0)
    assert not set(SECRETS.values()) & set(seen.values())
    assert seen["ADDED"] == "yes" and seen["OMP_NUM_THREADS"] == "1"


def test_what_a_sampler_starts_sees_no_secret_but_the_hub_token(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(small_values(tmp_path)))
    show = (
        "import subprocess; from tandem.services import cli; from tandem.services.commands import serve; "
        "serve._serve = lambda *_: subprocess.run(['env']).returncode"
    )
    done = run_python(
        "-c",
        f"{show}; cli.app(['serve', 'rollout', {str(recipe)!r}, '--replica', '0'])",
        PYTHONPATH=str(ROOT),
        TANDEM_PARENT_PID=str(os.getpid()),
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert "PATH" in seen, done.stderr
    shown = {name for name, value in SECRETS.items() if seen.get(name) == value}
    assert shown == {"HF_TOKEN", "https_proxy", "SOME_COMPANY_SETTING"}


def test_only_the_reward_service_of_a_run_gets_the_keys_of_judges(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.toml"
    rubric.write_text(
        '[[components]]\nname = "a"\nscorer = "judge"\narguments = { api_key_env = "OPENAI_API_KEY" }\n'
        '[[components]]\nname = "b"\nscorer = "judge"\narguments = { api_key_env = "HF_TOKEN" }\n'
    )
    mine = {"scorer": "judge", "arguments": {"api_key_env": "DB_PASSWORD"}}
    reward = {"rubric": str(rubric), "scorers": {"mine": mine}}
    recipe = recipe_of(small_values(tmp_path), reward=reward)
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    judges = {"OPENAI_API_KEY", "DB_PASSWORD"}
    for spec in child_specs(recipe, "unix:///nowhere"):
        child = LocalChild(replace(spec, command=(sys.executable, "-c", show)), "token")
        child.start()
        eventually(lambda child=child: child.exit_code() is not None)
        seen = json.loads(child.last_lines(1)[0])
        shown = {name for name in (*judges, "HF_TOKEN") if name in seen}
        assert shown == ({*judges, "HF_TOKEN"} if spec.name == "reward" else {"HF_TOKEN"}), spec.name


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("X_KEY", "x-api-key", "token", "HF_TOKEN", "MY_KEYS", "apiKey", "pgPassword")),
        *((name, True) for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLIENT_SECRET", "MYSQL_PASSWD")),
        *(
            (name, False)
            for name in ("TOKENIZERS_PARALLELISM", "api_key_env", "max_tokens_per_row", "KEYBOARD", "PATH")
        ),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_no_variable_of_this_process_is_passed_by_accident() -> None:
    """The list is what it says: all others, whatever they are called, stay here."""
    passed = child_environment()
    assert passed.items() <= os.environ.items()
    assert not any(is_secret_name(name) for name in passed) and "TANDEM_REDIS_URL" not in passed


def test_a_sampler_keeps_the_variables_of_its_environments_and_no_other_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    judge = {"scorer": "judge", "arguments": {"api_key_env": "OPENAI_API_KEY"}}
    environment = {"path": "a:B", "variables": ["OPENAI_API_KEY"]}
    recipe = recipe_of(small_values(tmp_path), reward={"scorers": {"judge": judge}}, environment=environment)
    withheld = {spec.name: spec.withheld for spec in child_specs(recipe, "unix:///none")}
    assert withheld["rollout-0"] == withheld["reward"] == frozenset() and withheld["feed"] == {"OPENAI_API_KEY"}
    served = recipe.model_copy(update={"environment": recipe.environment.model_copy(update={"service": True})})
    withheld = {spec.name: spec.withheld for spec in child_specs(served, "unix:///none")}
    assert withheld["environments-0"] == frozenset() and withheld["rollout-0"] == {"OPENAI_API_KEY"}
    drop_secrets(recipe.environment.variables)
    kept = child_environment(recipe.environment.variables, "environment.variables")
    assert kept["OPENAI_API_KEY"] == SECRETS["OPENAI_API_KEY"]
    assert "OPENAI_API_KEY" not in child_environment() and "AWS_SECRET_ACCESS_KEY" not in os.environ
    with pytest.raises(ConfigError, match=r"^environment\.variables: the environment variable 'UNSET' is not set"):
        child_environment(["UNSET"], "environment.variables")
