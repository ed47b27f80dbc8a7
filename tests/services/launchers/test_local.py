"""The launcher of a local run, beside what whole runs show of it."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest

from tandem.services.launchers.local import LocalLauncher
from tandem.services.launchers.process_group import ProcessGroup
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
