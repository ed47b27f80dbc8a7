"""Samplers that are killed between the intent of an unsafe call and its outcome."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.types import SamplingParameters, TrajectoryGroup
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.services.buffer.buffer import Buffer
from tandem.services.reward.service import ScoringWorker
from tests.support.episodes import prompt_of
from tests.support.redis_ring import new_run
from tests.support.unsafe_tools import VARIABLE, calls

GROUPS, SAMPLES, KILLS, TIMEOUT = 50, 3, 20, 60.0
pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it has not happened in time"
        time.sleep(0.01)


def score_all(buffer: Buffer) -> None:
    """Scores what is generated, until all groups are."""
    config = RewardConfig(scorer="earned", min_scored_samples=1)
    with closing(ScoringCore(config)) as core:
        worker, stop = ScoringWorker(buffer, core, config), threading.Event()
        thread = threading.Thread(target=worker.run, args=(stop,), daemon=True)
        thread.start()
        try:
            wait(lambda: buffer.counts()["generated_waiting"] + buffer.counts()["generated_leased"] == 0)
        finally:
            stop.set()
            thread.join(TIMEOUT)


def test_no_unsafe_call_is_made_twice_and_no_group_lost_when_samplers_are_killed_in_its_middle(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "calls"
    file.touch()
    monkeypatch.setenv(VARIABLE, str(file))
    sampling = SamplingParameters(max_tokens=4000)
    prompts = [replace(prompt_of(number), num_samples=SAMPLES, sampling=sampling) for number in range(GROUPS)]
    with closing(new_run(redis_url, groups_per_batch=GROUPS, infrastructure=10, data=0)) as buffer:
        offered = [(one.group_id, encode_group(TrajectoryGroup(one))) for one in prompts]
        assert buffer.admit(offered, GROUPS) == GROUPS

        def sampler() -> subprocess.Popen[bytes]:
            arguments = (redis_url, buffer.run_id, str(tmp_path))
            return subprocess.Popen([sys.executable, "-m", "tests.support.unsafe_sampler", *arguments])

        def paid() -> int:
            return sum(tool == "pay" for tool, *_ in calls(file))

        for _ in range(KILLS):  # no payment ends, so each kill interrupts those of at most two groups
            process, before = sampler(), paid()
            wait(lambda: paid() > before or process.poll() is not None)  # noqa: B023
            assert process.poll() is None, "the sampler has ended by itself"
            process.kill()
            process.wait(TIMEOUT)
        Path(f"{file}.paid").touch()
        process = sampler()
        try:
            wait(lambda: buffer.counts()["generated_waiting"] == GROUPS or process.poll() is not None)
        finally:
            process.terminate()
            assert process.wait(TIMEOUT) == 0
        score_all(buffer)
        assert buffer.verify() == [] and buffer.counts()["dropped"] == 0
        incarnation = buffer.begin_incarnation()
        scored: list[str] = []
        while len(scored) < GROUPS and (more := buffer.claim_scored(incarnation, GROUPS, 5.0)):
            scored += [one.group_id for one in more]
        groups = [decode_group(payload) for payload in buffer.read(scored)]
    keys = Counter(key for tool, _, key in calls(file) if tool == "pay")
    assert max(keys.values()) == 1, "each (episode, turn, call) at most once"
    rows = [row for group in groups for row in group.scored_rows]
    assert len(rows) == GROUPS * SAMPLES
    unscored = [row for row in rows if row.reward is None]
    assert KILLS <= len(unscored) < len(rows)
    assert all("its outcome is unknown" in row.unscored_detail for row in unscored)
    turns = Counter(tuple(key.split("/")[:2] + key.split("/")[3:4]) for key in keys)
    assert max(turns.values()) == 1, "no turn of a trajectory paid again in another episode"
