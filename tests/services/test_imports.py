"""The contract, every configuration, the client and every `--help` load no torch, no vllm, and few other libraries."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

import tandem
from tests.support.paths import ROOT
from tests.support.processes import run_python

LEARNING = {"torch", "vllm", "transformers", "deepspeed", "tensorboard"}
WIRES = {"grpc", "redis", "google.protobuf"}
LIBRARIES = {"cryptography", "numpy", "pyarrow", "rich", "psutil", "jinja2", "tandem.services.config"}
"""Not pydantic, which typer imports."""

TRAINER_OPTIONS = [
    f"tandem.trainer.{name}"
    for name in (
        *("algorithm", "config", "estimators.options", "named_options"),
        *("off_policy.options", "off_policy.presets", "policy_losses.options"),
    )
]
"""Modules with options of the algorithms, which must not import the algorithms."""

COMMANDS = [
    *([], ["demo"], ["run"], ["serve"], ["sft"], ["eval"], ["replay"], ["status"], ["ledger"], ["doctor"], ["config"]),
    *(["certs", "init"], ["data"], ["data", "check"], ["env"], ["env", "check"], ["reward"]),
    *(["reward", name] for name in ("score", "submit", "jobs", "results", "cancel", "scorers", "serve")),
]


def loaded_by(code: str) -> set[str]:
    """Names of all modules that a fresh process has loaded after running `code`."""
    program = f"import sys, json\n{code}\njson.dump(sorted(sys.modules), sys.__stdout__)"
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


CONFIGURATIONS = [
    *("tandem.rollout.config", "tandem.reward.config", "tandem.trainer.config", "tandem.services.config"),
    *TRAINER_OPTIONS,
]
LIGHT = [
    *CONFIGURATIONS,
    *(f"tandem.protos.{name}" for name in ("types", "errors", "contracts", "codec", "manifest", "scratch_folder")),
    *(f"tandem.trainer.batch.{name}" for name in ("balance", "packing", "planning", "selection")),
    *("tandem.rollout.vllm.engine_folder", "tandem.services.config.docs", "tandem.services.run.preflight"),
    *("tandem.services.launchers.supervisor", "tandem.services.commands.doctor"),
]


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [(LIGHT, LEARNING), (CONFIGURATIONS, WIRES | {"numpy", "pyarrow"})],
    ids=["no torch and no vllm", "no wires"],
)
def test_the_contract_and_every_configuration_load_no_heavy_libraries(modules: list[str], heavy: set[str]) -> None:
    """Imports all at once; only if that loads a heavy library, imports each alone to name the module."""
    if loaded_by(f"import {', '.join(modules)}") & heavy:
        found = {module: sorted(loaded_by(f"import {module}") & heavy) for module in modules}
        assert not any(found.values()), {module: names for module, names in found.items() if names}


def test_a_client_loads_grpc_and_protobuf_and_none_of_the_service() -> None:
    assert not {name for name in loaded_by("import tandem") if name.startswith("tandem.")}
    loaded = loaded_by("from tandem import AsyncRewardClient, RewardClient, ScoreItem")
    heavy = LEARNING | LIBRARIES | {"pydantic", "redis", "sympy", "typer", "tandem.services.rpc.server"}
    assert not loaded & heavy
    assert not {name for name in loaded if name.startswith(("tandem.reward", "tandem.rollout", "tandem.trainer"))}


def test_every_name_that_tandem_exports_exists() -> None:
    assert [name for name in tandem.__all__ if getattr(tandem, name, None) is None] == []
    assert set(tandem.__all__) <= set(dir(tandem))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = tandem.Nothing


def test_preflight_checks_load_no_torch() -> None:
    """The checks of `tandem run` import neither torch nor transformers nor vllm, so they answer fast."""
    code = """
import pathlib, tempfile
from tests.support.run_inputs import recipe_of, small_values
from tandem.services.run.preflight import check_recipe
with tempfile.TemporaryDirectory() as folder:
    check_recipe(recipe_of(small_values(pathlib.Path(folder))), resume=False)
"""
    assert not loaded_by(code) & LEARNING


def test_help_loads_no_heavy_libraries() -> None:
    code = f"""
import contextlib, io
from tandem.services import cli
for command in {COMMANDS!r}:
    sys.argv = ["tandem", *command, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        cli.main()
    assert "Usage: tandem" in said.getvalue()
"""
    assert not loaded_by(code) & (LEARNING | WIRES | LIBRARIES)


def test_a_trainer_loads_no_tracker_before_the_recipe_asks_for_one_and_can_load_mlflow_then() -> None:
    """In one process, because DeepSpeed takes seconds to import."""
    code = """
import tandem.services.trainer.service, tandem.trainer.backend.deepspeed.engine
assert "deepspeed" in sys.modules and not sys.modules.keys() & {"mlflow", "wandb"}
"""
    if find_spec("mlflow") is None:
        loaded_by(code)
        pytest.skip("the last import needs mlflow")
    assert "mlflow" in loaded_by(code + "import mlflow")


WITH_EXPORTS = {"services/config", "services/clients"}
"""Packages that re-export names, because all their modules load nearly the same libraries."""


def test_package_files_are_empty_so_that_one_import_loads_one_module() -> None:
    for package in ("protos", "rollout", "reward", "trainer", "services"):
        for file in (ROOT / package).rglob("__init__.py"):
            if str(file.parent.relative_to(ROOT)) not in WITH_EXPORTS:
                assert file.read_text() == "", file
