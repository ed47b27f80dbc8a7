"""docs/reward.md: its commands print what it shows, it names every scorer, limit and error, and the examples work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.protos import reward_pb2
from tandem.reward.config import RewardConfig
from tandem.reward.rubric.rubric import Catalogue, Rubric
from tandem.services.config.recipe import ServiceConfig, load_service_config
from tandem.services.reward.wire import error_of
from tests.support.reward_page import PAGE, ROOT, commands_of, followed, remote_scorers

TEXT = PAGE.read_text(encoding="utf-8")
RUBRICS = sorted((ROOT / "examples" / "rubrics").glob("*.toml"))
CONFIG = ROOT / "examples" / "reward_service.toml"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.M | re.S)


def commands() -> list[str]:
    return [command for block in blocks("console") for command in commands_of(block)]


@pytest.mark.timeout(300)
def test_commands_and_programs_print_what_the_page_shows() -> None:
    """`python -m tests.support.reward_page` rewrites the page."""
    assert followed().splitlines() == TEXT.splitlines()


def test_every_call_is_shown_with_grpcurl() -> None:
    shown = {
        word.rpartition("/")[2]
        for one in commands()
        if one.startswith("grpcurl")
        for word in shlex.split(one.partition("<<")[0])
    }
    service = reward_pb2.DESCRIPTOR.services_by_name["RewardService"]
    assert set(service.methods_by_name) <= shown


def test_every_cause_of_a_stream_error_is_named_with_its_class() -> None:
    named = {cause: kind for cause, kind in re.findall(r"`(\w+)`\s\(`(\w+Error)`\)", TEXT)}
    for field in reward_pb2.StreamError.DESCRIPTOR.oneofs_by_name["cause"].fields:
        message = reward_pb2.StreamError()
        getattr(message, field.name).SetInParent()
        assert named.pop(field.name) == type(error_of(message)).__name__
    assert not named


def test_every_command_is_shown() -> None:
    shown = {tuple(one.split()[1:3]) for one in commands() if one.startswith("tandem")}
    named = ("score", "submit", "jobs", "results", "cancel", "delete", "scorers", "serve")
    assert {("reward", name) for name in named} == shown


def test_clients_are_generated_from_protos_alone(tmp_path: Path) -> None:
    (line,) = [line for line in TEXT.replace("\\\n", "").splitlines() if line.startswith("protoc ")]
    words = [word for word in shlex.split(line) if not word.startswith(("--go", "protoc"))]
    assert words == ["-I", ".", "protos/reward.proto"]
    (tmp_path / "protos").mkdir()
    (tmp_path / words[-1]).write_text((ROOT / words[-1]).read_text())
    done = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *words, "--descriptor_set_out=out"],
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and (tmp_path / "out").stat().st_size > 0


def test_the_page_explains_every_key_of_a_rubric() -> None:
    from tandem.reward.rubric.rubric import _ComponentTable, _File

    keys = TEXT.partition("\nOf a component:\n")[2].partition("\n`examples/rubrics/` has")[0]
    explained = {name for head in re.findall(r"^- ([^:]+):", keys, re.M) for name in re.findall(r"`(\w+)`", head)}
    models = (_ComponentTable, _File)
    assert explained == {info.alias or name for model in models for name, info in model.model_fields.items()}


def test_every_reason_is_explained() -> None:
    from typing import get_args

    from tandem.protos.contracts import UnscoredReason

    reasons = TEXT.partition("\n## Errors\n")[2].partition("<!--")[0]
    assert set(re.findall(r"^- `(\w+)`:", reasons, re.M)) == {*get_args(UnscoredReason), "cancelled"}


def test_every_limit_is_explained() -> None:
    assert "): ?" not in TEXT


def test_links_lead_to_headings() -> None:
    headings = {re.sub(r"[^a-z -]", "", one.lower()).replace(" ", "-") for one in re.findall(r"^#+ (.*)$", TEXT, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_settings_shown_are_those_of_the_example() -> None:
    shown = [block for block in blocks("toml") if "reward.scorers" in block]
    assert shown and all(block in CONFIG.read_text() for block in shown)


@pytest.mark.parametrize("file", RUBRICS, ids=lambda file: file.stem)
def test_every_rubric_may_be_sent_by_a_client(file: Path) -> None:
    declared = load_service_config(CONFIG).reward if file.stem == "judged" else RewardConfig()
    rubric = Rubric.parse(file.read_text(), allowed=replace(Catalogue.of(declared), for_clients=True))
    assert rubric.components
    head = file.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert re.search(rf"tandem reward (score|submit) answers\.\w+ --rubric examples/rubrics/{file.name}", head)


def test_the_example_configuration_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_service_config(CONFIG)
    assert isinstance(config, ServiceConfig) and set(config.reward.scorers) == {"gsm8k_rule", "helpfulness"}
    named = [
        config.reward.rubric,
        *(one.scorer.partition(":")[0] for one in config.reward.scorers.values() if ":" in one.scorer),
    ]
    assert all((ROOT / name).is_file() for name in named)
    used = {
        table["scorer"] for table in tomllib.loads((ROOT / "examples/rubrics/judged.toml").read_text())["components"]
    }
    assert used == set(config.reward.scorers)
    assert config.reward.scorers["helpfulness"].scorer in remote_scorers()
