"""Measures a sampler against raw vLLM: tokens per second, and CPU time per sampled token.

    python benchmarks/sampler.py [--rounds 5] [--output benchmarks/records/sampler.json]

Processes answer the same prompts with the same settings of the engine, in turns: `LLM.generate` of vLLM (`raw`), our
`Sampler` without a service (`sampler`), and the rollout service with prompts waiting in Redis (`service`), from where a
consumer claims the groups. It waits for them, as a reward service does: polling slows down the engine. All have the
number of threads and the environment that `tandem run` gives a sampler; `defaults` is `raw` without that environment.
None makes texts of tokens. They do so for answers of 4, 64 and 240 tokens, in groups of 8, as many at once as in the
demo. Every ratio is one of two neighbouring measurements, and the record has the medians over the rounds. Run it on an
otherwise idle machine. The exit code is 1 if a ratio of tokens per second of `sampler` or `service` is below its limit;
the last lines name it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.service_process import rollout_service  # noqa: E402
from tandem.protos.codec import encode_group  # noqa: E402
from tandem.protos.types import Prompt, SamplingParameters, TrajectoryGroup  # noqa: E402
from tandem.rollout.config import RolloutConfig  # noqa: E402
from tandem.rollout.engine import SamplerArguments, find_engine  # noqa: E402
from tandem.services.data.tiny_model import VOCABULARY, build_tiny_model  # noqa: E402
from tandem.services.run.placement import automatic_threads, cpu_environment  # noqa: E402

GROUPS = {4: 96, 64: 32, 240: 8}
"""Groups of a measurement, by the length of their answers."""
WAYS = ("raw", "defaults", "sampler", "service")
SAMPLES, PROMPT_TOKENS, GROUPS_IN_FLIGHT = 8, 12, 32
LEAST = {4: 0.7, 64: 0.9, 240: 0.9}
CONFIG = RolloutConfig(
    samples_per_prompt=SAMPLES,
    max_groups_in_flight=GROUPS_IN_FLIGHT,
    max_response_tokens=256,
    kv_cache_bytes=256 << 20,
    num_threads=automatic_threads(1),
)
RUN_ID = "sampler"
START_SECONDS, MEASURE_SECONDS, CLAIM_SECONDS = 120.0, 120.0, 5.0
READER = "reward-0"
"""The consumer's name."""

