"""Waits for a place in a Ray cluster end, and say what is missing. Stand-ins take the place of the cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.protos.errors import EnvironmentLackError
from tandem.services.launchers import ray_child, ray_cluster
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.ray_bundles import Bundle
from tests.support.run_inputs import recipe_of

VALUES: dict[str, dict[str, Any]] = {"run": {"run_id": "x"}, "model": {"path": "m"}, "data": {"train_file": "t"}}


@pytest.mark.parametrize(
    ("lack", "said"),
    [
        ("the run wants 1 sampler of 2 GPUs; the cluster has 1 GPU free", None),
        ("", "the cluster has room for it; Ray's logs may say why"),
    ],
)
def test_a_service_without_a_place_ends_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lack: str, said: str | None
) -> None:
    method = SimpleNamespace(remote=object)  # a call that never begins
    actor, killed = SimpleNamespace(start=method, wait=method), list[object]()
    monkeypatch.setattr(ray_child, "ray", SimpleNamespace(wait=lambda calls, timeout: ([], calls), kill=killed.append))
    child = ray_child.RayChild(ChildSpec("rollout-1", (), tmp_path / "log"), lambda: actor, lambda: lack)
    child.start()
    assert child.exit_code() is None and child.alive, "it may wait for minutes"
    monkeypatch.setattr(ray_child, "START_SECONDS", 0.0)
    assert child.exit_code() == 2 and killed == [actor] and not child.alive
    assert child.last_lines(9) == [f"tandem: its actor did not start in 0 s: {said or lack}"]


def test_a_run_does_not_wait_for_ever_for_a_cluster_that_others_occupy(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"Alive": True, "NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 16.0}}
    here = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    stand_in = SimpleNamespace(nodes=lambda: [machine], remote=lambda actor: actor, util=here)
    monkeypatch.setattr(ray_cluster, "ray", stand_in)
    monkeypatch.setattr(ray_cluster, "check_machine", lambda *_: None)
    monkeypatch.setattr(ray_cluster, "_free", lambda: [Bundle(0.5)])
    monkeypatch.setattr(ray_cluster, "_ROOM_SECONDS", 0.05)
    monkeypatch.setattr(ray_cluster, "_POLL_SECONDS", 0.01)
    lack = r"^the run wants .*2 samplers of .* CPU each.*; the cluster has 0\.5 CPU free after 0\.05 s; end"
    with pytest.raises(EnvironmentLackError, match=lack):
        ray_cluster.RayCluster().fitted(recipe_of(VALUES, rollout={"num_replicas": 2}), None)
