"""The answers of a run: found by words, shown by token and as text whatever they hold, with what became of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tandem.protos.codec import EncodedGroups, encode_group
from tandem.protos.errors import DataError
from tandem.protos.types import TrajectoryGroup
from tandem.services.dashboard.samples import Samples
from tandem.trainer.batch.record import record_folder, write_advantages, write_record
from tandem.trainer.batch.rejected import Rejection, rejected_folder, write_rejected
from tests.services.dashboard.conftest import Site
from tests.support.made_up_run import ANSWER
from tests.support.paths import ROOT
from tests.support.run_inputs import write_model
from tests.support.training_groups import make_batch, make_group


def record(folder: Path, version: int, groups: list[TrajectoryGroup]) -> None:
    batch = replace(make_batch(groups)[0], policy_version=version)
    write_record(folder, batch, EncodedGroups.of({group.group_id: encode_group(group) for group in groups}))


def saying(index: int, *texts: str, rewards: list[float | None]) -> TrajectoryGroup:
    """A group with these answers. Those without a reward timed out."""
    group = make_group(index, num_samples=len(texts), rewards=rewards)
    rows = []
    for row, text in zip(group.scored_rows, texts, strict=True):
        late = {"unscored_reason": "timeout", "unscored_detail": "after 5 s"} if row.reward is None else {}
        rows.append(replace(row, trajectory=replace(row.trajectory, text=text), **late))
    return replace(group, rows=tuple(rows))


def found(samples: Samples, words: str = "", fate: str = "", version: int | None = None) -> list[str]:
    rows = samples.search(words, fate, version, 0)["rows"]
    assert isinstance(rows, list)
    return [row["answer"] for row in rows]


def test_words_fate_and_version_find_answers(tmp_path: Path) -> None:
    record(tmp_path, 1, [saying(0, "the quick fox", "a slow fox", rewards=[1.0, 0.0])])
    record(
        tmp_path, 2, [saying(1, "quickly now", "same", rewards=[0.5, 0.5]), saying(2, "x", "late", rewards=[1.0, None])]
    )
    samples = Samples(tmp_path, tmp_path)
    assert found(samples, "fox quick") == ["the quick fox"] and set(found(samples, "quick")) == {
        "the quick fox",
        "quickly now",
    }
    assert found(samples, fate="unscored") == ["late"] and set(found(samples, fate="equal rewards")) >= {"same"}
    assert set(found(samples, version=1)) == {"the quick fox", "a slow fox"}
    record(tmp_path, 3, [saying(3, "a new fox", "b", rewards=[1.0, 0.0])])
    assert found(samples, "fox")[0] == "a new fox", "the index grows with the run, the newest first"


@pytest.mark.parametrize("words", ['"', "a OR", "NEAR(", "*", "answer:x", "-", "';--", "(", "\x00", ANSWER])
def test_any_words_can_be_searched_for(tmp_path: Path, words: str) -> None:
    record(tmp_path, 1, [saying(0, ANSWER, "b", rewards=[1.0, 0.0])])
    assert found(Samples(tmp_path, tmp_path), words) in ([], [ANSWER], [ANSWER, "b"])


def test_an_answer_is_shown_with_what_became_of_it(tmp_path: Path) -> None:
    group = saying(0, "right", "late", rewards=[1.0, None])
    record(tmp_path, 4, [group])
    write_advantages(tmp_path, 4, {(group.group_id, 0): 0.75})
    model = write_model(tmp_path / "model")
    samples = Samples(tmp_path, model)
    shown = samples.answer(4, group.group_id, 0)
    assert (shown["fate"], shown["reward"], shown["advantage"], shown["others"]) == (
        "equal rewards",
        1.0,
        0.75,
        [1.0, None],
    )
    late = samples.answer(4, group.group_id, 1)
    assert (late["fate"], late["reward"], late["unscored"]) == ("unscored", None, ["timeout", "after 5 s"])
    with pytest.raises(DataError, match="holds no answer"):
        samples.answer(4, group.group_id, 9)


def test_the_page_names_every_fate_and_says_what_it_means() -> None:
    script = (ROOT / "services" / "dashboard" / "static" / "samples.js").read_text()
    (fates,) = re.findall(r"^const FATES = {$(.*?)^};$", script, re.MULTILINE | re.DOTALL)
    dropped = {reason.replace("_", " ") for reason in get_args(Rejection)}
    named = set(re.findall(r'^  "?([a-z ]+)"?: "\S.*",$', fates, re.MULTILINE))
    assert named == {"trained", "equal rewards", "unscored", "baseline"} | dropped


def reject(folder: Path, version: int, reason: Rejection, group: TrajectoryGroup) -> None:
    write_rejected(folder, version, group.group_id, reason, encode_group(group))


def test_rejected_answers_are_found_before_and_after_their_batch_is_recorded(tmp_path: Path) -> None:
    samples = Samples(tmp_path, tmp_path)
    reject(tmp_path, 1, "zero_variance", saying(0, "dull", "also dull", rewards=[1.0, 1.0]))
    assert found(samples, fate="zero variance") == found(samples, fate="zero variance") == ["dull", "also dull"]
    reject(tmp_path, 1, "too_few_scored_rows", saying(1, "late", "later", rewards=[None, None]))
    record(tmp_path, 1, [saying(2, "a", "b", rewards=[1.0, 0.0])])
    assert set(found(samples)) == {"dull", "also dull", "late", "later", "a", "b"}
    assert set(found(samples, fate="unscored")) == {"late", "later"}
    shown = samples.answer(1, "0-1", 1)
    assert (shown["fate"], shown["dropped"], shown["unscored"]) == (
        "unscored",
        "too few scored rows",
        ["timeout", "after 5 s"],
    )
    (record_folder(tmp_path, 1) / "groups.arrow").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        samples.answer(1, "0-2", 0)


def test_a_damaged_file_of_a_rejected_group_hides_no_other(tmp_path: Path) -> None:
    reject(tmp_path, 1, "stale", saying(0, "old", rewards=[1.0]))
    (rejected_folder(tmp_path, 1) / "0-7.stale").write_bytes(b"torn")
    assert found(Samples(tmp_path, tmp_path)) == ["old"]


def test_hostile_answers_reach_the_page_as_json(site: Site) -> None:
    browser = site.browser()
    browser.login(site.secret)
    place = f"/api/runs/{site.source.key}/samples"
    listed = browser.http.get(place, params={"words": "script"})
    assert listed.headers["Content-Type"] == "application/json" and listed.json()["found"] > 0
    row = listed.json()["rows"][0]
    one = browser.http.get(f"{place}/{row['version']}/{row['group_id']}/{row['number']}").json()
    assert one["answer"] == ANSWER
    assert browser.http.get(f"{place}/3/../../x/0").status_code == 404
    assert browser.http.get(f"{place}/99/0-0/0").status_code == 400


def test_events_and_jobs_are_for_sessions_only(site: Site) -> None:
    browser = site.browser()
    for path in ("events", "jobs", "samples", "samples/1/0-0/0"):
        assert browser.http.get(f"/api/runs/{site.source.key}/{path}").status_code == 401
    browser.login(site.secret)
    with (site.source.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 5e9, "text": "rollout-0 died <script>"}) + "\n")
    browser.states(site.source.key, lambda state: state["read"]["event"] == 5e9)
    events = browser.http.get(f"/api/runs/{site.source.key}/events").json()["events"]
    assert events[0] == {"time": 5e9, "kind": "launcher", "text": "rollout-0 died <script>"}
    told = {event["text"] for event in events if event["kind"] == "evaluation"}
    failed = "0 of 8 samples have a score, fewer than eval.min_scored = 0.9: 8 timeout"
    assert {"version 3: test: accuracy 75.0 %", f"version 2: test: {failed}"} < told
    assert "no reward" in browser.http.get(f"/api/runs/{site.source.key}/jobs").json()["error"]