Measure = Callable[[list[Prompt]], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--lengths", nargs="+", type=int, choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "sampler.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-sampler-") as scratch:
        folder = Path(scratch)
        build_tiny_model(folder / "model", hidden=128, layers=4, ends=False)
        measured = _measure_all(folder, arguments.ways, arguments.lengths, arguments.rounds)
    results = {length: _result(rounds) for length, rounds in measured.items()}
    record = {
        "command": "python benchmarks/sampler.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "answers_per_group": SAMPLES,
        "prompt_tokens": PROMPT_TOKENS,
        "groups_at_once": GROUPS_IN_FLIGHT,
        "threads": CONFIG.num_threads,
        "by_answer_tokens": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = [
        f"{length} tokens: {way} samples {ratio:.2f} times the tokens per second of raw vLLM, not {LEAST[length]}"
        for length, result in results.items()
        for way, ratio in result["tokens_per_second_over_raw"].items()
        if way != "defaults" and ratio < LEAST[length]
    ]
    print("\n".join([json.dumps(record, indent=2), *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def _result(rounds: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Medians of (tokens per second, CPU microseconds per token) of each way, and of its ratios to `raw`."""
    ways = list(rounds[0])

    def median(of: Callable[[dict[str, tuple[float, float]]], float]) -> float:
        return float(f"{statistics.median(map(of, rounds)):.4g}")

    others = [way for way in ways if way != "raw"] if "raw" in ways else []
    return {
        "tokens_per_second": {way: median(lambda one, way=way: one[way][0]) for way in ways},
        "cpu_microseconds_per_token": {way: median(lambda one, way=way: one[way][1]) for way in ways},
        "tokens_per_second_over_raw": {way: median(lambda one, way=way: one[way][0] / one["raw"][0]) for way in others},
        "cpu_over_raw": {way: median(lambda one, way=way: one[way][1] / one["raw"][1]) for way in others},
    }


def _measure_all(
    folder: Path, names: list[str], lengths: list[int], rounds: int
) -> dict[int, list[dict[str, tuple[float, float]]]]:
    ways = {name: _Way(name, folder) for name in names}
    try:
        for way in ways.values():
            way.start()
        measured: dict[int, list[dict[str, tuple[float, float]]]] = {length: [] for length in lengths}
        for way in ways.values():
            way.measure(min(GROUPS))  # warms up
        for _ in range(rounds):
            for length in lengths:
                measured[length].append({name: way.measure(length) for name, way in ways.items()})
        return measured
    finally:
        for way in ways.values():
            way.end()


class _Way:
    """One way to sample, in a process of its own, because an engine is forked from a process without threads."""

    def __init__(self, name: str, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, name, folder))
        threads = {"OMP_NUM_THREADS": str(CONFIG.num_threads)}
        with _variables(threads if name == "defaults" else {**cpu_environment("rollout"), **threads}):
            self._process.start()
        theirs.close()
        self._index = 0

    def start(self) -> None:
        self._ask(None, START_SECONDS)

    def measure(self, length: int) -> tuple[float, float]:
        """(tokens per second, CPU microseconds per token) of one round."""
        prompts = [_prompt(self._index + number, length) for number in range(GROUPS[length])]
        self._index += len(prompts)
        seconds, cpu_seconds = self._ask(prompts, MEASURE_SECONDS)
        num_tokens = length * SAMPLES * len(prompts)
        return num_tokens / seconds, 1e6 * cpu_seconds / num_tokens

    def end(self) -> None:
        family = [self._process, *psutil.Process(self._process.pid).children(recursive=True)]
        for process in family:
            process.kill()
        self._process.join()

    def _ask(self, prompts: list[Prompt] | None, seconds: float) -> tuple[float, float]:
        if prompts is not None:
            self._pipe.send(prompts)
        if not self._pipe.poll(seconds):
            raise SystemExit(f"no answer within {seconds:g} s")
        return self._pipe.recv()


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that processes have which start within this context."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _prompt(index: int, length: int) -> Prompt:
    dice = np.random.default_rng(index)
    ids = dice.integers(3, len(VOCABULARY), PROMPT_TOKENS, dtype=np.int32)
    return Prompt(0, index, ids, SAMPLES, SamplingParameters(max_tokens=length))


def _answer(pipe: Connection, way: str, folder: Path) -> None:
    """The process of one way: measures what the pipe asks for."""
    arguments = SamplerArguments(CONFIG, str(folder / "model"), "float32", max_model_tokens=320, seed=0)
    ways = {"raw": _raw, "defaults": _raw, "sampler": _sampler, "service": _service}
    asyncio.run(ways[way](pipe, arguments, folder))


async def _measure(pipe: Connection, sample: Callable[[list[Prompt]], Any], pid: int) -> None:
    """Replies with wall seconds and CPU seconds of the process and its children to each list of prompts."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    pipe.send((0.0, 0.0))
    while True:
        prompts = await asyncio.to_thread(pipe.recv)
        before, started = _cpu_seconds(family), time.perf_counter()
        await sample(prompts)
        pipe.send((time.perf_counter() - started, _cpu_seconds(family) - before))


def _cpu_seconds(family: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in family)


async def _raw(pipe: Connection, arguments: SamplerArguments, folder: Path) -> None:
    from tandem.rollout.vllm.launch import engine_arguments

    settings = engine_arguments(arguments)
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.inputs import TokensPrompt

    names = {field.name for field in fields(EngineArgs)} - {"worker_extension_cls"}
    llm = LLM(**{name: value for name, value in vars(settings).items() if name in names})

    async def sample(prompts: list[Prompt]) -> None:
        ids = [TokensPrompt(prompt_token_ids=prompt.token_ids.tolist()) for prompt in prompts]
        length = prompts[0].sampling.max_tokens
        params = SamplingParams(n=SAMPLES, max_tokens=length, logprobs=0, flat_logprobs=True, detokenize=False)
        outputs = llm.generate(ids, params, use_tqdm=False)
        assert all(len(one.token_ids) == length for output in outputs for one in output.outputs)

    await _measure(pipe, sample, os.getpid())


async def _sampler(pipe: Connection, arguments: SamplerArguments, folder: Path) -> None:
    sampler = await find_engine(CONFIG.engine).start(arguments)
    free = asyncio.Semaphore(GROUPS_IN_FLIGHT)

    async def sample_group(prompt: Prompt) -> None:
        async with free:
            await sampler.sample(prompt.token_ids, prompt.num_samples, prompt.sampling, key=prompt.group_id)

    async def sample(prompts: list[Prompt]) -> None:
        await asyncio.gather(*(sample_group(prompt) for prompt in prompts))

    await _measure(pipe, sample, os.getpid())


async def _service(pipe: Connection, arguments: SamplerArguments, folder: Path) -> None:
    rollout = CONFIG.model_dump()
    values = {
        "run": {"run_id": RUN_ID, "folder": str(folder / "run")},
        "model": {"path": arguments.model_path},
        "data": {"train_file": "none", "max_prompt_tokens": arguments.max_model_tokens - CONFIG.max_response_tokens},
        "rollout": rollout,
    }
    with rollout_service(folder, values) as (buffer, process):
        buffer.register_service(READER, "127.0.0.1:1")

        async def sample(prompts: list[Prompt]) -> None:
            buffer.admit([(one.group_id, encode_group(TrajectoryGroup(one))) for one in prompts], prompts[-1].index + 1)
            missing = len(prompts)
            while missing > 0:
                assert process.poll() is None, "the service ended"
                missing -= len(buffer.claim("generated", READER, missing, 10 * MEASURE_SECONDS, CLAIM_SECONDS))

        await _measure(pipe, sample, process.pid)


if __name__ == "__main__":
    sys.exit(main())
