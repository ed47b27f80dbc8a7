"""A real run whose services were started by hand, beside a controller with the launcher `none`."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.redis_ring import running_redis
from tests.support.whole_run import UNHURRIED, WholeRun

pytestmark = pytest.mark.system


def said(run: WholeRun) -> str:
    return (run.scratch / "run.out").read_text()


def ordered(run: WholeRun, *arguments: str) -> str:
    done = run.tandem(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_a_run_started_by_hand_is_steered_and_all_its_services_end_with_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis_url = stack.enter_context(running_redis(tmp_path / "redis"))
        run = WholeRun(
            tmp_path,
            run={"total_batches": 100_000, "redis_url": redis_url},
            rollout={"engine": "transformers", "max_response_tokens": 32},
            reward=UNHURRIED,
            trainer={"checkpoint_every": 100},
        )
        folder = str(run.folder)

        def serve(service: str, *arguments: str) -> subprocess.Popen[str]:
            process = run.start("serve", service, str(run.recipe), *arguments)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        services = {name: serve(name) for name in ("feed", "reward", "trainer", "controller")}
        services["rollout-0"] = serve("rollout", "--replica", "0")
        leaver = serve("rollout", "--replica", "1")
        trainer = services["trainer"]
        run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == 2, trainer)
        second = run.tandem("serve", "controller", str(run.recipe))
        assert second.returncode == 2 and "has a controller already, at 127.0.0.1:" in second.stdout + second.stderr
        assert ordered(run, "drain", folder, "rollout-1") == "rollout-1 finishes its groups and leaves\n"
        assert leaver.wait(90) == 0, said(run)[-3000:]
        run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == 1, trainer)
        assert ordered(run, "stop", folder) == "the run stops\n"
        assert {name: process.wait(60) for name, process in services.items()} == dict.fromkeys(services, 0)
        assert run.ledger()["violations"] == [] and max(run.instances().values()) == 1
