"""The controller's calls, with real gRPC and Redis: orders, what the services learn of them, and who may give them."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from tandem.protos import control_pb2
from tandem.protos.errors import (
    DeadlineError,
    FencedError,
    NotAdmittedError,
    RunExistsError,
    UnavailableError,
    UserError,
)
from tandem.services.buffer.buffer import COUNTERS, Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.buffer.types import STATES
from tandem.services.commands import status as status_command
from tandem.services.commands.find_controller import ControllerPlace
from tandem.services.commands.status import watch_running
from tandem.services.config import Recipe
from tandem.services.control import controller as controller_module
from tandem.services.control import server
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.launcher import StartedByHand
from tandem.services.rpc.client import translated
from tandem.services.rpc.tokens import Role
from tests.services.control.conftest import Served
from tests.support.redis_ring import SAMPLER, claim, offer, score
from tests.support.service_wire import token_of
from tests.support.waiting import eventually, looping

SECONDS = 10.0


def status_of(served: Served) -> control_pb2.StatusReply:
    with translated():
        reply: control_pb2.StatusReply = served.stub.Status(control_pb2.StatusRequest(), timeout=SECONDS)
        return reply


def pause(served: Served, name: str = "") -> list[str]:
    with translated():
        return list(served.stub.Pause(control_pb2.PauseSamplersRequest(name=name), timeout=SECONDS).names)


def resume(served: Served, name: str = "") -> list[str]:
    with translated():
        return list(served.stub.Resume(control_pb2.ResumeSamplersRequest(name=name), timeout=SECONDS).names)


def drain(served: Served, name: str) -> None:
    with translated():
        served.stub.Drain(control_pb2.DrainSamplerRequest(name=name), timeout=SECONDS)


def scale(served: Served, service: str, replicas: int) -> None:
    with translated():
        served.stub.Scale(control_pb2.ScaleRequest(service=service, replicas=replicas), timeout=SECONDS)


def test_status_tells_all_that_is_known_of_a_run(served: Served) -> None:
    buffer = served.buffer
    buffer.heartbeat("trainer", {"policy_version": 7}, "waits for scored groups")
    status = status_of(served)
    assert [one.name for one in status.services] == ["feed", "rollout-0", "rollout-1", "reward", "trainer"]
    feed, first, second, _, trainer = status.services
    assert (feed.kind, feed.state, feed.policy_version, feed.paused) == ("feed", "running", -1, False)
    assert (first.kind, first.state, first.policy_version) == ("rollout", "running", 0)
    assert (second.state, second.address) == ("starting", "127.0.0.1:2")
    assert (trainer.policy_version, trainer.activity) == (7, "waits for scored groups")
    assert 0.0 <= trainer.heartbeat_age_seconds < SECONDS
    assert (status.launcher, status.ended, dict(status.desired_replicas)) == ("none", "", {"rollout": 2})
    assert dict(status.counts) == buffer.counts()


def test_a_watcher_sees_the_status_at_once_and_then_its_changes(served: Served) -> None:
    replies = served.stub.Watch(control_pb2.WatchRequest(), timeout=2 * SECONDS)
    first = next(replies)
    assert first.counts["admitted"] == 0
    score(served.buffer, 2)
    assert next(reply for reply in replies if reply.counts["admitted"] == 2).counts["scored_waiting"] == 2
    pause(served, "rollout-1")
    assert next(reply for reply in replies if reply.services[2].paused).services[1].paused is False
    replies.cancel()


def test_the_command_shows_the_status_until_the_run_ends(served: Served) -> None:
    said = io.StringIO()
    place = ControllerPlace(served.buffer.services()["controller"], token_of(served.buffer, Role.read))
    with looping(lambda _: watch_running(place, Console(file=said, width=200))):
        eventually(lambda: "stale_results_refused" in said.getvalue())
        assert "running, paused" not in said.getvalue()
        pause(served, "rollout-0")
        eventually(lambda: "running, paused" in said.getvalue())
        Orders(served.buffer.connection).end_run("finished")
        eventually(lambda: ": finished, launcher none" in said.getvalue())
    shown = [line.split()[0] for line in said.getvalue().splitlines() if line.strip()]
    counts = shown[shown.index("admitted") :][: len(COUNTERS) + len(STATES)]
    assert counts == [*COUNTERS, *STATES], "a reply to Status has no order"


def test_the_command_says_that_it_waits_for_a_controller_that_hangs_and_gives_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_command, "RPC_SECONDS", 0.2)
    monkeypatch.setattr(status_command, "_HANG_SECONDS", 2.0)
    hangs, goes_on = threading.Event(), threading.Event()

    def status(self: server.ControlServicer) -> control_pb2.StatusReply:
        assert not hangs.is_set() or goes_on.wait(SECONDS)
        return server.status_of(self.controller, ())

    monkeypatch.setattr(server.ControlServicer, "_status", status)
    said = io.StringIO()
    address = served.buffer.services()["controller"]
    place = ControllerPlace(address, token_of(served.buffer, Role.read))
    silent = f"the controller at {address} has not answered for"
    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(watch_running, place, Console(file=said, width=200))
        eventually(lambda: "rollout-1" in said.getvalue())
        hangs.set()
        eventually(lambda: silent in said.getvalue())
        assert not watching.done()
        with pytest.raises(DeadlineError, match=silent):
            watching.result(SECONDS)
        goes_on.set()


def test_the_status_says_that_redis_is_away_without_asking_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def away(call: object) -> None:
        asked.append("Redis")
        raise UnavailableError("Redis is away")

    monkeypatch.setattr(served.buffer.connection, "retried", away)
    eventually(lambda: asked)
    served.controller._answered_at -= 100.0
    asked.clear()
    (warning,) = status_of(served).warnings
    assert warning.startswith("every service waits for Redis, which has not answered for 10")
    assert asked in ([], ["Redis"]), "only a heartbeat comes meanwhile"


def test_a_checkpoint_is_ordered_by_an_operator_only(served: Served) -> None:
    orders = Orders(served.buffer.connection)
    served.stub.Checkpoint(control_pb2.CheckpointRequest(), timeout=SECONDS)
    assert orders.checkpoint_wanted()
    orders.checkpoint_written()
    assert not orders.checkpoint_wanted()
    with pytest.raises(FencedError, match="has another controller now"):
        orders.order_checkpoint("somebody")


def test_a_paused_sampler_claims_nothing_until_it_is_resumed_even_if_it_restarts(served: Served) -> None:
    buffer = served.buffer
    offer(buffer, 2)
    assert pause(served, SAMPLER) == [SAMPLER]
    with pytest.raises(NotAdmittedError, match="sampler rollout-0 is paused until it is resumed"):
        claim(buffer, "prompts")
    buffer.register_sampler(SAMPLER, "127.0.0.1:1", 1)
    buffer.publish(1, 0, [SAMPLER])
    with pytest.raises(NotAdmittedError, match="is paused"):
        claim(buffer, "prompts")
    assert resume(served, SAMPLER) == [SAMPLER]
    assert len(claim(buffer, "prompts")) == 1


def test_all_samplers_are_paused_also_those_that_join_later(served: Served) -> None:
    buffer = served.buffer
    offer(buffer, 2)
    assert pause(served) == ["rollout-0", "rollout-1"]
    (warning,) = status_of(served).warnings
    assert warning == "all samplers are paused: the trainer waits once it has trained what is scored"
    buffer.register_sampler("rollout-2", "127.0.0.1:3", 1)
    buffer.publish(1, 0, [SAMPLER, "rollout-2"])
    with pytest.raises(NotAdmittedError, match="is paused"):
        buffer.claim("prompts", "rollout-2", 1, 30.0, 0)
    assert resume(served, SAMPLER) == [SAMPLER]
    assert [one.paused for one in status_of(served).services if one.kind == "rollout"] == [False, True, True]
    assert len(claim(buffer, "prompts")) == 1
    assert resume(served) == ["rollout-1", "rollout-2"] and list(status_of(served).warnings) == []


@pytest.mark.parametrize("call", [pause, resume])
def test_an_unknown_sampler_is_named_with_those_that_run(served: Served, call: object) -> None:
    assert callable(call)
    for name in ("rollout-7", "trainer"):
        with pytest.raises(UserError, match=f"no sampler '{name}' runs; there are rollout-0, rollout-1"):
            call(served, name)
    with pytest.raises(UserError, match="no sampler 'rollout-7'"):
        drain(served, "rollout-7")


def test_the_first_samplers_work_and_the_others_stand_by(served: Served) -> None:
    buffer = served.buffer
    buffer.publish(1, 0, [SAMPLER, "rollout-1"])
    offer(buffer, 2)
    scale(served, "rollout", 1)
    eventually(lambda: served.controller.orders.samplers("standby") == {"rollout-1"})
    with pytest.raises(NotAdmittedError, match="rollout-1 is not among the samplers that are ordered"):
        buffer.claim("prompts", "rollout-1", 1, 30.0, 0)
    assert dict(status_of(served).desired_replicas) == {"rollout": 1}
    scale(served, "rollout", 2)
    eventually(lambda: not served.controller.orders.samplers("standby"))
    assert len(buffer.claim("prompts", "rollout-1", 1, 30.0, 0)) == 1
    compose = r"`docker compose up .* rollout=4 rollout` \(with the profile gpu .* rollout-gpu\)"
    with pytest.raises(UserError, match=f"rollout=4: 2 are running, .*{compose}"):
        scale(served, "rollout", 4)
    with pytest.raises(UserError, match="reward cannot be scaled; only rollout can under the launcher none"):
        scale(served, "reward", 2)
    assert dict(status_of(served).desired_replicas) == {"rollout": 2}


def test_a_drained_sampler_is_told_to_leave(served: Served) -> None:
    buffer = served.buffer
    assert buffer.heartbeat("rollout-1", {}) == ""
    drain(served, "rollout-1")
    assert buffer.heartbeat("rollout-1", {}) == "left"
    status = status_of(served)
    assert (status.services[2].state, status.desired_replicas["rollout"]) == ("draining", 1)
    with pytest.raises(UserError, match=r"there are rollout-0$"):
        pause(served, "rollout-1")


def test_a_stopped_run_tells_its_services(served: Served) -> None:
    served.stub.Stop(control_pb2.StopRequest(), timeout=SECONDS)
    assert served.buffer.heartbeat("feed", {}) == "stopped"
    assert status_of(served).ended == "stopped"


def test_a_run_has_one_controller(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = served.buffer
    monkeypatch.setattr(controller_module, "LEASE_SECONDS", 1.5)
    place = buffer.services()["controller"]
    with pytest.raises(RunExistsError, match=f"has a controller already, at {place}; use that one, or stop it first"):
        Lease(buffer, "another").__enter__()
    assert len(str(RunExistsError("x")).splitlines()) == 1
    with pytest.raises(FencedError):
        Orders(buffer.connection).order_samplers("another", "paused", [SAMPLER])
    assert served.controller.failure is None


def test_a_controller_that_was_replaced_takes_no_more_orders(served: Served) -> None:
    buffer = served.buffer
    buffer.connection.redis.set(buffer.connection.key("controller"), "another", px=60_000)
    with pytest.raises(FencedError, match="has another controller now"):
        pause(served, SAMPLER)
    eventually(lambda: served.controller.failure is not None)


def test_orders_outlive_a_controller_that_was_killed(recipe: Recipe, buffer: Buffer) -> None:
    first = Lease(buffer, "killed")
    first.__enter__()
    controller = Controller(recipe, buffer, StartedByHand(buffer), first)
    assert controller.first_replicas("rollout", 1) == 1
    controller.scale("rollout", 2)
    controller.pause("rollout-1")

    assert Orders(buffer.connection).hold("killed", 0.05)  # its lease ends, as after some seconds
    with Lease(buffer, "next") as lease:
        following = Controller(recipe, buffer, StartedByHand(buffer), lease)
        assert following.desired() == {"rollout": 2}
        assert following.first_replicas("rollout", 1) == 2, "the recipe is the same, so the last order holds"
        assert following.orders.samplers("paused") == {"rollout-1"}
        assert following.first_replicas("rollout", 3) == 3, "the recipe was changed, which is an order, too"
    with pytest.raises(FencedError):
        controller.pause("rollout-0")
