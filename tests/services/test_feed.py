"""The feed against a real Redis: order, cursor, credits, and its end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import DataError
from tandem.protos.types import TrajectoryGroup
from tandem.services import feed_service
from tandem.services.buffer import connection
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe, parse_recipe
from tandem.services.feed_service import Feed, PromptStream, epoch_order
from tandem.services.process import in_thread
from tandem.services.run.endpoint import service_endpoint
from tandem.services.service_info import ServiceInfo
from tests.support.dataset_files import chat_folder, verl_row, write_lines
from tests.support.redis_ring import (
    SAMPLER,
    claim,
    move,
    new_run,
    offer,
    restore_keys,
    running_redis,
    saved_keys,
    train,
)
from tests.support.service_wire import check_what_it_says
from tests.support.waiting import eventually, looping


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Callable[..., Recipe]:
    def make(rows: list[object], seed: int = 0, **data: object) -> Recipe:
        file = write_lines(tmp_path / "train.jsonl", rows)
        return parse_recipe(
            {
                "run": {"run_id": "feed-test", "seed": seed},
                "model": {"path": str(model)},
                "data": {"train_file": str(file), "max_prompt_tokens": 100, **data},
                "rollout": {"samples_per_prompt": 3, "max_response_tokens": 7, "stop": ["!"], "temperature": 0.5},
            }
        )

    return make


def questions(number: int) -> list[object]:
    return [verl_row(f"{n}", str(n)) for n in range(number)]


@pytest.fixture
def redis_folder_url(memory_folder: Path) -> Iterator[tuple[int, str]]:
    """Pid and URL of a server of this test alone."""
    with running_redis(memory_folder) as url, closing(redis.Redis.from_url(url)) as client:
        yield client.info("server")["process_id"], url


@contextmanager
def feeding(buffer: Buffer, stream: PromptStream) -> Iterator[Feed]:
    feed = Feed(buffer, stream)
    with looping(feed.run):
        yield feed


def positions(stream: PromptStream, number: int) -> list[str]:
    taken: list[str] = []
    while len(taken) < number and not stream.finished:
        run = stream.run(number - len(taken))
        taken += [prepared.group_id for prepared in run]
        stream.advance(len(run))
    return taken


def test_order_is_fixed_by_seed_and_epoch() -> None:
    # Literal values, so that a resumed run keeps its order under any version of this software or numpy.
    assert epoch_order(7, 0, 10).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in (-1, 0, 1, 2**40) for epoch in range(3)}
    assert len(orders) == 12
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_a_stream_is_the_same_from_any_position(recipe: Callable[..., Recipe]) -> None:
    settings = recipe(questions(10), seed=3)
    whole = positions(PromptStream(settings, 0), 25)
    assert sorted(whole[:10]) == [f"0-{n}" for n in range(10)] and sorted(whole[10:20]) == [f"1-{n}" for n in range(10)]
    assert [name.split("-")[1] for name in whole[:10]] != [name.split("-")[1] for name in whole[10:20]]
    assert positions(PromptStream(settings, 7), 18) == whole[7:]
    unshuffled = positions(PromptStream(recipe(questions(10), shuffle=False), 0), 12)
    assert unshuffled == [*(f"0-{n}" for n in range(10)), "1-0", "1-1"]


def test_skipped_rows_split_the_stream_into_runs(
    recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    rows = questions(8)
    rows[2] = rows[3] = "broken"
    rows[6] = verl_row("x" * 200, "1")
    stream = PromptStream(recipe(rows, shuffle=False), 0)
    runs = []
    for _ in range(4):
        run = stream.run(100)[:5]
        runs.append([prepared.position for prepared in run])
        stream.advance(len(run))
    assert runs == [[0, 1], [4, 5], [7, 8, 9], [12, 13]]
    reasons = {index: fault.reason for index, fault in stream.faults.items()}
    assert reasons == {2: "malformed", 3: "malformed", 6: "too_long"}
    assert caplog.text.count("is skipped") == 3  # once per row, not per epoch


def test_a_dataset_without_a_usable_row_is_an_error_not_a_hang(recipe: Callable[..., Recipe]) -> None:
    for position in (0, 2):
        with pytest.raises(DataError, match="no usable row"):
            PromptStream(recipe([verl_row("a", None)] * 3), position).run(1)


def test_rows_that_are_set_aside_are_skipped_in_later_epochs_of_any_mixture(
    tmp_path: Path, recipe: Callable[..., Recipe]
) -> None:
    stream = PromptStream(recipe(questions(4), shuffle=False), 0)
    assert positions(stream, 6) == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1"]
    stream.set_aside(["0-1", "0-2"])
    assert positions(stream, 4) == ["1-3", "2-0", "2-3", "3-0"]
    halves = [{"path": str(tmp_path / "train.jsonl"), "weight": 0.5}]
    stream = PromptStream(recipe(questions(4), shuffle=False, train_file="", train=halves), 0)
    assert positions(stream, 4) == ["0-0", "0-1", "1-0", "1-1"]
    stream.set_aside(["1-0"])
    assert positions(stream, 5) == ["2-0", "2-1", "3-1", "4-0", "4-1"], "row 2 is read in every second epoch"


def test_a_dataset_whose_rows_are_all_set_aside_is_an_error_not_a_hang(recipe: Callable[..., Recipe]) -> None:
    stream = PromptStream(recipe([*questions(2), verl_row("a", None)]), 3)
    stream.set_aside(["0-0", "0-1"])
    with pytest.raises(DataError, match=r"no usable row left: the prompts of 2 rows .*; see `tandem ledger RUN --dro"):
        stream.run(1)


def test_a_prompt_that_always_fails_costs_one_epoch_its_attempts_also_after_a_restart(
    redis_url: str, recipe: Callable[..., Recipe]
) -> None:
    buffer = new_run(redis_url, groups_per_batch=3, staleness_budget=0, target_groups=12)
    settings = recipe(questions(3), shuffle=False)

    def next_three(fails: str) -> list[str]:
        eventually(lambda: buffer.counts()["prompts_waiting"] == 3)
        claims = claim(buffer, "prompts", 3)
        for one in claims:
            if one.group_id == fails:
                assert buffer.release(one, "crashed", "data", "ValueError") == "dropped"
            else:
                buffer.complete(one, one.payload)
        move(buffer, "generated", 3)
        incarnation = buffer.begin_incarnation()
        scored = buffer.claim_scored(incarnation, 3, 0)
        buffer.drop_claimed(incarnation, [one.group_id for one in scored], "rejected")
        buffer.register_sampler(SAMPLER, "127.0.0.1:1", 1)
        buffer.publish(incarnation, 0, [SAMPLER])
        return [one.group_id for one in claims]

    with feeding(buffer, PromptStream(settings, 0)):
        assert next_three("0-1") == ["0-0", "0-1", "0-2"]
        assert next_three("") == ["1-0", "1-2", "2-0"]
    with feeding(buffer, PromptStream(settings, buffer.admission().cursor)):
        assert next_three("") == ["2-2", "3-0", "3-2"]
    assert buffer.counts()["dropped:crashed"] == 1 and buffer.verify() == []
    buffer.close()


def test_admits_under_the_limiter_and_marks_the_target(redis_url: str, recipe: Callable[..., Recipe]) -> None:
    buffer = new_run(redis_url, groups_per_batch=4, staleness_budget=1, target_groups=10)
    with feeding(buffer, PromptStream(recipe(questions(6)), 0)) as feed:
        eventually(lambda: feed.admitted == 8)
        eventually(lambda: feed.figures()["waiting_seconds"] > 0.05)
        assert feed.admitted == 8 and feed.activity == "waiting for credits"
        first = claim(buffer, "prompts", 8)
        group = decode_group(first[0].payload)
        assert group.group_id == first[0].group_id and group.prompt.num_samples == 3
        assert (group.prompt.sampling.max_tokens, group.prompt.sampling.temperature) == (7, 0.5)
        assert group.prompt.sampling.stop == ("!",) and group.prompt.ground_truth == str(group.prompt.index)
        incarnation = buffer.begin_incarnation()
        for one in first[:3]:  # two dropped groups would leave room for two more
            assert buffer.complete(one, one.payload)
        assert [buffer.release(one, "timeout", "data") for one in first[3:5]] == ["dropped", "dropped"]
        eventually(lambda: feed.admitted == 10)
        assert buffer.admission().wanted == 2 and buffer.counts()["dropped:timeout"] == 2
        buffer.drop_outstanding(incarnation, "end")
        eventually(lambda: feed.admitted > 12)
    assert buffer.verify() == []


def test_a_reached_target_reopens_only_when_a_group_is_dropped(redis_url: str, recipe: Callable[..., Recipe]) -> None:
    buffer = new_run(redis_url, groups_per_batch=2, staleness_budget=1, target_groups=3)
    with feeding(buffer, PromptStream(recipe(questions(6)), 0)) as feed:
        eventually(lambda: feed.activity == "the run has all the groups it needs")
        (crashing,) = claim(buffer, "prompts")
        assert feed.admitted == 3 and not buffer.exhausted()
        assert len(move(buffer, "prompts", 9)) == len(move(buffer, "generated", 9)) == 2
        assert not buffer.exhausted()
        assert buffer.release(crashing, "crashed", "data") == "dropped"
        eventually(lambda: feed.admitted == 4)
        assert len(move(buffer, "prompts", 9)) == len(move(buffer, "generated", 9)) == 1
        eventually(buffer.exhausted)


def test_the_end_of_the_data_ends_the_feed(redis_url: str, recipe: Callable[..., Recipe]) -> None:
    buffer = new_run(redis_url, groups_per_batch=8, staleness_budget=1, target_groups=100)
    rows = [*questions(5), "broken"]
    with feeding(buffer, PromptStream(recipe(rows, max_epochs=2), 0)) as feed:
        eventually(lambda: "last epoch" in feed.activity)
        assert feed.admitted == 10 and feed.figures()["rows_skipped:malformed"] == 1
        move(buffer, "prompts", 10)
        assert not buffer.exhausted()
        move(buffer, "generated", 10)
        assert buffer.exhausted()


def test_a_restarted_feed_resumes_where_it_stopped(redis_url: str, recipe: Callable[..., Recipe]) -> None:
    rows = questions(9)
    rows[4] = "broken"
    settings = recipe(rows, seed=11)
    expected = positions(PromptStream(settings, 0), 20)
    buffer = new_run(redis_url, groups_per_batch=3, staleness_budget=0, target_groups=20)
    seen: list[str] = []
    while len(seen) < 20:
        with feeding(buffer, PromptStream(settings, buffer.admission().cursor)):
            eventually(lambda: buffer.counts()["outstanding"] > 0)  # also of the feed before, as it stopped
            seen += retired(buffer)
    assert seen == expected
    assert buffer.verify() == []


def test_a_feed_whose_admissions_redis_has_lost_admits_the_same_rows_again(
    redis_url: str, recipe: Callable[..., Recipe]
) -> None:
    rows = questions(9)
    rows[4] = "broken"
    settings = recipe(rows, max_epochs=1)
    buffer = new_run(redis_url, groups_per_batch=6, staleness_budget=1, target_groups=20)
    begun = saved_keys(buffer)
    with feeding(buffer, PromptStream(settings, 0)) as feed:
        eventually(lambda: feed.admitted == 8)
        restore_keys(buffer, begun)
        eventually(lambda: feed.admitted == 16)
        assert buffer.counts()["admitted"] == 8
        eventually(lambda: b"feed_done" in buffer.connection.hash("meta"))
        buffer.connection.redis.hdel(buffer.connection.key("meta"), "feed_done")  # the mark alone is lost
        eventually(lambda: b"feed_done" in buffer.connection.hash("meta"))
        assert move(buffer, "prompts", 20) == positions(PromptStream(settings, 0), 20)
    assert buffer.verify() == []


def test_nothing_is_admitted_after_another_position_than_the_saved_one(redis_url: str) -> None:
    buffer = new_run(redis_url, groups_per_batch=2)
    assert buffer.admit([("0-0", b""), ("0-1", b"")], 2, after=0) == 2
    assert buffer.admit([("0-5", b"")], 6, after=5) == 0 and buffer.admission().cursor == 2
    assert buffer.admit([("0-2", b"")], 3, after=2) == 1
    assert buffer.verify() == []


def retired(buffer: Buffer) -> list[str]:
    """Takes waiting prompts and returns their credits as training does."""
    taken = move(buffer, "prompts", 2)
    move(buffer, "generated", 2)
    incarnation, version = buffer.begin_incarnation(), buffer.published_version() + 1
    train(buffer, incarnation, version, len(taken))
    buffer.publish(incarnation, version, [SAMPLER])
    return taken


def test_the_endpoint_answers_info_and_sends_heartbeats(redis_url: str, recipe: Callable[..., Recipe]) -> None:
    buffer = new_run(redis_url, groups_per_batch=2, target_groups=2, run_id="feed-test")
    offer(buffer, 1)  # an earlier process of this feed
    settings = recipe(questions(3))
    feed = Feed(buffer, PromptStream(settings, 1))
    before = time.time()
    info = ServiceInfo("feed", feed.figures, lambda: feed.activity, buffer)
    with service_endpoint(info, settings, threading.Event()) as address:
        assert buffer.services()["feed"] == address
        info = check_what_it_says(address, buffer, name="feed", service_names=(), started_after=before)
        assert info.activity == "starting"
        assert (info.figures["admitted"], info.figures["groups_admitted"]) == (1, 0)
        eventually(lambda: "waiting_seconds" in buffer.figures().get("feed", {}))


def test_only_the_prompts_that_are_asked_for_are_prepared(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[TrajectoryGroup] = []

    def counted(group: TrajectoryGroup) -> bytes:
        prepared.append(group)
        return encode_group(group)

    monkeypatch.setattr(feed_service, "encode_group", counted)
    stream = PromptStream(recipe(questions(5000)), 0)
    stream.run(4)
    assert len(prepared) == 4
    assert np.unique(positions(stream, 300)).size == 300


def test_many_rows_without_a_prompt_do_not_keep_a_feed_from_ending(
    redis_url: str, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_service, "_CHUNK_ROWS", 10)
    settings = recipe([*["broken"] * 35, *questions(2)], shuffle=False)
    stream = PromptStream(settings, 0)
    runs = [[group.position for group in stream.run(4)] for _ in range(4)]
    assert runs == [[], [], [], [35, 36]], "a look at the event that stops the feed in between"
    buffer = new_run(redis_url, groups_per_batch=2, target_groups=2)
    with feeding(buffer, PromptStream(settings, 0)) as feed:
        eventually(lambda: feed.admitted == 2)


def test_a_feed_ends_although_redis_hangs(
    redis_folder_url: tuple[int, str], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = redis_folder_url
    monkeypatch.setattr(connection, "_SOCKET_SECONDS", 600.0)
    stop = threading.Event()
    monkeypatch.setattr(feed_service, "stop_event", lambda: stop)
    buffer = new_run(url, groups_per_batch=2, target_groups=2, run_id="feed-test")
    running = in_thread("feed", feed_service.main, recipe(questions(3)), url)
    eventually(lambda: buffer.counts()["prompts_waiting"] == 2)
    os.kill(server, signal.SIGSTOP)
    try:
        time.sleep(0.5)  # its calls hang now: they last a quarter of a second at most
        stop.set()
        assert wait([running], 60.0).done, "it does not wait for the answer"
        running.result()
    finally:
        os.kill(server, signal.SIGCONT)
