"""What environments have started ends with their process, whoever is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.protos.errors import EpisodeError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool
from tests.support.paths import ROOT
from tests.support.processes import has_ended, wait_until_gone

STARTS = "tests.support.environments:Starts"
SAMPLER = f"""
import asyncio, sys
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool

async def main():
    pool = EnvironmentPool(EnvironmentConfig(path="{STARTS}", arguments={{"file": sys.argv[1]}}))
    await pool.start()
    environment = await pool.open("one")
    await environment.reset({{}}, seed=0, episode_id="one")
    print("begun", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_it_ends_with_a_sampler_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "started"
    sampler = subprocess.Popen([sys.executable, "-c", SAMPLER, str(file)], cwd=ROOT, stdout=subprocess.PIPE)
    assert sampler.stdout is not None and sampler.stdout.readline() == b"begun\n"
    started = int(file.read_text())
    assert not has_ended(started)
    sampler.kill()
    sampler.communicate(timeout=10.0)
    wait_until_gone(started)


def test_it_ends_when_the_process_of_the_environment_that_was_killed_starts_again(tmp_path: Path) -> None:
    file = tmp_path / "started"

    async def main() -> tuple[int, int]:
        pool = EnvironmentPool(EnvironmentConfig(path=STARTS, arguments={"file": str(file)}))
        await pool.start()
        try:
            first = await pool.open("one")
            await first.reset({}, seed=0, episode_id="one")
            started = int(file.read_text())
            with pytest.raises(EpisodeError, match="process has ended"):
                await first.step({}, deadline=float("inf"), idempotency_key="one/0")
            second = await pool.open("two")
            await second.reset({}, seed=0, episode_id="two")
            return started, int(file.read_text())
        finally:
            await pool.close()

    for started in asyncio.run(main()):
        wait_until_gone(started)
