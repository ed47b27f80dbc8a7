"""What is known of a batch once it is trained."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.protos.types import StepResult, TrainBatch, TrajectoryGroup
from tandem.services.run.json_files import Line
from tandem.services.run.metrics import batch_figures, group_figures
from tandem.services.service_info import cpu_seconds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What the line of a trained batch is made of."""

    batch: TrainBatch
    groups: Mapping[str, TrajectoryGroup]
    result: StepResult
    seconds: Mapping[str, float]
    """The phases of the loop."""
    time: float
    """When they ended, in seconds since 1970."""
    rejections: Mapping[str, float] = field(default_factory=dict)
    trained_ns: tuple[int, int] = (0, 0)
    """From when to when it was trained, in nanoseconds since 1970."""

    def line(self) -> Line:
        """The trainer's part of the batch's line in metrics.jsonl. Warns of rows that no trainer's version sampled."""
        line: Line = {
            "step": self.result.policy_version,
            "optimizer_step": self.result.optimizer_step,
            "time": self.time,
            **batch_figures(self.batch),
            **group_figures(self.groups.values()),
            **self.result.metrics,
            **self.rejections,
            **self.seconds,
            "trainer_idle_seconds": self.seconds.get("seconds_claim", 0.0),
            "trainer_cpu_seconds": cpu_seconds(),
            "processors": len(os.sched_getaffinity(0)),
        }
        if rows := line.get("unknown_version_rows"):
            words = "batch %d was recorded with %d rows of versions that no trainer published; it is trained as it is"
            log.warning(words, self.result.policy_version, rows, extra={"version": self.result.policy_version})
        return line
