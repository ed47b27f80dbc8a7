"""The launcher of a local run, beside what whole runs show of it."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path

import pytest

from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.local import LocalLauncher
from tandem.services.launchers.process_group import ProcessGroup
from tandem.services.launchers.supervisor import child_specs
from tandem.services.run import threads
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values


def test_a_sampler_that_cannot_drain_is_named(redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of(small_values(tmp_path), run={"server_name": "localhost"})
    processes = ProcessGroup(report=print)
    with closing(new_run(redis_url)) as buffer, caplog.at_level(logging.WARNING, "tandem"):
        buffer.register_sampler("rollout-1", "127.0.0.1:1", 1)
        LocalLauncher("local", recipe, buffer, processes, lambda recipe: [])
        processes.drain("rollout-1")
    assert "rollout-1 leaves without draining" in caplog.text


def test_environment_services_get_the_numbers_that_those_started_by_hand_do_not_have(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"path": "a:B", "service": True, "num_replicas": 2}
    recipe = recipe_of(small_values(tmp_path), environment=environment)
    processes = ProcessGroup(report=print)
    ordered: dict[str, list[ChildSpec]] = {}
    monkeypatch.setattr(processes, "set_replicas", ordered.__setitem__)
    with closing(new_run(redis_url)) as buffer:
        launcher = LocalLauncher("local", recipe, buffer, processes, lambda scaled: child_specs(scaled, redis_url))
        first = launcher.first_children({"rollout": 1, "environments": 2})
        processes.add(first)
        assert {"rollout-0", "environments-0", "environments-1"} < {spec.name for spec in first}
        for name in ("environments-1", "environments-2", "rollout-9"):
            buffer.register_service(name, "127.0.0.1:1")
        launcher.check("environments", 4)
        launcher.set_replicas("environments", 4)
    assert ordered.keys() == {"environments"}, "the samplers stay as they are"
    commands = {spec.name: spec.command[-4:] for spec in ordered["environments"]}
    assert commands == {
        f"environments-{n}": ("environments", str(recipe.folder / "config.json"), "--replica", str(n))
        for n in (0, 1, 3, 4)
    }


def test_it_is_said_that_the_threads_of_further_samplers_share_cores(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(threads, "gpu_ids", lambda: ())
    said: list[str] = []
    recipe = recipe_of(small_values(tmp_path), trainer={"num_threads": 3}, rollout={"num_threads": 2})
    with closing(new_run(redis_url)) as buffer:
        launcher = LocalLauncher("local", recipe, buffer, ProcessGroup(report=said.append), lambda recipe: [])
        launcher.first_children({"rollout": 1})  # of a run that began on three cores
        assert said == ["trainer.num_threads stays 3: 3 threads share the 2 cores of this machine"]
        launcher.set_replicas("rollout", 3)
        assert said[1:] == ["rollout.num_threads stays 2: 6 threads share the 2 cores of this machine"]
        launcher.set_replicas("rollout", 2)
        launcher.set_replicas("environments", 2)
        assert len(said) == 2
