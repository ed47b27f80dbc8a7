"""The wheel: its files in site-packages, and a client that scores with only the base requirements installed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from tandem import RewardClient, Scored, ScoreItem
from tests.support.paths import ROOT
from tests.support.reward_process import running_reward
from tests.support.wheels import SOURCES, build_wheel, copy_sources, fresh_environment, with_extra

pytestmark = pytest.mark.slow

SCORE = """
import sys
from tandem import RewardClient, Scored, ScoreItem

items = [ScoreItem("test", str(number), "1") for number in range(3)]
with RewardClient(sys.argv[1]) as client:
    scores = client.score(items, '[[components]]\\nscorer = "exact"')
assert all(isinstance(score, Scored) for score in scores), scores
print(*(score.value for score in scores))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_sources(folder / "sources"), folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> tuple[Path, Path]:
    """The interpreter and the site-packages of an environment with the base installation."""
    return fresh_environment(tmp_path_factory.mktemp("base"), wheel)


def run_in(base: tuple[Path, Path], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [base[0], "-I", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_wheel_has_every_file_of_the_sources_under_one_name(wheel: Path) -> None:
    sources = wheel.parent / "sources"
    expected = {
        path if name == "tandem" else Path("tandem") / path
        for name in SOURCES
        for path in (file.relative_to(sources) for file in (sources / name).rglob("*") if file.is_file())
    }
    packed = {Path(name) for name in ZipFile(wheel).namelist()}
    info = {path for path in packed if path.parts[0].endswith(".dist-info")}
    assert packed - info == expected
    assert {path.suffix for path in expected} == {
        ".py",
        ".pyi",
        ".proto",
        ".lua",
        ".typed",
        ".j2",
        ".html",
        ".css",
        ".js",
        ".svg",
    }


def test_the_base_installation_puts_one_name_into_site_packages(base: tuple[Path, Path]) -> None:
    names = {path.name for path in base[1].iterdir()}
    packages = {name for name in names if not name.endswith((".dist-info", ".py"))}
    assert packages == {"anyio", "google", "grpc", "idna", "tandem"}


def test_a_base_installation_scores_on_a_running_service(base: tuple[Path, Path], tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    script.write_text(SCORE)
    with running_reward() as address:
        done = run_in(base, script, address)
    assert (done.stdout, done.stderr) == ("0.0 1.0 0.0\n", "")


def test_the_command_in_a_base_installation_names_the_pip_command(base: tuple[Path, Path]) -> None:
    for arguments in (["--help"], ["run", "recipe.toml"], ["reward", "serve"]):
        done = run_in(base, base[0].parent / "tandem", *arguments)
        assert done.returncode == 2 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("tandem: typer is not installed; install it: pip install 'tandem-rl[")


def test_the_reward_extra_serves_and_its_errors_name_the_training_extra(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    environment = with_extra(tmp_path / "environment", base[0].parents[1], "reward")
    command = environment[0].parent / "tandem"
    process = subprocess.Popen(
        [environment[0], "-I", command, "reward", "serve", "--port", "0", "--folder", tmp_path / "jobs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with RewardClient(address) as client:
            scores = client.score([ScoreItem("test", r"\boxed{1/2}", "0.5")], '[[components]]\nscorer = "math_verify"')
        assert [score.value for score in scores if isinstance(score, Scored)] == [1.0]
    finally:
        process.terminate()
        process.wait(20)
    done = run_in(environment, command, "run", ROOT / "examples/recipes/gsm8k.toml")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(
        "tandem: torch is not installed; install it: pip install 'tandem-rl[cpu]'"
    )
