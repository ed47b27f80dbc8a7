"""The buffer's calls one by one: admission, leases, fencing, the trainer's claims, blocked claimers, the registry."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.protos.errors import (
    ConfigError,
    DataError,
    FencedError,
    LedgerError,
    NotAdmittedError,
    RunExistsError,
    UnavailableError,
)
from tandem.services.buffer import connection
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Admission
from tests.support import redis_ring as ring
from tests.support.waiting import eventually

# ---- creation and admission ----


def test_an_existing_run_is_refused_without_resume(buffer: Buffer, redis_url: str) -> None:
    ring.offer(buffer, 2)
    again = Buffer(redis_url, buffer.run_id)
    limits = {"groups_per_batch": 2, "staleness_budget": 1, "failure_budget": {"infrastructure": 1, "data": 0}}
    with pytest.raises(RunExistsError, match="--resume"):
        again.create(**limits, target_groups=100, resume=False)  # type: ignore[arg-type]
    again.create(**limits, target_groups=3, resume=True)  # type: ignore[arg-type]
    assert again.admission() == Admission(free=2, wanted=1, cursor=2, num_set_aside=0)


def test_a_ledger_of_another_schema_is_refused(buffer: Buffer, redis_url: str) -> None:
    buffer.connection.redis.hdel(buffer.connection.key("meta"), "schema")
    before = buffer.counts()
    with pytest.raises(ConfigError, match=r"has a ledger of schema 1, .*; finish the run with the version that began"):
        Buffer(redis_url, buffer.run_id).create(
            groups_per_batch=2,
            staleness_budget=1,
            target_groups=100,
            failure_budget={"infrastructure": 1, "data": 0},
            resume=True,
        )
    with pytest.raises(ConfigError, match="has a ledger of schema 1"):
        buffer.exists()
    assert buffer.counts() == before


def test_a_run_that_was_never_created_is_an_error(redis_url: str) -> None:
    with pytest.raises(UnavailableError, match="never created"):
        Buffer(redis_url, "nobody").admit([("0-0", b"")], 1)


def test_an_instance_is_admitted_once(buffer: Buffer) -> None:
    ring.offer(buffer, 2)
    with pytest.raises(DataError, match="0-1 was admitted before"):
        buffer.admit([("0-5", b""), ("0-1", b"")], 9)
    with pytest.raises(DataError, match="admitted before"):
        buffer.admit([("1-0", b""), ("1-0", b"")], 9)
    assert buffer.counts()["admitted"] == 2 and buffer.admission().cursor == 2
    assert buffer.admit([("1-0", b""), ("1-1", b"")], 4) == 2


@pytest.mark.parametrize("group_id", ["7", "0-", "a-1", "0-1 ", "0-4294967296", "-1-2"])
def test_an_invalid_instance_id_is_refused(buffer: Buffer, group_id: str) -> None:
    with pytest.raises(DataError, match="is not <epoch>-<index>"):
        buffer.admit([(group_id, b"")], 1)


def test_exhaustion_waits_for_groups_in_flight_and_is_undone_by_a_drop(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, target_groups=2)
    assert not buffer.mark_exhausted("target")
    group_ids = ring.offer(buffer, 2)
    assert buffer.mark_exhausted("target") and not buffer.exhausted()
    ring.move(buffer, "prompts", 2)
    assert not buffer.exhausted()
    ring.move(buffer, "generated", 2)
    assert buffer.exhausted()
    buffer.claim_scored(1, 2, 0)
    buffer.drop_claimed(1, group_ids[:1], "zero_variance")
    assert not buffer.exhausted() and buffer.admission().wanted == 1
    assert buffer.mark_exhausted("dataset") and buffer.exhausted()
    buffer.drop_claimed(1, group_ids[1:], "zero_variance")
    assert buffer.exhausted(), "an empty dataset stays empty"
    assert buffer.counts()["dropped:zero_variance"] == 2


# ---- claims, leases, fencing ----


def test_a_claimed_group_carries_its_payload(buffer: Buffer) -> None:
    ring.offer(buffer, 2)
    first, second = ring.claim(buffer, "prompts", 5)
    assert (first.group_id, first.payload, first.partial) == ("0-0", b"prompt 0-0", None)
    assert second.token > first.token
    # Groups are consumed in order of completion, not of admission.
    assert ring.finish(buffer, second) and ring.finish(buffer, first)
    generated = ring.claim(buffer, "generated", 5)
    payloads = [(claim.group_id, claim.payload) for claim in generated]
    assert payloads == [("0-1", b"prompts 0-1"), ("0-0", b"prompts 0-0")]
    assert all(ring.finish(buffer, claim) for claim in reversed(generated))
    scored = buffer.claim_scored(1, 5, 0)
    assert [claim.group_id for claim in scored] == ["0-0", "0-1"]
    assert buffer.read(["0-1", "0-0"]) == [b"generated 0-1", b"generated 0-0"]
    with pytest.raises(LedgerError, match="no payload of group 9-9"):
        buffer.read(["0-0", "9-9"])


def test_payloads_are_binary(buffer: Buffer) -> None:
    payload = bytes(range(256)) * 40
    buffer.admit([("0-0", payload)], 1)
    [claim] = ring.claim(buffer, "prompts")
    buffer.renew([claim], 30, {claim.token: payload})
    assert claim.payload == payload
    buffer.release(claim, "drained", "voluntary")
    [again] = ring.claim(buffer, "prompts")
    assert again.partial == payload and ring.finish(buffer, again)
    assert ring.claim(buffer, "generated")[0].partial is None, "what one stage saved is not for the next"


def test_completing_twice_succeeds_and_changes_nothing_and_a_release_after_it_is_refused(buffer: Buffer) -> None:
    ring.offer(buffer, 1)
    [claim] = ring.claim(buffer, "prompts")
    assert buffer.complete(claim, b"first") and buffer.complete(claim, b"second")
    assert buffer.release(claim, "late", "infrastructure") == "refused"
    [generated] = ring.claim(buffer, "generated")
    assert generated.payload == b"first"
    assert ring.finish(buffer, generated) and buffer.complete(claim, b"third")
    assert buffer.counts()["stale_results_refused"] == 0


def test_groups_completed_together_keep_their_payloads_and_only_the_stale_one_is_refused(buffer: Buffer) -> None:
    ring.offer(buffer, 3)
    claims = ring.claim(buffer, "prompts", 3)
    buffer.release(claims[1], "drained", "voluntary")
    finished = [(claim, claim.group_id.encode(), "") for claim in claims]
    for _ in range(2):  # the answer of the first call may be lost
        assert buffer.complete_all(finished) == [claims[1].token]
    generated = ring.claim(buffer, "generated", 3)
    assert [(one.group_id, one.payload) for one in generated] == [("0-0", b"0-0"), ("0-2", b"0-2")]
    counts = buffer.counts()
    assert (counts["prompts_waiting"], counts["stale_results_refused"]) == (1, 2)


def test_an_expired_lease_goes_to_the_front_and_its_late_result_is_refused(buffer: Buffer) -> None:
    ring.offer(buffer, 3)
    late = ring.claim(buffer, "prompts", 2)
    assert buffer.renew(late, 0.3, {late[0].token: b"half"}) == []
    time.sleep(0.35)
    assert buffer.renew(late, 30) == [one.token for one in late]
    assert not ring.finish(buffer, late[0]), "refused even before the next holder has come"
    again = ring.claim(buffer, "prompts", 3)
    assert [claim.group_id for claim in again] == ["0-0", "0-1", "0-2"], "to the front, in their order"
    assert [claim.partial for claim in again] == [b"half", None, None]
    assert not ring.finish(buffer, late[0]) and ring.finish(buffer, again[0])
    assert buffer.release(late[1], "crashed", "infrastructure") == "refused"
    counts = buffer.counts()
    assert (counts["leases_expired"], counts["stale_results_refused"]) == (2, 2)


def test_each_expired_lease_spends_the_failure_budget(buffer: Buffer) -> None:
    ring.offer(buffer, 1)
    for _ in range(2):  # the budget is 1, so the second failure exceeds it
        assert ring.claim(buffer, "prompts", lease_seconds=0.01)
        time.sleep(0.02)
    counts = buffer.counts()
    assert (counts["dropped:lease_expired"], counts["leases_expired"], counts["outstanding"]) == (1, 2, 0)


def test_renewing_keeps_a_lease(buffer: Buffer) -> None:
    ring.offer(buffer, 1)
    [claim] = ring.claim(buffer, "prompts", lease_seconds=1.5)
    for _ in range(2):
        assert buffer.renew([claim], 30) == []
        time.sleep(0.8)
    assert ring.finish(buffer, claim) and buffer.counts()["leases_expired"] == 0
    assert buffer.renew([claim], 30) == [claim.token], "a completed claim is ours no longer"


def test_each_kind_of_failure_has_its_own_budget_and_blocks_no_other_group(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, infrastructure=2, data=1)
    ring.offer(buffer, 2)
    ring.move(buffer, "prompts", 2)

    def fail(kind: str) -> str:
        [claim] = [claim for claim in ring.claim(buffer, "generated", 2) if claim.group_id == "0-0"]
        outcome = buffer.release(claim, f"{kind}_failure", kind)  # type: ignore[arg-type]
        buffer.register_service(ring.SCORER, "127.0.0.1:2")  # returns the other group's lease
        return outcome

    [first, second] = ring.claim(buffer, "generated", 2)
    assert buffer.release(first, "drained", "voluntary") == "requeued"
    assert buffer.release(second, "timeout", "infrastructure") == "requeued"
    assert [claim.group_id for claim in ring.claim(buffer, "generated", 1)] == ["0-0"], "given back: to the front"
    buffer.register_service(ring.SCORER, "127.0.0.1:2")
    outcomes = [fail(kind) for kind in ["infrastructure", "data", "infrastructure", "voluntary", "data"]]
    assert outcomes == ["requeued", "requeued", "requeued", "requeued", "dropped"]
    counts = buffer.counts()
    assert counts["dropped:data_failure"] == counts["dropped"] == 1
    assert buffer.verify() == []


# ---- the trainer's claims ----


def test_scored_claims_belong_to_the_incarnation(buffer: Buffer) -> None:
    group_ids = ring.score(buffer, 3)
    assert [claim.group_id for claim in buffer.claim_scored(1, 2, 0)] == group_ids[:2]
    assert buffer.begin_incarnation() == 2
    with pytest.raises(FencedError, match="incarnation 1 is not the current one"):
        buffer.claim_scored(1, 2, 0)
    assert [claim.group_id for claim in buffer.claim_scored(2, 9, 0)] == group_ids[2:]
    buffer.rollback(2, 0, {})  # only it takes claims back
    assert [claim.group_id for claim in buffer.claim_scored(2, 9, 0)] == group_ids, "in their order of completion"


_FENCED: dict[str, tuple[object, ...]] = {
    "check_incarnation": (),
    "record": (1, []),
    "publish": (1, []),
    "commit": (0,),
    "rollback": (0, {}),
    "drop_claimed": ([], "x"),
    "drop_outstanding": ("x",),
    "admit_sampler": (ring.SAMPLER, 0),
}


@pytest.mark.parametrize("verb", _FENCED)
def test_a_replaced_trainer_is_refused_everywhere(buffer: Buffer, verb: str) -> None:
    call = getattr(buffer, verb)
    call(1, *_FENCED[verb])
    buffer.begin_incarnation()
    with pytest.raises(FencedError):
        call(1, *_FENCED[verb])


def test_a_claim_whose_reply_was_lost_returns_the_same_groups(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    group_ids = ring.offer(buffer, 2)
    ring.lose_every_answer(monkeypatch)
    claims = ring.claim(buffer, "prompts", 1)
    assert [claim.group_id for claim in claims] == group_ids[:1] and ring.finish(buffer, claims[0])
    assert buffer.release(ring.claim(buffer, "generated")[0], "broken", "data") == "dropped"
    assert buffer.drop_outstanding(1, "run_finished") == 1


def test_a_scored_claim_whose_reply_was_lost_is_handed_out_again(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored claims do not expire, so this incarnation would never get back a group whose reply was lost."""
    group_ids = ring.score(buffer, 2)
    ring.lose_every_answer(monkeypatch)
    monkeypatch.setattr("tandem.services.buffer.connection.OUTAGE_SECONDS", -1.0)
    with pytest.raises(UnavailableError):
        buffer.claim_scored(1, 2, 0)
    monkeypatch.undo()
    assert buffer.counts()["scored_claimed"] == 2
    assert [claim.group_id for claim in buffer.claim_scored(1, 2, 0)] == group_ids


