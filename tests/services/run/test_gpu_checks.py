"""Which GPUs a run, or one service of it, asks a machine for."""

from __future__ import annotations

import pytest

from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.services.run import preflight
from tandem.services.run.preflight import check_recipe, check_service
from tests.support.run_inputs import Values, recipe_of

pytestmark = pytest.mark.usefixtures("plain_machine")


@pytest.fixture
def torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "torch_version", lambda: "2.13.0")


@pytest.mark.usefixtures("torch_for_gpus")
def test_nccl_needs_a_gpu_for_every_process(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_ids", lambda: ("0", "1"))
    check_recipe(recipe_of(values, weights={"backend": "nccl"}), resume=False)
    crowded = recipe_of(values, weights={"backend": "nccl"}, rollout={"num_replicas": 2})
    with pytest.raises(ConfigError, match=r"needs 3 GPUs .* shows 2"):
        check_recipe(crowded, resume=False)


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_an_image_for_cpus_is_refused_where_gpus_are_asked_for(
    values: Values, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(preflight, "gpu_ids", lambda: ("0", "1"))
    monkeypatch.setattr(preflight, "torch_version", lambda: "2.13.0+cpu")
    with pytest.raises(EnvironmentLackError, match=r"needs torch for GPUs, and 2\.13\.0\+cpu is installed"):
        check_recipe(recipe_of(values, weights={"backend": backend}), resume=False)
    with pytest.raises(EnvironmentLackError, match="use the images gpu-rollout and gpu-trainer"):
        check_service(recipe_of(values, weights={"backend": backend}), "rollout", 0)


@pytest.mark.usefixtures("torch_for_gpus")
def test_a_service_of_its_own_needs_only_its_own_gpus(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_ids", lambda: ("0", "1"))
    spread = recipe_of(values, weights={"backend": "nccl"}, trainer={"num_ranks": 2}, rollout={"num_replicas": 8})
    for service in ("trainer", "rollout"):
        check_service(spread, service, 0)
    crowded = recipe_of(values, weights={"backend": "nccl"}, trainer={"num_ranks": 3})
    with pytest.raises(ConfigError, match=r"needs 3 GPUs \(trainer\.num_ranks\), this machine shows 2"):
        check_service(crowded, "trainer", 0)
    check_service(crowded, "rollout", 0)
