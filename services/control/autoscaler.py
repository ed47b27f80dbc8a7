"""The autoscaler at work: reads what the run shows, asks the policy, and orders what it decides from the controller.

Every decision is reported, shown in the status, and written to decisions.jsonl. A "no change" is one, too, if its
reason is another one than before.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping

from google.protobuf.json_format import MessageToDict

from tandem.protos import control_pb2
from tandem.protos.errors import ConfigError, TandemError, UserError
from tandem.services.config import Recipe
from tandem.services.control.controller import Controller
from tandem.services.control.launcher import SAMPLERS, StartedByHand
from tandem.services.planning.autoscale import Decision, Replicas, State, Window, decide
from tandem.services.planning.observation import Queues, batches_of, queues_of
from tandem.services.process import Repeated
from tandem.services.run.folder import cannot_write
from tandem.services.run.json_files import DECISIONS_FILE, METRICS_FILE, JsonLines, JsonTail

MAX_SHOWN = 20
"""Decisions in a status."""
_SECONDS = 1.0
_WINDOW_BATCHES = 50
_WINDOW_QUEUES = 60
_SCORERS = "reward"


class Autoscaler(Repeated):
    """Context manager: decides every second. `report` gets a line for each decision. Raises ConfigError if the launcher
    cannot do what the recipe allows.
    """

    def __init__(self, recipe: Recipe, controller: Controller, report: Callable[[str], None]) -> None:
        super().__init__("autoscaler", _SECONDS, self._look)
        self._options = recipe.autoscale
        if isinstance(controller.launcher, StartedByHand):
            raise ConfigError("autoscale.mode: a controller with the launcher none starts no samplers; set it to off")
        if self._options.max_scorers > 1 and _SCORERS not in controller.launcher.scalable:
            name = controller.launcher.name
            raise ConfigError(f"autoscale.max_scorers is above 1, but the launcher {name} runs one reward service")
        self._recipe = recipe
        self._controller = controller
        self._report = report
        self._metrics = JsonTail(recipe.folder / METRICS_FILE)
        self._lines: deque[Mapping[str, object]] = deque(maxlen=_WINDOW_BATCHES)
        self._queues: deque[Queues] = deque(maxlen=_WINDOW_QUEUES)
        self._state = State()
        self._file = JsonLines(recipe.folder / DECISIONS_FILE)
        earlier = self._file.read()
        self._shown = deque((control_pb2.StatusReply.Decision(**line) for line in earlier), maxlen=MAX_SHOWN)
        self._last = ""
        self._fault = ""

    def decisions(self) -> list[control_pb2.StatusReply.Decision]:
        """The last ones, oldest first. Safe to call from any thread."""
        return list(self._shown)

    def _look(self) -> None:
        try:
            self._observe()
            self._decide()
            self._fault = ""
        except TandemError as error:  # Redis is restarting, or the disk is full
            if str(error) != self._fault:
                self._report(f"autoscaler: {error}")
            self._fault = str(error)

    def _observe(self) -> None:
        lines, fresh = self._metrics.read()
        if fresh:
            self._lines.clear()
        self._lines.extend(lines)
        buffer = self._controller.buffer
        self._queues.append(
            queues_of(
                time.time(),
                self._recipe,
                counts=buffer.counts(),
                samplers=buffer.samplers(),
                silences=buffer.silences(),
            )
        )

    def _decide(self) -> None:
        desired = self._controller.desired()
        current = Replicas(desired[SAMPLERS], desired.get(_SCORERS, 1))
        if paused := self._controller.orders.samplers("paused"):
            which = ", ".join(sorted(paused)) if "*" not in paused else "all samplers"
            reason = f"no change: an operator has paused {which}"
            self._note(Decision(time.time(), "rollout", current.samplers, current.samplers, reason))
            return
        batches = batches_of(list(self._lines), self._recipe)
        window = Window(batches, list(self._queues), self._recipe.run.staleness_budget)
        self._state, decision = decide(self._options, self._state, current, window, time.time())
        refusal = ""
        if decision.is_change and self._options.mode == "on":
            try:
                self._controller.scale(decision.service, decision.wanted)
            except UserError as error:
                refusal = f"; refused: {error}"
        self._note(decision, refusal)

    def _note(self, decision: Decision, refusal: str = "") -> None:
        kind = re.sub(r"[\d.]+", "", decision.reason)
        if kind == self._last and not decision.is_change:
            return
        self._last = kind
        shown = control_pb2.StatusReply.Decision(
            time=decision.time,
            service=decision.service,
            from_replicas=decision.current,
            to_replicas=decision.wanted,
            reason=decision.reason + refusal,
            dry_run=self._options.mode == "dry_run",
        )
        self._shown.append(shown)
        would = "would order " if shown.dry_run else ""
        change = f"{would}{decision.service} {decision.current} -> {decision.wanted}: " if decision.is_change else ""
        self._report(f"autoscaler: {change}{shown.reason}")
        line = MessageToDict(shown, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        try:
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.append(line)
        except OSError as error:
            raise cannot_write(self._file.path, error) from None
