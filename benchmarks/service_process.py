"""Starts the servers that a benchmark measures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.buffer.buffer import Buffer  # noqa: E402
from tandem.services.config import dump_recipe, parse_recipe  # noqa: E402
from tandem.services.run.redis_child import RedisChild  # noqa: E402

SAMPLER = "rollout-0"
TANDEM = (sys.executable, "-m", "tandem.services.cli")
START_SECONDS = 120.0


@contextmanager
def reward_service(num_workers: int, settings: str, options: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """A reward service with these lines in `[reward]` and these options: its address and process id."""
    with tempfile.TemporaryDirectory(prefix="tandem-reward-") as folder:
        file = Path(folder) / "service.toml"
        file.write_text(f"[reward]\nnum_workers = {num_workers}\n{settings}\n")
        command = [*TANDEM, "reward", "serve", str(file), "--port", "0", "--folder", f"{folder}/redis", *options]
        with listening(command) as found:
            yield found


@contextmanager
def rollout_service(folder: Path, values: Mapping[str, object]) -> Iterator[tuple[Buffer, subprocess.Popen[bytes]]]:
    """A sampler of the recipe with these values, which has version 0, in a run that admits any number of groups."""
    recipe = parse_recipe(values)
    config = folder / "config.json"
    config.write_text(dump_recipe(recipe))
    with RedisChild(folder, report=print) as redis, closing(Buffer(redis.url, recipe.run.run_id)) as buffer:
        budget, most = {"infrastructure": 1, "data": 1}, 1_000_000
        buffer.create(
            groups_per_batch=most, staleness_budget=0, target_groups=most, failure_budget=budget, resume=False
        )
        incarnation = buffer.begin_incarnation()
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": redis.url}
        process = subprocess.Popen([*TANDEM, "serve", "rollout", str(config)], cwd=ROOT, env=variables)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not buffer.samplers():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the service did not start")
                time.sleep(0.1)
            buffer.publish(incarnation, 0, [SAMPLER])
            yield buffer, process
        finally:
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""}


@contextmanager
def listening(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Starts a command that prints `listens on ADDRESS`: the address and the process id. Ends it on exit."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as process:
        timer = threading.Timer(START_SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if "listens on " in line:
                    break
            else:
                raise SystemExit(f"{' '.join(command)} did not start:\n{''.join(said)}")
            timer.cancel()
            yield line.split()[-1], process.pid
        finally:
            timer.cancel()
            process.terminate()
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()
