"""The reply to Status: what the controller, the launcher and the registry know of a run."""

from __future__ import annotations

from collections.abc import Collection

from tandem.protos import control_pb2
from tandem.services.buffer.orders import ALL
from tandem.services.buffer.starvation import diagnose
from tandem.services.control.controller import Controller
from tandem.services.control.launcher import Registered, kind_of, number_of

_ORDER = ("feed", "rollout", "environments", "reward", "trainer")


def status_of(
    controller: Controller, decisions: Collection[control_pb2.StatusReply.Decision]
) -> control_pb2.StatusReply:
    """The present status; without what Redis knows while it is away. Raises UnavailableError if it goes away now."""
    orders, recipe, seen = controller.orders, controller.recipe, controller.observe()
    is_away, verdict = not seen.counts, diagnose(seen)
    addresses, versions = {} if is_away else controller.buffer.services(), {}
    for sampler in seen.samplers:
        addresses[sampler.id], versions[sampler.id] = sampler.address, sampler.version
    versions["trainer"] = int(seen.figures.get("trainer", {}).get("policy_version", -1))
    ended = "" if is_away else orders.ended()
    replicas = {} if is_away and isinstance(controller.launcher, Registered) else controller.launcher.replicas()
    services = [
        control_pb2.StatusReply.Service(
            name=name,
            kind=kind_of(name),
            pid=replicas[name].pid,
            state=replicas[name].state,
            restarts=replicas[name].restarts,
            address=addresses.get(name, ""),
            activity=seen.activities.get(name, ""),
            policy_version=versions.get(name, -1),
            paused=kind_of(name) == "rollout" and (name in seen.paused or ALL in seen.paused),
            heartbeat_age_seconds=seen.silences.get(name, -1.0),
        )
        for name in sorted(replicas, key=lambda name: (_ORDER.index(kind_of(name)), number_of(name)))
    ]
    return control_pb2.StatusReply(
        run_id=recipe.run.run_id,
        run_dir=str(recipe.folder.resolve()),
        launcher=controller.launcher.name,
        ended=ended,
        services=services,
        desired_replicas={} if is_away else controller.desired(),
        counts=seen.counts,
        decisions=decisions,
        warnings=[verdict.line] if verdict.cause != "none" and not ended else [],
    )
