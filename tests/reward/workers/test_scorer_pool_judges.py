"""Judges kept by worker processes: functions of several files, batches, coroutines, and harmful modules."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.registry import ScorerSpec, make_spec
from tandem.reward.workers import worker_process
from tandem.reward.workers.pool import ScorerPool
from tandem.reward.workers.requests import Request
from tests.reward.workers.conftest import Make, items, reason, value


def test_a_worker_keeps_the_judges_of_several_scorers(pool: ScorerPool, spec: ScorerSpec) -> None:
    regex = make_spec("regex", {"pattern": "(.)"})
    first = value(pool.score(spec, items("pid"))[0])
    assert pool.score(regex, items("1", "2")) == [Scored(1.0), Scored(0.0)]
    assert value(pool.score(spec, items("pid"))[0]) == first


def test_functions_of_two_folders_run_in_separate_processes(pool: ScorerPool, tmp_path: Path) -> None:
    specs = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "shared.py").write_text(f"VALUE = {number}\n")
        (folder / "score.py").write_text("import shared\n\ndef f(**item):\n    return shared.VALUE\n")
        specs.append(make_spec(f"{folder}/score.py:f", {}))
    for _ in range(2):
        assert [pool.score(spec, items("x")) for spec in specs] == [[Scored(1.0)], [Scored(2.0)]]


def test_a_batch_function_gets_batches_and_only_the_failing_item_is_unscored(make_pool: Make, trouble: str) -> None:
    pool = make_pool(timeout_seconds=1.0)
    spec = make_spec(trouble.replace("compute_score", "together"), {})
    texts = ["1"] * 40
    texts[5], texts[17], texts[30] = "exit", "hang", "raise"
    scores = pool.score(spec, items(*texts))
    assert [reason(scores[n]) for n in (5, 17, 30)] == ["crashed", "timeout", "crashed"]
    good = [score for n, score in enumerate(scores) if n not in (5, 17, 30)]
    assert all(isinstance(score, Scored) and score.value == 1.0 for score in good)
    assert max(score.breakdown["batch"] for score in good if isinstance(score, Scored)) > 1
    assert [reason(score) for score in pool.score(spec, items("1", "length"))] == ["crashed"] * 2


def test_coroutines_run_concurrently_and_only_a_blocking_one_is_unscored(make_pool: Make, tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(
        "import asyncio, time\n"
        "async def f(solution_str, **item):\n"
        "    if solution_str == 'block':\n"
        "        time.sleep(600)\n"
        "    await asyncio.sleep(600 if solution_str == 'hang' else 0.01)\n"
        "    return 1.0\n"
    )
    pool, spec = make_pool(timeout_seconds=1.0), make_spec(f"{tmp_path}/later.py:f", {})
    texts = ["1"] * 24
    texts[10], texts[20] = "hang", "block"
    scores = pool.score(spec, items(*texts))
    assert scores[10] == Unscored("timeout", "no answer within 0.9 s")
    assert scores[20] == Unscored("timeout", "no answer within 1 s")
    assert [n for n, score in enumerate(scores) if score != Scored(1.0)] == [10, 20]


def test_many_crashes_leak_no_descriptors(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool(2)
    launcher = psutil.Process(value(pool.score(spec, items("pid"))[0])).parent()
    assert launcher is not None
    pool.score(spec, items(*["exit"] * 4, "1", "1", "1"))
    here, there = psutil.Process().num_fds(), launcher.num_fds()
    pool.score(spec, items(*["exit"] * 26, "1", "1", "1"))
    assert psutil.Process().num_fds() <= here + 4 and launcher.num_fds() <= there + 2
    assert len(launcher.children()) <= 2 and pool.replaced_workers == 30


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=40), st.integers(1, 12))
def test_chunks_never_split_a_group(groups: list[str], size: int) -> None:
    spec = ScorerSpec("by_group", "{}", "worker", grouped=True)
    request = Request(
        spec, [ScoreItem("", str(n), None, group=group) for n, group in enumerate(groups)], "calls", lambda: None
    )
    chunks = []
    while request.todo:
        chunk = request.cut(size)
        if len(chunks) % 2:  # a chunk that was put back comes again as a whole
            request.put_back(chunk)
            assert request.cut(size)[: len(chunk)] == chunk[: len(chunk)]
        chunks.append(chunk)
    assert sorted(number for chunk in chunks for number in chunk) == list(range(len(groups)))
    homes: dict[str, set[int]] = {}
    for place, chunk in enumerate(chunks):
        for number in chunk:
            homes.setdefault(groups[number], set()).add(place)
    assert all(len(places) == 1 for group, places in homes.items() if group)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import os\nos._exit(7)\n", "the scoring process exited with code 7"),
        ("import time\ntime.sleep(600)\n", "no answer within 1.5 s"),
        ("raise SystemExit(0)\n", "does not import: SystemExit"),
        ("x = b'1' * (1 << 40)\n", "does not import: MemoryError"),
    ],
)
def test_a_module_that_kills_or_hangs_the_process_on_import(
    pool: ScorerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    (tmp_path / "bad.py").write_text(source)
    spec = make_spec(f"{tmp_path}/bad.py:f", {})
    pool.load(make_spec("regex", {"pattern": "."}))  # the launcher is up
    monkeypatch.setattr(worker_process, "STARTUP_SECONDS", 1.5)
    with pytest.raises(ScorerError) as caught:
        pool.load(spec)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    (score,) = pool.score(spec, items("1"))
    assert reason(score) == "infrastructure" and told in score.detail  # type: ignore[union-attr]


def test_a_file_can_have_the_name_of_a_tandem_module(
    make_pool: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**everything):\n    return 0.75\n")
    monkeypatch.chdir(tmp_path)
    assert make_pool().score(make_spec("reward.py:compute_score", {}), items("1")) == [Scored(0.75)]