# ---- blocked claimers ----


def test_a_claim_returns_nothing_at_its_timeout(buffer: Buffer) -> None:
    assert [buffer.claim("generated", ring.SCORER, 1, 30, seconds) for seconds in (0, 0.3)] == [[], []]
    assert buffer.claim_scored(1, 1, 1.25) == []


def blocked_claimers(buffer: Buffer) -> int:
    """Clients of this Redis, which no other test uses meanwhile, that wait in BLPOP."""
    return int(buffer.connection.redis.info("clients")["blocked_clients"])


def test_every_blocked_claimer_is_woken_at_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight claimers block; eight groups arrive, some together. All are claimed long before the next poll."""
    monkeypatch.setattr(connection, "_POLL_SECONDS", 30.0)
    buffer = ring.new_run(redis_url, groups_per_batch=8)
    with ThreadPoolExecutor(8) as pool:
        claiming = [pool.submit(buffer.claim, "prompts", ring.SAMPLER, 1, 30, 30) for _ in range(8)]
        eventually(lambda: blocked_claimers(buffer) == 8)
        for count in (1, 5, 2):
            ring.offer(buffer, count)
        claimed = [claim.group_id for claims in claiming for claim in claims.result(10)]
    assert sorted(claimed) == [f"0-{index}" for index in range(8)]
    buffer.close()


def test_a_wake_up_is_passed_on_when_its_claimer_is_refused(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """rollout-1 is woken but no longer LIVE; rollout-0, still blocked, must not wait until its next poll."""
    monkeypatch.setattr(connection, "_POLL_SECONDS", 30.0)
    buffer.register_sampler("rollout-1", "127.0.0.1:9", 1)
    assert buffer.admit_sampler(1, "rollout-1", 0)
    with ThreadPoolExecutor(2) as pool:
        becomes_stale = pool.submit(buffer.claim, "prompts", "rollout-1", 1, 30, 30)
        eventually(lambda: blocked_claimers(buffer) == 1)  # rollout-1 waits first
        stays_live = pool.submit(buffer.claim, "prompts", ring.SAMPLER, 1, 30, 30)
        eventually(lambda: blocked_claimers(buffer) == 2)
        buffer.connection.redis.hset(buffer.connection.key("sampler:rollout-1"), "state", "STALE")
        ring.offer(buffer, 1)
        with pytest.raises(NotAdmittedError):
            becomes_stale.result(10)
        assert stays_live.result(10)


def test_a_blocked_claimer_gets_a_group_whose_lease_expires(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own poll, or woken by another call that finds the lease expired. A test ends long before 600 s."""
    for finds_it in (lambda: None, buffer.counts):
        group_ids = ring.offer(buffer, 1)
        ring.claim(buffer, "prompts", lease_seconds=0.2)
        threading.Timer(0.3, finds_it).start()
        [claim] = buffer.claim("prompts", ring.SAMPLER, 1, 30, 600)
        assert [claim.group_id] == group_ids and ring.finish(buffer, claim)
        monkeypatch.setattr(connection, "_POLL_SECONDS", 600.0)


