"""What the services of a run ask of a Ray cluster, and whether it has room for them. Imports no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tandem.services.config import Recipe

_CPU_SHARES = {"feed": 0.1, "environments": 0.1, "reward": 0.1, "rollout": 0.25, "trainer": 0.25}
"""Cores per process where there are no GPUs: with few cores they have to share them, as on one machine without Ray."""
_LABELS = {
    "feed": "feed",
    "environments": "environment service",
    "reward": "reward service",
    "rollout": "sampler",
    "trainer": "trainer",
}
_TOLERANCE = 1e-4  # Ray counts in ten-thousandths


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one service needs of one machine, or what a machine has."""

    cpus: float
    gpus: float = 0.0

    def holds(self, other: Bundle) -> bool:
        return self.cpus >= other.cpus - _TOLERANCE and self.gpus >= other.gpus - _TOLERANCE

    def __sub__(self, other: Bundle) -> Bundle:
        return Bundle(self.cpus - other.cpus, self.gpus - other.gpus)

    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


def bundle_of(recipe: Recipe, name: str, *, has_gpus: bool) -> Bundle:
    """What the child `name` needs: with GPUs, one for each worker of a sampler and each rank on a trainer's machine."""
    service = name.partition("-")[0]
    width = {"rollout": recipe.rollout.tensor_parallel_size, "trainer": recipe.trainer.num_ranks}.get(service, 1)
    if not has_gpus:
        return Bundle(_CPU_SHARES[service] * width)
    return Bundle(float(width), float(width)) if service in ("rollout", "trainer") else Bundle(1.0)


def lack_of_room(wanted: Mapping[str, Bundle], machines: Sequence[Bundle]) -> str:
    """Says what the children want and what the machines have free, if these do not hold all of them; else ""."""
    if _fit(wanted.values(), machines):
        return ""
    gpus_lack = not _fit([Bundle(0.0, one.gpus) for one in wanted.values()], machines)
    number = Counter((name.partition("-")[0], bundle) for name, bundle in wanted.items())
    wishes = [
        f"{count} {_LABELS[service]}{'s' * (count != 1)} of {_amount(bundle, gpus_lack)}{' each' * (count != 1)}"
        for (service, bundle), count in number.items()
        if bundle.gpus or not gpus_lack
    ]
    free = [one.gpus if gpus_lack else one.cpus for one in machines]
    total = _amount(Bundle(sum(free), sum(free)), gpus_lack)
    split = f" on {len(free)} machines ({', '.join(f'{one:g}' for one in free)})" if len(free) > 1 else ""
    return f"the run wants {', '.join(wishes)}; the cluster has {total} free{split}"


def _amount(bundle: Bundle, of_gpus: bool) -> str:
    return f"{bundle.gpus:g} GPU{'s' * (bundle.gpus != 1)}" if of_gpus else f"{bundle.cpus:g} CPU"


def _fit(wanted: Collection[Bundle], machines: Sequence[Bundle]) -> bool:
    """Whether the machines hold all bundles, largest first, each on the first machine with room for it."""
    free = list(machines)
    for bundle in sorted(wanted, key=lambda one: (one.gpus, one.cpus), reverse=True):
        place = next((index for index, one in enumerate(free) if one.holds(bundle)), None)
        if place is None:
            return False
        free[place] -= bundle
    return True
