"""The reply to Status: what the controller, the launcher and the registry know of a run."""

from __future__ import annotations

from collections.abc import Collection

from tandem.protos import control_pb2
from tandem.services.buffer.orders import ALL
from tandem.services.control.controller import Controller
from tandem.services.control.launcher import kind_of, number_of

_ORDER = ("feed", "rollout", "reward", "trainer")


def status_of(
    controller: Controller, decisions: Collection[control_pb2.StatusReply.Decision]
) -> control_pb2.StatusReply:
    """The present status. Raises UnavailableError if Redis is unreachable."""
    buffer, orders, recipe = controller.buffer, controller.orders, controller.recipe
    addresses, versions = buffer.services(), {}
    for sampler in buffer.samplers():
        addresses[sampler.id], versions[sampler.id] = sampler.address, sampler.version
    figures = buffer.figures()
    versions["trainer"] = int(figures.get("trainer", {}).get("policy_version", -1))
    silences, activities, paused = buffer.silences(), buffer.activities(), orders.samplers("paused")
    replicas = controller.launcher.replicas()
    services = [
        control_pb2.StatusReply.Service(
            name=name,
            kind=kind_of(name),
            pid=replicas[name].pid,
            state=replicas[name].state,
            restarts=replicas[name].restarts,
            address=addresses.get(name, ""),
            activity=activities.get(name, ""),
            policy_version=versions.get(name, -1),
            paused=kind_of(name) == "rollout" and (name in paused or ALL in paused),
            heartbeat_age_seconds=silences.get(name, -1.0),
        )
        for name in sorted(replicas, key=lambda name: (_ORDER.index(kind_of(name)), number_of(name)))
    ]
    return control_pb2.StatusReply(
        run_id=recipe.run.run_id,
        run_dir=str(recipe.folder.resolve()),
        launcher=controller.launcher.name,
        ended=orders.ended(),
        services=services,
        desired_replicas=controller.desired(),
        counts=buffer.counts(),
        decisions=decisions,
        warnings=_warnings(services),
    )


def _warnings(services: Collection[control_pb2.StatusReply.Service]) -> list[str]:
    samplers = [one for one in services if one.kind == "rollout" and one.state not in ("stopped", "failed", "draining")]
    if samplers and all(one.paused for one in samplers):
        return ["all samplers are paused: the trainer waits once it has trained what is scored"]
    return []