# ---- the registry ----


def test_only_a_live_sampler_at_the_published_version_claims(buffer: Buffer) -> None:
    ring.score(buffer, 2)
    ring.offer(buffer, 1)
    with pytest.raises(NotAdmittedError, match="has not registered"):
        buffer.claim("prompts", "stranger", 1, 30, 0)
    ring.train(buffer, 1, 1, 2)
    buffer.register_sampler("rollout-1", "127.0.0.1:9", 2)
    with pytest.raises(NotAdmittedError, match="JOINING"):
        buffer.claim("prompts", "rollout-1", 1, 30, 0)
    buffer.publish(1, 1, ["rollout-1"])
    with pytest.raises(NotAdmittedError, match="STALE at version 0, published is 1"):
        ring.claim(buffer, "prompts")
    assert buffer.claim("prompts", "rollout-1", 1, 30, 0)
    assert not buffer.admit_sampler(1, ring.SAMPLER, 0), "an update to an earlier version admits nobody"
    assert not buffer.admit_sampler(1, "stranger", 1)
    assert buffer.admit_sampler(1, ring.SAMPLER, 1)
    states = {s.id: (s.state, s.version, s.incarnation, s.tensor_parallel_size, s.alive) for s in buffer.samplers()}
    assert states == {"rollout-0": ("LIVE", 1, 1, 1, True), "rollout-1": ("LIVE", 1, 1, 2, True)}
    assert buffer.published_version() == 1
    buffer.begin_incarnation()
    with pytest.raises(NotAdmittedError, match="STALE"):
        ring.claim(buffer, "prompts")


