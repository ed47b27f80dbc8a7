"""The machines of a Ray cluster, and where on them the services of a run get their places."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from functools import partial

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tandem.protos.child_environment import HUB_TOKENS, child_environment
from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.services.config import Recipe
from tandem.services.launchers.children import Child, ChildSpec
from tandem.services.launchers.ray_actor import ServiceActor, look_around
from tandem.services.launchers.ray_bundles import Bundle, bundle_of, lack_of_room
from tandem.services.launchers.ray_child import RayChild
from tandem.services.run.endpoint import check_network
from tandem.services.run.folder import external_redis_url, write_text
from tandem.services.run.model_check import ModelFacts
from tandem.services.run.placement import cpu_environment, place
from tandem.services.run.preflight import check_machine
from tandem.services.run.threads import shared_cores

_LOOK_SECONDS = 60.0
_ROOM_SECONDS = 60.0
"""How long a run waits for a cluster that others occupy."""
_POLL_SECONDS = 0.5
_CARRIED = ("TANDEM_", "HF_", "TRANSFORMERS_")
"""Prefixes of variables of `tandem run` that services on other machines get, too."""


class RayCluster:
    """The cluster that this process is connected to. Implements `Machines`.

    The trainer's machines are a placement group, packed; samplers are spread; feed and reward service are anywhere.
    """

    def __init__(self) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._here: str = ray.util.get_node_ip_address()
        self._elsewhere: dict[str, str] = {
            node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["NodeManagerAddress"] != self._here
        }
        self._total = [_bundle(node["Resources"]) for node in nodes]
        self._has_gpus = any(machine.gpus for machine in self._total)
        self._actor = ray.remote(ServiceActor)
        self._recipe: Recipe
        self.num_trainers = 1

    def fitted(self, recipe: Recipe, facts: ModelFacts | None) -> Recipe:
        """On several machines each service listens on the address that its machine has in the cluster."""
        if recipe.weights.backend == "ipc":
            remedy = "set weights.backend=nccl, or use --launcher local"
            raise ConfigError(f"weights.backend=ipc shares one GPU, which Ray does not hand out twice; {remedy}")
        if self._elsewhere:
            recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"host": self._here})})
        self._recipe, self.num_trainers = recipe, recipe.trainer.num_nodes
        if lack := lack_of_room(self._wanted(), self._total):
            raise EnvironmentLackError(f"{lack}; lower these, or take a larger cluster")
        if self._elsewhere:
            self._check_several(recipe)
        else:
            check_machine(recipe, facts)
        self._wait_for_room()
        self._trainers = placement_group(
            [bundle_of(recipe, "trainer", has_gpus=self._has_gpus).resources()] * self.num_trainers, strategy="PACK"
        )
        return recipe

    def check_shared(self, recipe: Recipe, redis_url: str) -> None:
        folder, probe = os.path.abspath(recipe.folder), f".probe-{secrets.token_hex(8)}"
        write_text(recipe.folder / probe, "")
        try:
            look = ray.remote(num_cpus=0, max_retries=0)(look_around)
            looks = {
                ip: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                    folder, probe, redis_url
                )
                for node, ip in self._elsewhere.items()
            }
            deadline = time.monotonic() + _LOOK_SECONDS
            for ip, found in looks.items():
                try:
                    fault = ray.get(found, timeout=max(deadline - time.monotonic(), 0.1))
                except RayError as error:
                    fault = f"it cannot run Tandem: {' '.join(str(error).split())[-300:]}"
                if fault:
                    raise EnvironmentLackError(f"machine {ip} of the Ray cluster: {fault}")
        finally:
            (recipe.folder / probe).unlink()

    def check_added(self, recipe: Recipe, service: str, added: int) -> None:
        bundle = bundle_of(recipe, service, has_gpus=self._has_gpus)
        if lack := lack_of_room({f"{service}-{index}": bundle for index in range(added)}, _free()):
            raise EnvironmentLackError(lack)

    def shared_cores(self, recipe: Recipe) -> Mapping[str, str]:
        return {} if self._elsewhere else shared_cores(recipe)

    def place(self, recipe: Recipe, name: str) -> Mapping[str, str]:
        carried = {key: value for key, value in child_environment().items() if key.startswith(_CARRIED)}
        keys = recipe.reward.key_variables() if name == "reward" else HUB_TOKENS
        if name.startswith(recipe.environment.run_by):
            keys = keys.union(recipe.environment.variables)
        carried |= {key: os.environ[key] for key in keys if key in os.environ}
        if self._has_gpus:  # Ray chooses them, and tells the actor by CUDA_VISIBLE_DEVICES
            needs_one = bundle_of(recipe, name, has_gpus=True).gpus
            return carried if needs_one else {**carried, "CUDA_VISIBLE_DEVICES": ""}
        return {**carried, **(cpu_environment(name) if self._elsewhere else place(recipe, name))}

    def make_child(self, spec: ChildSpec, run_token: str) -> Child:
        return RayChild(spec, partial(self._make_actor, spec, run_token), partial(self._lack_of, spec.name))

    def _make_actor(self, spec: ChildSpec, run_token: str) -> ActorHandle:
        service, _, number = spec.name.partition("-")
        bundle = bundle_of(self._recipe, spec.name, has_gpus=self._has_gpus)
        strategy: object = "SPREAD" if service == "rollout" else "DEFAULT"
        if service == "trainer":
            strategy = PlacementGroupSchedulingStrategy(self._trainers, placement_group_bundle_index=int(number or 0))
        options = {
            "num_cpus": bundle.cpus,
            "num_gpus": bundle.gpus,
            "scheduling_strategy": strategy,
            "max_restarts": 0,  # the process group restarts
            "max_concurrency": 8,
        }
        return self._actor.options(**options).remote(spec, run_token, os.getcwd(), bool(self._elsewhere))

    def _lack_of(self, name: str) -> str:
        bundle = bundle_of(self._recipe, name, has_gpus=self._has_gpus)
        return lack_of_room({name: bundle}, _free())

    def _check_several(self, recipe: Recipe) -> None:
        check_network(recipe)
        machines = ", ".join(sorted({self._here, *self._elsewhere.values()}))
        if not external_redis_url(recipe):
            fault = f"the Ray cluster has several machines ({machines}), and an embedded Redis serves only its own"
            raise ConfigError(f"{fault}; set run.redis_url or TANDEM_REDIS_URL to one that all of them reach")
        if recipe.weights.backend == "nccl" and not self._has_gpus:
            raise ConfigError("weights.backend=nccl needs GPUs, and the Ray cluster has none; set gloo or disk")

    def _wait_for_room(self) -> None:
        """Raises EnvironmentLackError if others occupy the cluster for longer than a while."""
        deadline = time.monotonic() + _ROOM_SECONDS
        while lack := lack_of_room(self._wanted(), _free()):
            if time.monotonic() > deadline:
                raise EnvironmentLackError(f"{lack} after {_ROOM_SECONDS:g} s; end what uses it, or lower these")
            time.sleep(_POLL_SECONDS)

    def _wanted(self) -> dict[str, Bundle]:
        samplers = (f"rollout-{replica}" for replica in range(self._recipe.rollout.num_replicas))
        environments = (f"environments-{replica}" for replica in range(self._recipe.environment.num_services))
        services = (*samplers, *environments, "reward", "feed")
        names = (*(f"trainer-{index}" for index in range(self.num_trainers)), *services)
        return {name: bundle_of(self._recipe, name, has_gpus=self._has_gpus) for name in names}


def _bundle(resources: Mapping[str, float]) -> Bundle:
    return Bundle(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def _free() -> list[Bundle]:
    """What each machine has free. Ray's public functions tell only the sum."""
    return [_bundle(resources) for resources in ray._private.state.available_resources_per_node().values()]
