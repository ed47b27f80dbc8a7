"""No command prints a password or key, and no file holds one that other users may read."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from tandem.protos.errors import ScorerError
from tandem.protos.secret_values import masked, without_passwords
from tandem.reward.config import DeclaredScorer, RewardConfig
from tandem.reward.registry import SCORERS, make_scorer
from tandem.reward.scoring import ScoringCore
from tandem.services.buffer.buffer import Buffer
from tandem.services.cli import app
from tandem.services.config import load_recipe, without_secrets
from tandem.services.config.docs import keys
from tandem.services.config.recipe import JobsConfig
from tandem.services.reward.server import scorer_list
from tests.support.redis_ring import running_redis
from tests.support.run_inputs import small_values

SECRET = "sEcReT"
PASSWORD = f"{SECRET}/{SECRET}:{SECRET}@{SECRET}?{SECRET}#{SECRET} {SECRET}%&="
"""Every character that means something in a URL, with a part to look for after each."""


@pytest.mark.parametrize("password", [PASSWORD, quote(PASSWORD, safe=""), SECRET])
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:{}@host:6379/0", "redis://user:***@host:6379/0"),
        ("rediss://:{}@host/1?ssl_ca_certs=ca.pem", "rediss://:***@host/1?ssl_ca_certs=ca.pem"),
        ("unix://user:{}@/run/redis.sock?db=0", "unix://user:***@/run/redis.sock?db=0"),
        ("http://a/b:{}@proxy", "http://a/b:***@proxy"),
    ],
)
def test_a_password_in_a_url_is_masked(url: str, shown: str, password: str) -> None:
    assert without_passwords(url.format(password)) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://host?password={SECRET}&db=1", "redis://host?password=***&db=1"),
        (f"rediss://host?ssl_password={SECRET}", "rediss://host?ssl_password=***"),
        (f"https://host/v1?api_key={SECRET}", "https://host/v1?api_key=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0"),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
        ("dir/scorer.py:compute_score", "dir/scorer.py:compute_score"),
    ],
)
def test_secrets_in_parameters_are_masked_and_nothing_else(url: str, shown: str) -> None:
    assert without_passwords(url) == shown


def test_texts_under_secret_names_are_masked_at_any_depth() -> None:
    values = {"a": [{"api_key": SECRET, "api_key_env": "NAME"}], "token": [SECRET, SECRET], "n": 1, "key": "kept"}
    shown = {"a": [{"api_key": "***", "api_key_env": "NAME"}], "token": ["***", "***"], "n": 1, "key": "kept"}
    assert masked(values) == shown


def test_no_key_of_a_recipe_or_scorer_has_the_name_of_a_secret() -> None:
    """Else its value could not be read in what `tandem config` prints."""
    names = [key.name for key in keys()] + [name for kind in SCORERS.values() for name in kind.model_fields]
    assert len(names) > 100
    assert masked(dict.fromkeys(names, "text")) == dict.fromkeys(names, "text")


# ---- commands ----


@pytest.fixture
def function(tmp_path: Path) -> str:
    """A scorer that takes any arguments."""
    (tmp_path / "scorer.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info, **options): ..."
    )
    return f"{tmp_path / 'scorer.py'}:score"


@pytest.fixture
def recipe_file(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with secrets wherever one may stand."""
    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    values = small_values(tmp_path)
    values["run"]["redis_url"] = f"redis://user:{PASSWORD}@127.0.0.1:1/0"
    declared = {"scorer": function, "arguments": {"token": SECRET, "base_url": f"https://me:{SECRET}@host/v1"}}
    values["reward"] = {"scorers": {"mine": declared}, "arguments": {}}
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(values))
    return file


def said(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_config_masks_secrets(recipe_file: Path, form: tuple[str, ...]) -> None:
    _, output = said("config", str(recipe_file), *form)
    assert SECRET not in output
    assert "redis://user:***@127.0.0.1:1/0" in output and "https://me:***@host/v1" in output


def test_a_masked_recipe_differs_in_its_secrets_only(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    shown = without_secrets(recipe)
    same = {"run": {"redis_url"}, "reward": {"scorers"}}
    assert shown.model_dump(exclude=same) == recipe.model_dump(exclude=same)
    assert SECRET not in shown.model_dump_json()


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.redis_ur=redis://user:{}@host"],
        ["redis_url=redis://user:{}@host"],
        ['run.redis_url=["redis://user:{}@host"]'],
        ["run.redis_url.password={}"],
        ["reward.arguments.password.b.c={}", "reward.arguments.password={}"],
        ["api_key={}"],
        ['run.host=["http://user:{}@host"]'],
    ],
)
def test_errors_about_overrides_mask_secrets(recipe_file: Path, arguments: list[str]) -> None:
    code, output = said("config", str(recipe_file), *(one.format(PASSWORD) for one in arguments))
    assert code == 2 and SECRET not in output, output


@pytest.mark.parametrize("url", [f"htps://me:{PASSWORD}@host", f"https://me:{PASSWORD}@host", f"h ://me:{SECRET}@h"])
def test_errors_about_a_judges_address_mask_its_password(url: str) -> None:
    with pytest.raises(ScorerError, match="base_url") as refused:
        make_scorer("judge", {"base_url": url, "model": "any"})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("command", ["run", "status", "ledger", "doctor", "eval"])
def test_commands_that_connect_mask_secrets(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("tandem.services.commands.doctor.probe_imports", lambda: {"error": "not asked"})
    monkeypatch.setenv("TANDEM_REDIS_URL", f"redis://user:{quote(PASSWORD, safe='')}@127.0.0.1:1/0")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(recipe_file.read_text())
    arguments = {
        "run": [str(recipe_file)],
        "status": [str(tmp_path / "run")],
        "ledger": [str(tmp_path / "run")],
        "doctor": [],
        "eval": [str(recipe_file)],
    }
    _, output = said(command, *arguments[command])
    assert output and SECRET not in output


def test_no_other_user_reads_the_secret_of_a_run_in_the_files_of_redis(tmp_path: Path) -> None:
    for parent in (tmp_path, tmp_path / "redis"):
        parent.mkdir(exist_ok=True)
        parent.chmod(0o755)  # as an earlier version left it
    with running_redis(tmp_path) as url, closing(Buffer(url, "run")) as buffer:
        secret = buffer.secret().encode()
        holders = [file for file in tmp_path.rglob("*") if file.is_file() and secret in file.read_bytes()]
    assert holders, "the append-only file holds it"
    for file in holders:
        above = [file, *file.relative_to(tmp_path).parents]
        assert any((tmp_path / place).stat().st_mode & 0o077 == 0 for place in above[:-1]), file


def test_callers_of_a_service_do_not_learn_the_keys_of_its_scorers(function: str) -> None:
    reward = RewardConfig(
        scorer=function,
        arguments={"api_key": SECRET, "base": f"http://me:{PASSWORD}@host", "shown": 1},
        scorers={"mine": DeclaredScorer(scorer="exact", arguments={})},
    )
    core = ScoringCore(reward, start=False)
    try:
        told = scorer_list(core, reward, JobsConfig())
    finally:
        core.close()
    assert SECRET not in str(told)
    assert "***" in told.default_rubric and "shown = 1" in told.default_rubric
