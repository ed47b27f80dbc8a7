"""The reward clients against a scripted service that fails: order, groups, limits, resumed streams, error classes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.protos.errors import DataError, DeadlineError, ScorerError, UnavailableError, UnknownJobError, UserError
from tandem.services.addresses import DEFAULT_ADDRESS, named_addresses, target_of
from tandem.services.clients import AsyncRewardClient, RewardClient
from tandem.services.clients.messages import Batcher, Limits, encode, order_by_group, split
from tests.support.scripted_reward import ScriptedReward, items_of, serving, values

WIDE = Limits(1000, 1 << 20, 1000, 1 << 20)


# --- items that cannot be encoded ------------------------------------------------------------------------------------


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
def test_an_item_that_cannot_be_encoded_keeps_its_place_and_gets_a_reason(
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


def test_an_item_or_rubric_larger_than_a_request_is_refused_and_the_rest_is_scored(
    service: ScriptedReward, client: RewardClient
) -> None:
    service.limits["max_request_bytes"] = 5000.0
    first, large, last = client.score([*items_of(1), ScoreItem("", "x" * 6000, None), *items_of(2)])
    assert isinstance(large, Unscored) and large.reason == "limit" and "the item has 6,0" in large.detail
    assert values([first, last]) == [1.0, 2.0]
    with pytest.raises(DataError, match="rubric"):
        client.score(items_of(1), "#" * 6000)


# --- score -----------------------------------------------------------------------------------------------------------


def test_a_long_list_is_split_into_requests_and_keeps_its_order(service: ScriptedReward, client: RewardClient) -> None:
    service.limits["max_items_per_request"] = 7.0
    scores = client.score(items_of(*range(100)), "the rubric")
    assert values(scores) == list(map(float, range(100)))
    assert len(service.requests) == 15 and {request.rubric for request in service.requests} == {"the rubric"}
    assert client.score([]) == []


def test_a_group_is_scored_in_one_request_wherever_its_items_are(service: ScriptedReward, client: RewardClient) -> None:
    service.limits["max_items_per_request"] = 4.0
    mixed = [ScoreItem("", str(number), None, group=f"g{number % 5}") for number in range(20)]
    scores = client.score(mixed)
    assert values(scores) == list(map(float, range(20)))
    assert all(isinstance(score, Scored) and score.breakdown == {"group": 4.0} for score in scores)
    with pytest.raises(DataError, match="a group is never split"):
        client.score(items_of(*range(5), group="large"))


def test_an_error_has_the_class_that_the_service_raised(client: RewardClient) -> None:
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


def test_a_late_reply_is_a_deadline_error(service: ScriptedReward) -> None:
    service.hang = True
    with RewardClient(timeout_seconds=0.2) as client:
        with pytest.raises(DeadlineError):
            client.score(items_of(1), timeout_seconds=0.1)
        with pytest.raises(DeadlineError):
            list(client.score_stream(items_of(1, 2)))


@pytest.mark.usefixtures("service", "no_retries")
def test_an_unreachable_service_is_named_with_its_address() -> None:
    with RewardClient("127.0.0.1:1", retry_seconds=0.1) as client:
        with pytest.raises(UnavailableError, match=r"reward service at 127\.0\.0\.1:1 cannot be reached"):
            client.jobs()
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            client.submit(items_of(1))


def test_a_reply_with_too_few_results_is_an_error(client: RewardClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.scripted_reward.score", lambda items: [])
    with pytest.raises(Exception, match="0 results for 1 items"):
        client.score(items_of(1))


# --- score_stream ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks", [[], [2, 0, -1, 4]])
def test_streamed_scores_are_in_order_even_if_replies_are_not_and_streams_break(
    service: ScriptedReward, client: RewardClient, breaks: list[int]
) -> None:
    service.limits["max_items_per_request"] = 3.0
    service.breaks = list(breaks)
    assert values(client.score_stream(iter(items_of(*range(60))))) == list(map(float, range(60)))
    assert service.num_streams == len(breaks) + 1 and len(service.requests) >= 20


def test_a_stream_scores_incomplete_batches(client: RewardClient) -> None:
    """The caller produces each item only after it has received the previous item's score."""
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


def test_a_stream_spans_several_calls_while_items_arrive_slowly(service: ScriptedReward) -> None:
    def slow() -> Iterator[ScoreItem]:
        for number in range(3):
            threading.Event().wait(0.75)
            yield from items_of(number)

    with RewardClient(timeout_seconds=0.5) as client:
        assert values(client.score_stream(slow())) == [0.0, 1.0, 2.0]
    assert service.num_streams >= 3


def test_an_exception_of_the_callers_iterator_reaches_the_caller(client: RewardClient) -> None:
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


# --- replicas --------------------------------------------------------------------------------------------------------


