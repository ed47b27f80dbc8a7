"""The reward service's clients against a service that breaks: order, groups, limits, streams that go on, errors by their class."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import (
    DataError,
    DeadlineError,
    JobExistsError,
    ScorerError,
    UnavailableError,
    UnknownJobError,
    UserError,
)
from services import async_client, reward_streams
from services.clients import AsyncRewardClient, RewardClient, key_of
from services.replicas import DEFAULT_ADDRESS, named_addresses, target_of
from services.reward_messages import Cutter, Limits, Packed, cut, groups_together, pack
from tests.reward_process import RewardProcess
from tests.scripted_reward import ScriptedReward, serving

WIDE = Limits(1000, 1 << 20, 1000, 1 << 20)


def items_of(*solutions: object, group: str = "") -> list[ScoreItem]:
    return [ScoreItem("test", str(solution), "1", group=group) for solution in solutions]


def values(scores: Iterable[Score]) -> list[float]:
    return [score.value for score in scores if isinstance(score, Scored)]


@pytest.fixture
def service() -> ScriptedReward:
    return ScriptedReward()


@pytest.fixture
def address(service: ScriptedReward) -> Iterator[str]:
    with serving(service) as bound:
        yield bound


@pytest.fixture
def client(address: str) -> Iterator[RewardClient]:
    with RewardClient(address, timeout_seconds=20.0, retry_seconds=10.0) as made:
        yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_streams, "_FIRST_PAUSE_SECONDS", 0.001)


# --- where items are cut ---------------------------------------------------------------------------------------------

rows = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.integers(0, 40)), max_size=60)


@settings(deadline=None)
@given(rows, st.integers(5, 12), st.integers(600, 3000), st.integers(1, 12), st.integers(1, 3000))
def test_messages_hold_every_item_once_within_limits_and_no_group_is_split(
    found: list[tuple[str, int]], max_items: int, max_bytes: int, aim_items: int, aim_bytes: int
) -> None:
    limits = Limits(max_items, max_bytes, min(aim_items, max_items), min(aim_bytes, max_bytes))
    packed = [pack(i, ScoreItem("", "x" * size, None, group=group), limits) for i, (group, size) in enumerate(found)]
    try:
        messages = cut(groups_together(packed), limits)
    except DataError as error:
        sizes = [[p for p in packed if p.message.group == group] for group in {p.message.group for p in packed} - {""}]
        assert any(len(one) > max_items or sum(p.num_bytes for p in one) > max_bytes for one in sizes), error
        return
    assert sorted(item.index for message in messages for item in message) == list(range(len(found)))
    for message in messages:
        assert 0 < len(message) <= max_items and sum(item.num_bytes for item in message) <= max_bytes
    homes = [{item.message.group for item in message} - {""} for message in messages]
    assert sum(map(len, homes)) == len(set().union(*homes)) if homes else True


@settings(deadline=None)
@given(rows, st.integers(1, 12))
def test_where_a_row_is_cut_depends_on_the_row_alone(found: list[tuple[str, int]], aim: int) -> None:
    limits = Limits(1000, 1 << 20, aim, 1 << 20)
    packed = groups_together(
        [pack(i, ScoreItem("", "x", None, group=group), limits) for i, (group, _) in enumerate(found)]
    )
    whole = cut(packed, limits)
    for stop in range(len(packed)):
        assert cut(packed[:stop], limits)[:-1] == whole[: max(0, len(cut(packed[:stop], limits)) - 1)]


def test_a_group_that_comes_back_in_a_stream_is_refused() -> None:
    cutter = Cutter(WIDE)
    with pytest.raises(DataError, match="item 2: group 'g' comes back"):
        for index, group in enumerate(["g", "", "g"]):
            cutter.add(pack(index, ScoreItem("", "", None, group=group), WIDE))


def test_a_partial_message_leaves_an_open_group_behind() -> None:
    cutter = Cutter(WIDE)
    packed = [pack(index, ScoreItem("", "", None, group=group), WIDE) for index, group in enumerate(["", "g", "g"])]
    for item in packed:
        assert cutter.add(item) == []
    assert cutter.take() == packed[:1] and cutter.take() == []
    assert cutter.finish() == [packed[1:]]


# --- what cannot travel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (ScoreItem("", 3, None), "solution is of type int, not text"),  # type: ignore[arg-type]
        (ScoreItem("", "\ud800", None), "solution holds half a surrogate pair"),
        (ScoreItem("", "1", object()), "holds what JSON cannot"),
        (ScoreItem("", "1", None, {"a": b"bytes"}), "holds what JSON cannot"),
        (ScoreItem("", "1", "\ud800"), "ground_truth holds half a surrogate pair"),
        (ScoreItem("", "1", None, group=3), "group is of type int, not text"),  # type: ignore[arg-type]
        (Unscored("invalid_input", "row 3: solution is missing"), "row 3: solution is missing"),
    ],
)
def test_an_item_that_cannot_travel_keeps_its_place_and_its_reason(
    client: RewardClient, item: ScoreItem | Unscored, said: str
) -> None:
    given_items = [*items_of(1), item, *items_of(3)]
    for scores in (client.score(given_items), list(client.score_stream(given_items))):
        first, bad, last = scores
        assert isinstance(bad, Unscored) and bad.reason == "invalid_input" and said in bad.detail
        assert values([first, last]) == [1.0, 3.0]
    told: list[int] = []
    job = client.submit(given_items, on_fault=lambda index, fault: told.append(index))
    results = dict(client.results(job.job_id))
    quoted = results[1]
    assert isinstance(quoted, Unscored) and quoted.reason == "invalid_input" and said[:20] in quoted.detail
    assert told == [1] and (job.num_scored, dict(job.num_unscored)) == (2, {"invalid_input": 1})


def test_an_item_larger_than_a_request_is_unscored_and_the_rest_is_scored(
    service: ScriptedReward, client: RewardClient
) -> None:
    service.limits["max_request_bytes"] = 5000.0
    first, large, last = client.score([*items_of(1), ScoreItem("", "x" * 6000, None), *items_of(2)])
    assert isinstance(large, Unscored) and large.reason == "limit" and "the item has 6,0" in large.detail
    assert values([first, last]) == [1.0, 2.0]


def test_a_rubric_as_large_as_a_request_is_refused(service: ScriptedReward, client: RewardClient) -> None:
    service.limits["max_request_bytes"] = 5000.0
    with pytest.raises(DataError, match="rubric"):
        client.score(items_of(1), "#" * 6000)


# --- score -----------------------------------------------------------------------------------------------------------


def test_long_lists_travel_in_several_requests_and_keep_their_order(
    service: ScriptedReward, client: RewardClient
) -> None:
    service.limits["max_items_per_request"] = 7.0
    scores = client.score(items_of(*range(100)), "the rubric")
    assert values(scores) == list(map(float, range(100)))
    assert len(service.requests) == 15 and {request.rubric for request in service.requests} == {"the rubric"}
    assert client.score([]) == []


def test_a_group_is_scored_in_one_request_wherever_its_items_stand(
    service: ScriptedReward, client: RewardClient
) -> None:
    service.limits["max_items_per_request"] = 4.0
    mixed = [ScoreItem("", str(number), None, group=f"g{number % 5}") for number in range(20)]
    scores = client.score(mixed)
    assert values(scores) == list(map(float, range(20)))
    assert all(isinstance(score, Scored) and score.breakdown == {"group": 4.0} for score in scores)
    with pytest.raises(DataError, match="a group is never split"):
        client.score(items_of(*range(5), group="large"))


def test_reasons_arrive_as_reasons(client: RewardClient) -> None:
    scores = client.score(items_of("timeout", "0.5", "crashed"))
    assert scores == [Unscored("timeout", "scripted"), Scored(0.5, {"group": 3.0}), Unscored("crashed", "scripted")]


def test_errors_arrive_as_the_class_that_was_raised(client: RewardClient) -> None:
    with pytest.raises(ScorerError, match="components: there are none"):
        client.score(items_of(1), "wrong")
    with pytest.raises(ScorerError):
        client.submit(items_of(1), "wrong")
    with pytest.raises(UnknownJobError, match="job gone: there is none"):
        client.get("gone")
    with pytest.raises(UnknownJobError):
        list(client.watch("gone"))
    with pytest.raises(UnknownJobError):
        client.cancel("gone")


def test_a_late_answer_is_a_deadline(service: ScriptedReward, client: RewardClient) -> None:
    service.hang = True
    with pytest.raises(DeadlineError):
        client.score(items_of(1), timeout_seconds=0.1)


def test_nobody_there_is_said_with_the_address() -> None:
    with RewardClient("127.0.0.1:1", retry_seconds=0.1) as client:
        with pytest.raises(UnavailableError, match=r"reward service at 127\.0\.0\.1:1 cannot be reached"):
            client.jobs()
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            client.submit(items_of(1))


def test_a_reply_with_a_result_too_few_is_no_result(client: RewardClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.scripted_reward.score", lambda items: [])
    with pytest.raises(Exception, match="0 results for 1 items"):
        client.score(items_of(1))


# --- score_stream ----------------------------------------------------------------------------------------------------


def test_a_stream_of_items_comes_back_in_order_though_replies_do_not(
    service: ScriptedReward, client: RewardClient
) -> None:
    service.limits["max_items_per_request"] = 3.0
    assert values(client.score_stream(iter(items_of(*range(50))))) == list(map(float, range(50)))
    assert len(service.requests) >= 17


def test_a_stream_that_breaks_goes_on_with_what_has_no_answer(service: ScriptedReward, client: RewardClient) -> None:
    service.limits["max_items_per_request"] = 3.0
    service.breaks = [2, 0, -1, 4]
    assert values(client.score_stream(iter(items_of(*range(60))))) == list(map(float, range(60)))
    assert service.num_streams == 5


def test_a_stream_needs_no_full_batch(client: RewardClient) -> None:
    """Each item is only made once the score of the one before is there."""
    known: list[float] = []

    def one_by_one() -> Iterator[ScoreItem]:
        for number in range(5):
            yield from items_of(number)
            while len(known) <= number:
                pause.wait(0.01)

    pause = threading.Event()
    for score in client.score_stream(one_by_one()):
        known += values([score])
    assert known == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_stream_outlives_its_call_while_items_are_long_in_coming(service: ScriptedReward, address: str) -> None:
    def slow() -> Iterator[ScoreItem]:
        for number in range(3):
            threading.Event().wait(1.5)
            yield from items_of(number)

    with RewardClient(address, timeout_seconds=1.0) as client:
        assert values(client.score_stream(slow())) == [0.0, 1.0, 2.0]
    assert service.num_streams >= 3


def test_what_the_callers_iterator_raises_reaches_the_caller(client: RewardClient) -> None:
    def failing() -> Iterator[ScoreItem]:
        yield from items_of(*range(600))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(client.score_stream(failing()))
    with pytest.raises(KeyError, match="mine"):
        client.submit(failing())


def test_a_stream_left_early_leaves_the_client_usable(client: RewardClient) -> None:
    for score in client.score_stream(iter(items_of(*range(1000)))):
        assert isinstance(score, Scored)
        break
    assert values(client.score(items_of(4))) == [4.0]


def test_a_stream_that_nobody_answers_is_a_deadline(service: ScriptedReward, address: str) -> None:
    service.hang = True
    with RewardClient(address, timeout_seconds=0.2) as client, pytest.raises(DeadlineError):
        list(client.score_stream(items_of(1, 2)))


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_goes_there_and_comes_back(service: ScriptedReward, client: RewardClient) -> None:
    progress: list[int] = []
    job = client.submit(
        iter(items_of(*range(1000))),
        "r",
        key="mine",
        name="nightly",
        priority=3,
        on_progress=lambda j: progress.append(j.num_items),
    )
    assert (job.state, job.num_items, job.num_scored, job.name, job.priority) == ("done", 1000, 1000, "nightly", 3)
    assert progress == sorted(progress) and progress[-1] == 1000
    stored = service.jobs["mine"]
    assert [len(stored.chunks[number]) for number in sorted(stored.chunks)] == [256, 256, 256, 232]
    assert dict(client.results(job.job_id)) == {
        n: Scored(float(n), {"group": 256.0 if n < 768 else 232.0}) for n in range(1000)
    }
    assert client.get(job.job_id) == job == client.wait(job.job_id)
    assert [one.job_id for one in client.jobs()] == [job.job_id]
    assert client.cancel(job.job_id).state == "cancelled"


def test_the_same_key_is_the_same_job_and_reads_nothing(service: ScriptedReward, client: RewardClient) -> None:
    job = client.submit(items_of(1, 2), key="k")
    read: list[int] = []
    again = client.submit((read.append(1) or item for item in items_of(1, 2)), key="k")  # type: ignore[func-returns-value]
    assert again == job and len(service.jobs) == 1
    with pytest.raises(JobExistsError, match="another rubric"):
        client.submit(items_of(1, 2), "other", key="k")


def test_without_a_key_the_content_is_the_key(service: ScriptedReward, client: RewardClient) -> None:
    first = client.submit(items_of(1, 2), "r")
    assert client.submit(items_of(1, 2), "r").job_id == first.job_id
    others = [
        client.submit(items_of(1, 3), "r"),
        client.submit(items_of(1, 2), "s"),
        client.submit(iter(items_of(1, 2)), "r"),
        client.submit(items_of(1, 2), "r", priority=1),
    ]
    assert len({first.job_id, *(job.job_id for job in others)}) == 5 == len(service.jobs)
    assert key_of(items_of(1), "a") != key_of(items_of(1, 1), "a") != key_of([Unscored("limit")], "a")


@pytest.mark.parametrize("breaks", [[0], [-1], [1, -1], [2, 0, 0, -1, 5], [0] * 12, [7, 3, 3]])
def test_a_submission_goes_on_where_it_broke(service: ScriptedReward, client: RewardClient, breaks: list[int]) -> None:
    service.breaks = list(breaks)
    job = client.submit(iter(items_of(*range(5000))), key="k")
    assert service.breaks == [] and service.num_streams == len(breaks) + 1
    assert [item.solution for item in service.jobs["k"].items] == [str(number) for number in range(5000)]
    assert job.num_items == 5000


def test_a_submission_begun_by_another_process_goes_on_from_the_same_items(
    service: ScriptedReward, address: str
) -> None:
    service.breaks = [6] + [-1] * 500
    everything = items_of(*range(5000))
    with RewardClient(address, retry_seconds=0.05) as client, pytest.raises(UnavailableError):
        client.submit(iter(everything), key="k")
    stored = service.jobs["k"].next_chunk
    assert 6 <= stored < 20
    service.breaks, service.num_chunks_received = [], 0
    with RewardClient(address) as client:
        assert client.submit(iter(everything), key="k").num_items == 5000
    assert service.num_chunks_received == 20 - stored
    assert [item.solution for item in service.jobs["k"].items] == [str(number) for number in range(5000)]


def test_a_key_whose_job_holds_other_items_is_refused(service: ScriptedReward, address: str) -> None:
    for other in (
        items_of(*range(100)),
        [*items_of(*range(100)), *items_of(*range(300), group="g"), *items_of(*range(500))],
    ):
        service.jobs.clear()
        service.breaks = [2] + [-1] * 500
        with RewardClient(address, retry_seconds=0.02) as client, pytest.raises(UnavailableError):
            client.submit(iter(items_of(*range(1000))), key="k")
        service.breaks = []
        with RewardClient(address) as client, pytest.raises(DataError, match="already holds 768 items in 3 chunks"):
            client.submit(iter(other), key="k")


def test_watching_goes_on_after_the_last_event(service: ScriptedReward, client: RewardClient) -> None:
    job = client.submit(iter(items_of(*range(2000))))
    service.breaks = [3, 0, -1, 2]
    seen = [number for number, _ in client.results(job.job_id)]
    assert sorted(seen) == list(range(2000)) and len(seen) == 2000
    cursor = next(event.cursor for event in client.watch(job.job_id, with_results=True) if event.cursor == 4)
    rest = [event for event in client.watch(job.job_id, with_results=True, after_cursor=cursor) if event.results]
    assert len(rest) == 4


def test_watching_a_job_that_does_not_end_has_a_deadline(service: ScriptedReward, client: RewardClient) -> None:
    service.breaks = [1] + [-1] * 500
    with RewardClient(client.addresses, retry_seconds=0.01) as hasty, pytest.raises(UnavailableError):
        hasty.submit(iter(items_of(*range(1000))), key="k")
    service.breaks = []
    with pytest.raises(DeadlineError, match="it goes on"):
        list(client.watch("job-0", timeout_seconds=0.3))


def test_the_scorers_are_told(client: RewardClient) -> None:
    told = client.scorers()
    (info,) = told.scorers
    assert (info.name, info.isolation, info.parameters[0].name, info.parameters[0].default) == (
        "number",
        "in_process",
        "scale",
        "1.0",
    )
    assert told.limits["max_items_per_request"] == 1000 and "number" in told.default_rubric


# --- replicas --------------------------------------------------------------------------------------------------------


def test_calls_go_round_among_replicas_and_survive_one() -> None:
    services = [ScriptedReward(), ScriptedReward()]
    with serving(services[0]) as one:
        with serving(services[1]) as other, RewardClient(f"{one},{other}") as client:
            for number in range(20):
                assert values(client.score(items_of(number))) == [float(number)]
            assert min(len(service.requests) for service in services) >= 8
            assert target_of(client.addresses).startswith("ipv4:127.0.0.1:")
            before = len(services[0].requests)
        with RewardClient([one, other]) as client:  # the other has ended
            for number in range(20):
                assert values(client.score(items_of(number))) == [float(number)]
        assert len(services[0].requests) == before + 20


def test_a_replica_that_comes_back_is_used_again(service: ScriptedReward) -> None:
    with serving(service) as address:
        client = RewardClient(address, retry_seconds=30.0)
        job = client.submit(items_of(1))
    with client, serving(service, port=int(address.rpartition(":")[2])):
        assert [number for number, _ in client.results(job.job_id)] == [0]


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_REWARD_ADDRESS", raising=False)
    assert named_addresses() == (DEFAULT_ADDRESS,)
    monkeypatch.setenv("TANDEM_REWARD_ADDRESS", "a:1, b:2,")
    assert named_addresses() == ("a:1", "b:2") == named_addresses(["a:1", "b:2"])
    assert target_of(["a:1"]) == "dns:///a:1" and target_of(["unix:/s"]) == "unix:/s"
    assert target_of(["127.0.0.1:1", "127.0.0.2:2"]) == "ipv4:127.0.0.1:1,127.0.0.2:2"
    assert target_of(["[::1]:1", "[::2]:2"]) == "ipv6:[::1]:1,[::2]:2"
    for wrong in ("host", "host:", ":1", "host:x", "host:70000", "host:0"):
        with pytest.raises(UserError, match="is not host:port"):
            named_addresses(wrong)
    with pytest.raises(UserError, match="replicas of one kind"):
        target_of(["127.0.0.1:1", "[::1]:1"])
    with pytest.raises(UserError, match="unix socket"):
        target_of(["127.0.0.1:1", "unix:/s"])


def test_an_address_that_no_one_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: object, **_more: object) -> list[object]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match="address nowhere:1: Name or service not known"):
        target_of(["nowhere:1", "nowhere:2"])


# --- the real service ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_submission_and_a_watch_outlive_kill_9_of_the_service(tmp_path: Path) -> None:
    """Every item has its own score, once, though the service dies while they are submitted and again while they are watched."""
    far_enough = threading.Event()

    def numbers() -> Iterator[ScoreItem]:
        for number in range(20_000):
            if number == 5_000:
                far_enough.set()
                dead.wait(60.0)
            yield ScoreItem("test", str(number % 3), str(number % 2))

    dead = threading.Event()
    service = RewardProcess(tmp_path)
    with RewardClient(service.address) as client, ThreadPoolExecutor(1) as thread:
        try:
            submitting = thread.submit(client.submit, numbers(), '[[components]]\nscorer = "exact"', key="k")
            assert far_enough.wait(60.0)
            service.kill()
            dead.set()
            service = RewardProcess(tmp_path, service.port)
            job = submitting.result(timeout=100.0)
            seen = []
            for number, score in client.results(job.job_id):
                if not seen:
                    service.kill()
                    service = RewardProcess(tmp_path, service.port)
                seen.append(number)
                assert isinstance(score, Scored) and score.value == float(number % 3 == number % 2)
            assert sorted(seen) == list(range(20_000))
            assert client.submit([], '[[components]]\nscorer = "exact"', key="k").job_id == job.job_id
        finally:
            service.stop()


# --- async -----------------------------------------------------------------------------------------------------------


def test_the_async_client_does_the_same(service: ScriptedReward, address: str) -> None:
    async def arriving(count: int) -> AsyncIterator[ScoreItem]:
        for item in items_of(*range(count)):
            await asyncio.sleep(0)
            yield item

    async def work() -> None:
        async with AsyncRewardClient(address) as client:
            scores, others = await asyncio.gather(client.score(items_of(1, 2)), client.score(items_of(3)))
            assert values(scores) == [1.0, 2.0] and values(others) == [3.0]
            assert values([score async for score in client.score_stream(arriving(30))]) == list(map(float, range(30)))
            job = await client.submit(arriving(600), key="k")
            assert job.num_items == 600 and (await client.wait(job.job_id)).state == "done"
            assert sorted([number async for number, _ in client.results(job.job_id)]) == list(range(600))
            assert (await client.get(job.job_id)).job_id == job.job_id
            assert len(await client.jobs(1)) == 1 and (await client.cancel(job.job_id)).state == "cancelled"
            with pytest.raises(ScorerError):
                await client.score(items_of(1), "wrong")

    asyncio.run(asyncio.wait_for(work(), 60.0))


def test_clients_of_many_threads_share_one(client: RewardClient) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: values(client.score(items_of(number))), range(64)))
    assert found == [[float(number)] for number in range(64)]


def test_a_closed_client_may_be_closed_again(address: str) -> None:
    client = RewardClient(address)
    client.close()
    client.close()


def test_the_aims_are_within_what_every_service_takes() -> None:
    assert async_client.CHUNK_ITEMS <= 1024 and async_client.CHUNK_BYTES <= 1 << 22
    assert isinstance(pack(0, ScoreItem("", "", None), WIDE), Packed)
