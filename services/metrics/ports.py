"""On which port a service listens for Prometheus."""

from __future__ import annotations

import os

from tandem.protos.errors import ConfigError

PORT_VARIABLE = "TANDEM_METRICS_PORT"
"""Port of this service alone, in place of the ports that follow from `run.metrics_port`: for containers. 0: none."""

OFFSETS = {"controller": 0, "feed": 1, "reward": 2, "trainer": 3, "rollout": 10, "environments": 700}
"""Added to `run.metrics_port`, by service. The replica's number is added, too."""
_REWARD_REPLICAS = 500  # in place of its offset, which has no room
_MAX_PORT = 65535


def metrics_port(base: int, name: str) -> int:
    """The port of a service, e.g. `rollout-1`; 0 if it has none. Raises ConfigError for a variable that is no port."""
    if own := os.environ.get(PORT_VARIABLE, ""):
        if not own.isascii() or not own.isdigit() or int(own) > _MAX_PORT:
            raise ConfigError(
                f"{PORT_VARIABLE}={own!r:.20} is not a port; set it to a number up to {_MAX_PORT}, or 0 for none"
            )
        return int(own)
    return base + port_offset(name) if base else 0


def port_offset(name: str) -> int:
    """What is added to `run.metrics_port` for a service."""
    service, _, number = name.partition("-")
    replica = int(number or 0)
    return (_REWARD_REPLICAS if service == "reward" and replica else OFFSETS[service]) + replica