def test_calls_rotate_over_replicas_and_survive_the_loss_of_one() -> None:
    services = [ScriptedReward(), ScriptedReward()]
    with serving(services[0]) as one:
        with serving(services[1]) as other, RewardClient(f"{one},{other}") as client:
            for number in range(20):
                assert values(client.score(items_of(number))) == [float(number)]
            assert min(len(service.requests) for service in services) >= 8
            assert target_of(client.addresses).startswith("ipv4:127.0.0.1:")
            before = len(services[0].requests)
        with RewardClient([one, other]) as client:  # the second replica has ended
            for number in range(20):
                assert values(client.score(items_of(number))) == [float(number)]
        assert len(services[0].requests) == before + 20


def test_a_replica_that_comes_back_is_used_again(service: ScriptedReward) -> None:
    with serving(service) as address:
        client = RewardClient(address, retry_seconds=30.0)
        job = client.submit(items_of(1))
    with client, serving(service, port=int(address.rpartition(":")[2])):
        assert [number for number, _ in client.results(job.job_id)] == [0]


def test_addresses_are_validated_and_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UserError, match="addresses of one kind"):
        target_of(["127.0.0.1:1", "[::1]:1"])
    with pytest.raises(UserError, match="unix socket"):
        target_of(["127.0.0.1:1", "unix:/s"])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="address nowhere:1: Name or service not known"):
        patch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(-2, "Name or service not known")))
        target_of(["nowhere:1", "nowhere:2"])


# --- async -----------------------------------------------------------------------------------------------------------


def test_the_async_client_scores_streams_and_submits(service: ScriptedReward) -> None:
    async def arriving(count: int) -> AsyncIterator[ScoreItem]:
        for item in items_of(*range(count)):
            await asyncio.sleep(0)
            yield item

    async def work() -> None:
        async with AsyncRewardClient() as client:
            scores, others = await asyncio.gather(client.score(items_of(1, 2)), client.score(items_of(3)))
            assert values(scores) == [1.0, 2.0] and values(others) == [3.0]
            assert values([score async for score in client.score_stream(arriving(30))]) == list(map(float, range(30)))
            job = await client.submit(arriving(600), key="k")
            assert job.num_items == 600 and (await client.wait(job.job_id)).state == "done"
            assert sorted([number async for number, _ in client.results(job.job_id)]) == list(range(600))
            assert (await client.get(job.job_id)).job_id == job.job_id
            assert "number" in (await client.scorers()).default_rubric
            assert len(await client.jobs(1)) == 1 and (await client.cancel(job.job_id)).state == "cancelled"
            with pytest.raises(ScorerError):
                await client.score(items_of(1), "wrong")

    asyncio.run(asyncio.wait_for(work(), 60.0))


def test_one_client_serves_many_threads(client: RewardClient) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: values(client.score(items_of(number))), range(64)))
    assert found == [[float(number)] for number in range(64)]


def test_a_closed_client_may_be_closed_again_and_refuses_calls() -> None:
    client = RewardClient()
    client.close()
    client.close()
    with pytest.raises(UserError, match="this client is closed"):
        client.score(items_of(1))
    with pytest.raises(UserError, match="this client is closed"):
        list(client.score_stream(items_of(1)))


# --- batches of items: each item once, within the limits, no group split ----------------------------------------------

rows = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.integers(0, 40)), max_size=60)


@settings(deadline=None)
@given(rows, st.integers(5, 12), st.integers(600, 3000), st.integers(1, 12), st.integers(1, 3000))
def test_batches_hold_every_item_once_within_limits_and_no_group_is_split(
    found: list[tuple[str, int]], max_items: int, max_bytes: int, target_items: int, target_bytes: int
) -> None:
    limits = Limits(max_items, max_bytes, min(target_items, max_items), min(target_bytes, max_bytes))
    packed = [encode(i, ScoreItem("", "x" * size, None, group=group), limits) for i, (group, size) in enumerate(found)]
    try:
        messages = split(order_by_group(packed), limits)
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
def test_a_prefix_of_the_items_is_split_at_the_same_places(found: list[tuple[str, int]], aim: int) -> None:
    limits = Limits(1000, 1 << 20, aim, 1 << 20)
    packed = order_by_group(
        [encode(i, ScoreItem("", "x", None, group=group), limits) for i, (group, _) in enumerate(found)]
    )
    whole = split(packed, limits)
    for stop in range(len(packed)):
        assert split(packed[:stop], limits)[:-1] == whole[: max(0, len(split(packed[:stop], limits)) - 1)]


def test_a_group_whose_items_are_not_adjacent_is_refused() -> None:
    batcher = Batcher(WIDE)
    with pytest.raises(DataError, match="item 2: group 'g' comes back"):
        for index, group in enumerate(["g", "", "g"]):
            batcher.add(encode(index, ScoreItem("", "", None, group=group), WIDE))


def test_flush_keeps_a_group_that_may_grow() -> None:
    batcher = Batcher(WIDE)
    packed = [encode(index, ScoreItem("", "", None, group=group), WIDE) for index, group in enumerate(["", "g", "g"])]
    for item in packed:
        assert batcher.add(item) == []
    assert batcher.flush() == packed[:1] and batcher.flush() == []
    assert batcher.finish() == [packed[1:]]
