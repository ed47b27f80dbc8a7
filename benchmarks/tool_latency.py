"""Measures what slow tools and saved turns cost a sampler with episodes of several turns, and writes JSON.

    python benchmarks/tool_latency.py [--rounds 2] [--windows 12] [--output benchmarks/records/tool_latency.json]

Samplers with vLLM play the same episodes of three turns, with prompts waiting in Redis: `quick`, whose environment
answers at once; `slow`, whose environment takes a lognormal time of 2 s on average between two turns; and `unsaved`,
which is `quick` without saving unfinished episodes.

`quick` and `slow` sample in turns. `rollout.max_groups_in_flight` is as small as an engine needs without tools. The
share of time without a request in the engine may be at most 0.1 higher with slow tools.

`quick` and `unsaved` sample at the same time, because this machine's speed differs by more from minute to minute than
saving costs. They share both cores, so saving lowers the tokens per second of `quick`, and raises its processor time
per token: that of sampler, engine, environments and Redis. Each may be at most 3 % worse in the median window.

Run it on an otherwise idle machine. The exit code is 1 if a bound is missed; the last lines name it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.service_process import SAMPLER, rollout_service  # noqa: E402
from tandem.protos.codec import encode_group  # noqa: E402
from tandem.protos.types import Prompt, SamplingParameters, TrajectoryGroup  # noqa: E402
from tandem.services.buffer.buffer import Buffer  # noqa: E402
from tandem.services.data.tiny_model import VOCABULARY, build_tiny_model  # noqa: E402

TURNS, SAMPLES, GROUPS_IN_FLIGHT = 3, 4, 4
GROUPS = 120
"""Of a measurement. It begins when a tenth of them is completed, and ends with half, while prompts still wait."""
WINDOW_SECONDS, WINDOW_GROUPS = 40.0, 400
"""Of the samplers at the same time. So many groups always wait: more than a sampler completes in a window."""
TOOL_SECONDS = 2.0
SIDES = {"quick": {}, "slow": {"seconds": TOOL_SECONDS}, "unsaved": {"partial_rollout": False}}
MOST_IDLE, MOST_COST = 0.1, 1.03
MEASURE_SECONDS = 300.0


@dataclass(frozen=True)
class Sums:
    """Of a sampler since its start. Processor time is that of all its processes."""

    tokens: float
    idle_seconds: float
    busy_seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Measurement:
    """Of a sampler between two moments. Processor time is in microseconds."""

    tokens_per_second: float
    idle_share: float
    cpu_per_token: float

    @classmethod
    def between(cls, began: Sums, ended: Sums) -> Measurement:
        tokens, idle = ended.tokens - began.tokens, ended.idle_seconds - began.idle_seconds
        seconds = idle + ended.busy_seconds - began.busy_seconds
        return cls(tokens / seconds, idle / seconds, 1e6 * (ended.cpu_seconds - began.cpu_seconds) / tokens)

    def __str__(self) -> str:
        rate = f"{self.tokens_per_second:.0f} tokens/s, idle {self.idle_share:.3f}"
        return f"{rate}, {self.cpu_per_token:.0f} µs of processor time a token"


@dataclass
class Side:
    """A sampler of its own run."""

    buffer: Buffer
    folder: Path
    process: psutil.Process
    index: int = 0

    def measure(self) -> Measurement:
        """While it is the only one that samples."""
        done = self._num_done()
        self.admit(GROUPS)
        began = self._sums_at(done + GROUPS // 10)
        ended = self._sums_at(done + GROUPS // 2)
        self._sums_at(done + GROUPS)
        return Measurement.between(began, ended)

    def admit(self, num_waiting: int) -> None:
        """Adds prompts until so many wait or are in work."""
        missing = num_waiting - (self.index - self._num_done())
        prompts = [_prompt(self.index + number) for number in range(missing)]
        self.index += missing
        self.buffer.admit([(one.group_id, encode_group(TrajectoryGroup(one))) for one in prompts], self.index)

    def next_sums(self) -> Sums:
        """Of its next heartbeat, so that tokens and processor time are of the same moment."""
        last, deadline = self._figures(), time.monotonic() + MEASURE_SECONDS
        while (newest := self._figures()) == last:
            _check_deadline(deadline, "a heartbeat")
            time.sleep(0.01)
        return self._sums(newest)

    def _num_done(self) -> int:
        return self.buffer.counts()["generated_waiting"]

    def _figures(self) -> dict[str, float]:
        return dict(self.buffer.figures()[SAMPLER])

    def _sums(self, figures: dict[str, float]) -> Sums:
        redis = [one for one in psutil.Process().children() if str(self.folder) in " ".join(one.cmdline())]
        used = {self.process, *self.process.children(recursive=True), *redis}
        cpu_seconds = sum(sum(one.cpu_times()[:2]) for one in used)
        return Sums(figures["sampled_tokens"], figures["idle_seconds"], figures["busy_seconds"], cpu_seconds)

    def _sums_at(self, num_done: int) -> Sums:
        deadline = time.monotonic() + MEASURE_SECONDS
        while self._num_done() < num_done:
            _check_deadline(deadline, f"{num_done} groups")
            time.sleep(0.05)
        return self._sums(self._figures())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="of slow tools")
    parser.add_argument("--windows", type=int, default=12, help="of saved and unsaved turns")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "tool_latency.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-tools-") as scratch, ExitStack() as stack:
        model = build_tiny_model(Path(scratch) / "model", hidden=64, ends=False)
        sides = {}
        for name, changes in SIDES.items():
            folder = Path(scratch) / name
            folder.mkdir()
            buffer, process = stack.enter_context(rollout_service(folder, _values(folder, model, **changes)))
            sides[name] = Side(buffer, folder, psutil.Process(process.pid))
        for side in sides.values():
            side.measure()  # warms up
        alone = _in_turns([(name, sides[name]) for name in ("quick", "slow")], arguments.rounds)
        together = _at_once([(name, sides[name]) for name in ("quick", "unsaved")], arguments.windows)
    command = f"python benchmarks/tool_latency.py --rounds {arguments.rounds} --windows {arguments.windows}"
    record, missed = _record(alone, together)
    arguments.output.write_text(json.dumps({"command": command, **record}, indent=1) + "\n")
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def _in_turns(sides: list[tuple[str, Side]], rounds: int) -> dict[str, list[Measurement]]:
    measured: dict[str, list[Measurement]] = {name: [] for name, _ in sides}
    for number in range(rounds):
        for name, side in sides:
            measured[name].append(side.measure())
            print(f"round {number + 1} {name:8} {measured[name][-1]}", flush=True)
    return measured


def _at_once(sides: list[tuple[str, Side]], windows: int) -> dict[str, list[Measurement]]:
    measured: dict[str, list[Measurement]] = {name: [] for name, _ in sides}
    for _, side in sides:
        side.admit(WINDOW_GROUPS)
    for number in range(windows):
        began = [side.next_sums() for _, side in sides]
        time.sleep(WINDOW_SECONDS)
        for (name, side), before in zip(sides, began, strict=True):
            measured[name].append(Measurement.between(before, side.next_sums()))
            print(f"window {number + 1} {name:8} {measured[name][-1]}", flush=True)
        for _, side in sides:
            side.admit(WINDOW_GROUPS)
    return measured


def _check_deadline(deadline: float, wanted: str) -> None:
    if time.monotonic() > deadline:
        raise SystemExit(f"{wanted} did not come within {MEASURE_SECONDS:g} s")


def _record(
    alone: dict[str, list[Measurement]], together: dict[str, list[Measurement]]
) -> tuple[dict[str, object], list[str]]:
    slow_rounds = list(zip(alone["slow"], alone["quick"], strict=True))
    windows = list(zip(together["quick"], together["unsaved"], strict=True))
    more_idle = statistics.median(slow.idle_share - quick.idle_share for slow, quick in slow_rounds)
    slowed = statistics.median(slow.tokens_per_second / quick.tokens_per_second for slow, quick in slow_rounds)
    rates = [saved.tokens_per_second / unsaved.tokens_per_second for saved, unsaved in windows]
    costs = [saved.cpu_per_token / unsaved.cpu_per_token for saved, unsaved in windows]
    rate, cost = statistics.median(rates), statistics.median(costs)
    record = {
        "cores": os.cpu_count(),
        "mean_tool_seconds": TOOL_SECONDS,
        "idle_share": {name: round(statistics.median(m.idle_share for m in all_), 4) for name, all_ in alone.items()},
        "more_idle_with_slow_tools": round(more_idle, 4),
        "slow_over_quick_tokens_per_second": round(slowed, 3),
        "tokens_per_second_at_once": {
            name: round(statistics.median(m.tokens_per_second for m in all_)) for name, all_ in together.items()
        },
        "saved_over_unsaved_tokens_per_second": round(rate, 3),
        "saved_over_unsaved_tokens_per_second_of_windows": [round(one, 3) for one in rates],
        "saved_over_unsaved_cpu_per_token": round(cost, 3),
        "saved_over_unsaved_cpu_per_token_of_windows": [round(one, 3) for one in costs],
    }
    missed = []
    if more_idle > MOST_IDLE:
        missed.append(f"with slow tools the engine idles {more_idle:.3f} more of the time, not at most {MOST_IDLE}")
    if cost > MOST_COST:
        missed.append(f"with saved episodes a token takes {cost:.3f} times the processor time, not {MOST_COST}")
    if rate < 1 / MOST_COST:
        missed.append(f"with saved episodes there are {rate:.3f} times the tokens per second, not {1 / MOST_COST:.3f}")
    return record, missed


def _values(folder: Path, model: Path, seconds: float = 0.0, **rollout: object) -> dict[str, object]:
    limits = {"samples_per_prompt": SAMPLES, "max_groups_in_flight": GROUPS_IN_FLIGHT, "max_response_tokens": 900}
    return {
        "run": {"run_id": folder.name, "folder": str(folder / "run")},
        "model": {"path": str(model)},
        "data": {"train_file": "none", "max_prompt_tokens": 100},
        "environment": {
            "path": f"{ROOT / 'benchmarks' / 'slow_tool.py'}:SlowTool",
            "arguments": {"turns": TURNS, "seconds": seconds},
            "max_turns": TURNS,
        },
        "reward": {"scorer": "earned"},
        "rollout": {**limits, "kv_cache_bytes": 256 << 20, **rollout},
    }


def _prompt(index: int) -> Prompt:
    """A turn ends with one of three letters, after about thirty tokens."""
    dice = np.random.default_rng(index)
    words = "".join(dice.choice(list("abcdefgh"), 12))
    ids = dice.integers(3, len(VOCABULARY), 12, dtype=np.int32)
    said = ({"role": "user", "content": words},)
    return Prompt(0, index, ids, SAMPLES, SamplingParameters(max_tokens=900, stop=("a", "b", "c")), messages=said)


if __name__ == "__main__":
    sys.exit(main())
