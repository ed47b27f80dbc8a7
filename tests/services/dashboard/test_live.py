"""What the page is told: the run's state as it changes, its curves, and that viewers share what is read."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.services.dashboard import charts
from tandem.services.dashboard.figures import thinned
from tandem.services.dashboard.run_source import RunSource
from tests.services.dashboard.conftest import Site, no_secret
from tests.support.made_up_run import line, make_run
from tests.support.redis_ring import offer


def test_the_state_follows_the_run(site: Site) -> None:
    browser = site.browser()
    browser.login(site.secret)
    first = browser.states(site.source.key, lambda state: True)[-1]
    assert first["phase"] == "running" and first["counts"]["prompts_waiting"] == 0
    assert [(one["name"], one["state"], one["restarts"]) for one in first["services"]] == [
        ("rollout-0", "running", 2),
        ("trainer", "running", 0),
    ]
    assert first["services"][0]["weights"] == "LIVE" and first["warnings"] == ["a <b>warning</b>"]
    assert first["progress"]["step"] == 3 and first["progress"]["accuracy"] == 0.75

    def work() -> None:
        assert len(offer(site.buffer, 2)) == 2
        with (site.source.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line(4)) + "\n")

    threading.Timer(0.2, work).start()
    browser.states(
        site.source.key, lambda state: state["counts"]["prompts_waiting"] == 2 and state["read"]["batches"] == 4
    )


def test_viewers_share_what_is_read(site: Site, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The second look waits until all have seen the first one, and the fourth until all have gone."""
    looks, allowed = [], threading.Semaphore(1)
    look = RunSource.look

    def counted(source: RunSource) -> dict[str, object]:
        assert allowed.acquire(timeout=60.0)
        looks.append(source)
        return look(source)

    monkeypatch.setattr(RunSource, "look", counted)
    browsers = [site.browser() for _ in range(6)]
    all_watch = threading.Barrier(len(browsers), lambda: allowed.release(2), timeout=60.0)

    def watch(browser) -> int:  # type: ignore[no-untyped-def]
        browser.login(site.secret)
        times = set[float]()

        def is_last(state: dict[str, Any]) -> bool:
            if not times:
                all_watch.wait()
            times.add(state["time"])
            return len(looks) >= 3

        browser.states(site.source.key, is_last)
        return len(times)

    with ThreadPoolExecutor(len(browsers)) as threads:
        seen = list(threads.map(watch, browsers))
    assert max(seen) <= len(looks) == 3, "six viewers cause no more looks than one"
    allowed.release(10)


def test_the_stream_ends_when_a_look_fails(site: Site, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    look, fails = RunSource.look, [False, True]

    def failing(source: RunSource) -> dict[str, object]:
        if fails and fails.pop(0):
            raise OSError("the disk is gone")
        return look(source)

    monkeypatch.setattr(RunSource, "look", failing)
    browser = site.browser()
    browser.login(site.secret)
    with pytest.raises((AssertionError, httpx.RemoteProtocolError), match=r"ended|incomplete"):
        browser.states(site.source.key, lambda state: False)
    assert browser.states(site.source.key, lambda state: True)[-1]["phase"] == "running"


def test_the_charts_and_their_data_have_the_same_lines(site: Site) -> None:
    browser = site.browser()
    browser.login(site.secret)
    browser.states(site.source.key, lambda state: True)
    charts = browser.http.get(f"/api/charts?run={site.source.key}&theme=dark").json()
    data = browser.http.get(f"/api/curves?run={site.source.key}").json()
    assert "Reward" in charts["titles"].values() and charts["shape"] == data["shape"] == list(data["lines"])
    assert data["lines"]["Reward/0/mean"]["value"] == [0.25, 0.5, 0.75]
    assert charts["shape"][0] in json.dumps(charts["documents"]), "the page finds a line by its key"


def test_a_run_that_nobody_watches_is_drawn_beside_another(site: Site, tmp_path: Path) -> None:
    other = RunSource(make_run(tmp_path / "other", "other", steps=2, redis_url="redis://127.0.0.1:1/0"), no_secret)
    drawn = charts.data([site.source.figures, other.figures])["lines"]
    assert drawn["Reward/1/mean"]["value"] == [0.25, 0.5]  # type: ignore[index]
    assert drawn["Reward/1/mean"]["name"] == ["other: mean"] * 2  # type: ignore[index]


def test_a_run_that_is_not_running_shows_what_its_folder_holds(tmp_path: Path) -> None:
    source = RunSource(make_run(tmp_path, "mine", redis_url="redis://127.0.0.1:1/0"), no_secret)
    source.recipe = source.recipe.model_copy(update={"run": source.recipe.run.model_copy(update={"redis_url": ""})})
    state = source.look()
    assert state["phase"] == "stopped" and state["services"] == [] and "'step': 3" in str(state["progress"])
    (source.folder / "summary.json").write_text(json.dumps({"groups": {"committed": 7}}))
    state = source.look()
    assert state["phase"] == "finished" and state["counts"] == {"committed": 7}


def test_a_redis_that_is_away_is_named_and_the_curves_stay(tmp_path: Path) -> None:
    source = RunSource(make_run(tmp_path, "mine", redis_url="redis://:word@127.0.0.1:1/0"), no_secret)
    state = source.look()
    assert "Redis at redis://127.0.0.1:1/0 cannot be reached" in str(state["fault"]) and "word" not in str(state)
    assert "'batches': 3" in str(state["read"])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_thinning_keeps_ends_and_extremes(values: list[float]) -> None:
    steps = [float(step) for step in range(len(values))]
    xs, ys = thinned((steps, values))
    assert len(xs) <= 302 and (xs[0], xs[-1]) == (0.0, steps[-1]) and xs == sorted(set(xs))
    assert (min(ys), max(ys)) == (min(values), max(values)) and all(
        values[int(x)] == y for x, y in zip(xs, ys, strict=True)
    )