def test_nobody_claims_before_a_version_is_published(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, publishes=False)
    assert buffer.published_version() == -1
    with pytest.raises(NotAdmittedError, match="no version is published"):
        ring.claim(buffer, "prompts")


def test_a_restarted_sampler_gives_its_leases_back_and_its_zombie_is_refused(buffer: Buffer, redis_url: str) -> None:
    ring.offer(buffer, 2)
    zombie_claims = ring.claim(buffer, "prompts", 2)
    time.sleep(0.005)  # the first claim is renewed last but returned first
    buffer.renew(zombie_claims[:1], 30, {zombie_claims[0].token: b"half"})
    reborn = Buffer(redis_url, buffer.run_id)
    reborn.register_sampler(ring.SAMPLER, "127.0.0.1:3", 1)
    assert reborn.admit_sampler(1, ring.SAMPLER, 0)
    counts = buffer.counts()
    assert (counts["prompts_waiting"], counts["leases_expired"]) == (2, 0)
    assert not ring.finish(buffer, zombie_claims[0])
    with pytest.raises(FencedError, match="replaced by a later start"):
        ring.claim(buffer, "prompts")
    assert buffer.heartbeat(ring.SAMPLER, {"tokens": 1.0}) == "replaced"
    assert buffer.figures() == {}, "a zombie's heartbeat is ignored"
    again = ring.claim(reborn, "prompts", 2)
    assert [(claim.group_id, claim.partial) for claim in again] == [("0-0", b"half"), ("0-1", None)]


def test_a_sampler_that_restarts_during_a_broadcast_is_not_admitted_by_it(buffer: Buffer) -> None:
    acknowledged = buffer.samplers()
    buffer.register_sampler(ring.SAMPLER, "127.0.0.1:3", 1)
    buffer.publish(1, 1, acknowledged)
    assert not buffer.admit_sampler(1, acknowledged[0], 1)
    assert buffer.samplers()[0].state == "JOINING"
    assert buffer.admit_sampler(1, buffer.samplers()[0], 1)


def test_services_report_figures_and_heartbeats(buffer: Buffer) -> None:
    buffer.register_service("feed", "127.0.0.1:5")
    buffer.heartbeat("feed", {"rows": 3.0, "seconds": 0.5})
    buffer.heartbeat("feed", {"rows": 4.0, "seconds": 0.75})
    assert buffer.services() == {"feed": "127.0.0.1:5"}
    assert buffer.figures() == {"feed": {"rows": 4.0, "seconds": 0.75}}
    time.sleep(0.06)
    assert not buffer.samplers(alive_within_seconds=0.05)[0].alive
    buffer.heartbeat(ring.SAMPLER, {})
    assert buffer.samplers(alive_within_seconds=5)[0].alive
