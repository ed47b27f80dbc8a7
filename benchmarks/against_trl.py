"""Trains the same workloads with Tandem and with TRL's GRPOTrainer, in turns, and writes JSON.

    python benchmarks/against_trl.py [--repeats 3] [--workloads demo lognormal prompts] [--steps N]
        [--output benchmarks/records/against_trl.json]

- `demo`: the demo's model, data and recipe. Its evaluation is off; both sides write the model every 5 steps instead.
  Afterwards one function measures the greedy accuracy of these models, so no time is spent on it in a run.
- `demo_transformers`: the same, but Tandem samples with the engine `transformers`, the library that TRL samples with.
- `lognormal`: 16 prompts of 16 tokens with 8 answers each. The lengths of answers are lognormal, with a mean of 96 and
  at most 480 tokens. The row of a prompt says how long its answers are; the model never ends one by itself.
- `prompts`: 8 prompts of 256 tokens with 8 answers of 32 tokens each.

Both sides have the same model, prompts, AdamW, learning rates, batch, float32 and torch, and the machine's cores: one
process of TRL computes with a thread for each core, Tandem's processes share the cores as `tandem run` arranges it. TRL
samples with transformers' `generate`, since it needs a GPU for vLLM, then trains; a batch is one micro-batch. It is
installed into build/trl (trl_requirements.txt).

Seconds of a step are the time between two steps, averaged over a run without its first 5 steps and without its last
S + 1, in which Tandem has nothing left to sample. Seconds to accuracy 0.9 begin when the models are loaded: TRL's when
its training begins, Tandem's when the trainer waits for its first batch and the sampler reports that it is ready. They
are interpolated between two models. Memory is the largest sum of the processes'
PSS in samples a second apart. A ratio is Tandem's figure over TRL's in the same round; bounds hold for the median over
the rounds. The exit code is 1 if a bound is missed; the last lines name it. Other workloads of OUTPUT stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.process_usage import Sample, cpu_at, peak_memory, run_measured  # noqa: E402
from benchmarks.trl_environment import trl_python  # noqa: E402
from benchmarks.trl_side import Settings  # noqa: E402
from tandem.services.commands.demo_tasks import ARITHMETIC  # noqa: E402
from tandem.services.config import Recipe, dump_recipe, load_recipe  # noqa: E402

SIDES = ("trl", "tandem")
WARM_UP_STEPS = 5
EXPORT_EVERY = 5
ACCURACY = 0.9
LOGNORMAL_MU, LOGNORMAL_SIGMA, LONGEST_ANSWER = 4.217, 0.85, 480  # a mean of 96 after the cut
RUN_DEADLINE_SECONDS = 1200.0

Figures = dict[str, float | None]
Values = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    steps: int
    bounds: Mapping[str, float]
    """Largest median ratio, by figure."""
    prepare: Callable[[Path, int], Recipe]
    """Makes model and data in a folder. Returns the recipe of a run of so many steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=tuple(WORKLOADS))
    parser.add_argument("--steps", type=int, help="Train so many steps in every workload.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "against_trl.json")
    arguments = parser.parse_args()
    python = trl_python()
    record = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"workloads": {}}
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tandem-against-trl-") as scratch:
        for name in arguments.workloads:
            workload = WORKLOADS[name]
            recipe = workload.prepare(Path(scratch) / name, arguments.steps or workload.steps)
            rounds = [_round(python, recipe, number, name) for number in range(arguments.repeats)]
            record["workloads"][name] = found = {
                "command": "python benchmarks/against_trl.py " + " ".join(sys.argv[1:]),
                "cores": os.cpu_count(),
                "repeats": arguments.repeats,
                "steps": recipe.run.total_batches,
                "bounds": workload.bounds,
                **summary(rounds),
            }
            missed += [f"{name}: {line}" for line in missed_bounds(found)]
            arguments.output.write_text(_compact(record))
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def summary(rounds: Sequence[Mapping[str, Figures]]) -> Values:
    """Of each figure, the median of either side over the rounds, and the median of the rounds' ratios. A figure that
    is None in a round, as an accuracy that was not reached, is None, and so is its ratio.
    """
    figures: dict[str, Values] = {}
    for name in rounds[0]["trl"]:
        pairs = [tuple(one[side][name] for side in SIDES) for one in rounds]
        ratios = [None if None in (trl, tandem) else tandem / trl for trl, tandem in pairs]
        found = {side: _median([one[side][name] for one in rounds]) for side in SIDES}
        figures[name] = {**found, "ratio": _median(ratios), "ratios": [_rounded(ratio) for ratio in ratios]}
    return {"figures": figures}


def missed_bounds(found: Mapping[str, Any]) -> Iterator[str]:
    """One line for each bound of a workload that its median ratio exceeds."""
    for name, most in found["bounds"].items():
        ratio = found["figures"][name]["ratio"]
        if ratio is None:
            yield f"{name} was not measured: a side did not reach accuracy {ACCURACY} in every round"
        elif ratio > most:
            yield f"{name} is {ratio:.3f} of TRL's, not at most {most}"


def seconds_to(accuracy: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The time at which the accuracy is first reached, interpolated between (seconds, accuracy) in order of time."""
    for number, (seconds, reached) in enumerate(points):
        if reached >= accuracy:
            if number == 0:
                return seconds
            earlier, lower = points[number - 1]
            return earlier + (seconds - earlier) * (accuracy - lower) / (reached - lower)
    return None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(statistics.median(known)) if len(known) == len(values) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _compact(record: Values) -> str:
    """JSON with each innermost list or object on one line."""
    return (
        re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: " ".join(found[0].split()), json.dumps(record, indent=2)) + "\n"
    )


def _round(python: Path, recipe: Recipe, number: int, name: str) -> dict[str, Figures]:
    """The figures of both sides. Every other round starts with the other side."""
    found = {}
    for side in SIDES if number % 2 == 0 else SIDES[::-1]:
        shutil.rmtree(recipe.folder, ignore_errors=True)
        run = run_trl(python, recipe) if side == "trl" else _run_tandem(recipe)
        found[side] = _figures(recipe, *run)
        shown = "  ".join(f"{key} {value if value is None else f'{value:.4g}'}" for key, value in found[side].items())
        print(f"{name} round {number + 1} {side:6}  {shown}", flush=True)
    return found


@dataclass(frozen=True)
class Step:
    """One step as either side measured it; the first one, number 0, is the start of training."""

    time: float
    answer_tokens: float
    prompt_tokens: float


def run_trl(python: Path, recipe: Recipe) -> tuple[list[Step], list[Sample]]:
    settings = recipe.folder.with_name("settings.json")
    settings.write_text(json.dumps(asdict(trl_settings(recipe))))
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(ROOT / "benchmarks" / "trl_side.py"), str(settings)]
    samples = run_measured(command, environment, recipe.folder.with_name("trl.log"), RUN_DEADLINE_SECONDS)
    lines = [json.loads(line) for line in (recipe.folder / "steps.jsonl").read_text().splitlines()]
    return [Step(line["time"], line["answer_tokens"], line["prompt_tokens"]) for line in lines], samples


def _run_tandem(recipe: Recipe) -> tuple[list[Step], list[Sample]]:
    file = recipe.folder.with_name("recipe.json")
    file.write_text(dump_recipe(recipe))
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RAY_ADDRESS")}
    environment |= {"PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""}
    command = [sys.executable, "-m", "tandem.services.cli", "run", str(file)]
    with _Ready(recipe.folder) as ready:
        samples = run_measured(command, environment, recipe.folder.with_name("tandem.log"), RUN_DEADLINE_SECONDS)
    lines = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    rows = recipe.run.groups_per_batch * recipe.rollout.samples_per_prompt
    steps = [Step(line["time"], line["num_loss_tokens"], line["prompt_length_mean"] * rows) for line in lines]
    assert ready.time, "the sampler never said that it is ready"
    trainer_ready = lines[0]["time"] - lines[0]["seconds_total"]
    return [Step(max(trainer_ready, ready.time), 0.0, 0.0), *steps], samples


class _Ready:
    """Notes the time at which the sampler of a run says in its log that it is ready."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "logs" / "rollout-0.log"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.time = 0.0

    def __enter__(self) -> _Ready:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            if self._log.exists() and ": ready after " in self._log.read_text(errors="replace"):
                self.time = time.time()
                return


def trl_settings(recipe: Recipe) -> Settings:
    """What TRL is given, so that it trains as the recipe says."""
    return Settings(
        model=recipe.model.path,
        train_file=recipe.data.train_file,
        folder=str(recipe.folder),
        steps=recipe.run.total_batches,
        prompts_per_step=recipe.run.groups_per_batch,
        answers_per_prompt=recipe.rollout.samples_per_prompt,
        longest_answer=recipe.rollout.max_response_tokens,
        shuffle=recipe.data.shuffle,
        reward=recipe.reward.scorer,
        learning_rate=recipe.trainer.learning_rate,
        schedule=recipe.trainer.schedule,
        warmup_steps=recipe.trainer.warmup_batches,
        adam_betas=recipe.trainer.adam_betas,
        weight_decay=recipe.trainer.weight_decay,
        gradient_clip=recipe.trainer.gradient_clip,
        checkpoint_every=recipe.trainer.checkpoint_every,
        export_every=recipe.trainer.export_every,
        seed=recipe.run.seed,
    )


def _figures(recipe: Recipe, steps: Sequence[Step], samples: Sequence[Sample]) -> Figures:
    last = len(steps) - 1 - (recipe.run.staleness_budget + 1)
    assert last > WARM_UP_STEPS, "a run needs more steps"
    counted = steps[WARM_UP_STEPS + 1 : last + 1]
    begin, end = steps[WARM_UP_STEPS].time, steps[last].time
    figures: Figures = {
        "seconds_a_step": (end - begin) / len(counted),
        "cpu_seconds_a_step": (cpu_at(samples, end) - cpu_at(samples, begin)) / len(counted),
        "peak_memory_mib": peak_memory(samples) / 2**20,
        "answer_tokens_a_step": statistics.fmean(step.answer_tokens for step in counted),
        "prompt_tokens_a_step": statistics.fmean(step.prompt_tokens for step in counted),
    }
    if not recipe.trainer.export_every:
        return figures
    models = [(0, Path(recipe.model.path))]
    models += [(int(folder.name), folder) for folder in sorted((recipe.folder / "exports").iterdir())]
    rows = pq.read_table(Path(recipe.data.train_file).with_name("eval.parquet")).to_pylist()
    points: list[tuple[float, float]] = []
    for step, model in models:
        points.append((steps[step].time - steps[0].time, greedy_accuracy(model, rows)))
        if points[-1][1] >= ACCURACY:
            break
    reached = {f"seconds_to_accuracy_{ACCURACY}": seconds_to(ACCURACY, points)}
    return figures | reached | {"last_accuracy": greedy_accuracy(models[-1][1], rows)}


def greedy_accuracy(model_folder: Path, rows: Sequence[Values]) -> float:
    """The share of prompts, all of one length, whose most likely answer is the ground truth."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompts = tokenizer([row["prompt"][0]["content"] for row in rows], return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**prompts, do_sample=False, max_new_tokens=8)
    answers = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    return statistics.fmean(answer.strip() == truth for answer, truth in zip(answers, truths, strict=True))


def prepare_demo(folder: Path) -> Path:
    """Returns the folder of a demo of one batch, which has the data and the warm model."""
    made = folder / "demo"
    command = [sys.executable, "-m", "tandem.services.cli", "demo", f"run.folder={made}", "run.total_batches=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_DEADLINE_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return made


def _prepare_demo(folder: Path, steps: int, engine: str = "vllm") -> Recipe:
    return demo_recipe(folder / "run", prepare_demo(folder), steps, engine)


def demo_recipe(run: Path, made: Path, steps: int, engine: str = "vllm") -> Recipe:
    settings = {
        "run.folder": run,
        "run.total_batches": steps,
        "model.path": made / "model",
        "data.train_file": made / "data" / "train.parquet",
        "data.eval_file": "",
        "trainer.evaluate_every": 0,
        "trainer.export_every": EXPORT_EVERY,
        "rollout.engine": engine,
    }
    return load_recipe(
        ARITHMETIC.recipe, [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
    )


def lognormal_lengths(number: int) -> list[int]:
    """Answer lengths in tokens, with a mean of about 96."""
    dice = random.Random(0)
    drawn = (round(dice.lognormvariate(LOGNORMAL_MU, LOGNORMAL_SIGMA)) for _ in range(number))
    return [min(LONGEST_ANSWER, max(4, length)) for length in drawn]


def _prepare_lognormal(folder: Path, steps: int) -> Recipe:
    return _prepare_random(folder, steps, groups=16, prompt_tokens=16, lengths=lognormal_lengths(2000))


def _prepare_prompts(folder: Path, steps: int) -> Recipe:
    return _prepare_random(folder, steps, groups=8, prompt_tokens=256, lengths=[32] * 2000)


def _prepare_random(folder: Path, steps: int, *, groups: int, prompt_tokens: int, lengths: Sequence[int]) -> Recipe:
    """A model with random weights that never ends an answer, and one prompt for each length, read in their order."""
    script = (
        "from tandem.services.data.tiny_model import *; import sys; "
        "build_tiny_model(sys.argv[1], hidden=128, layers=4, ends=False, chat_template=PLAIN_TEMPLATE)"
    )
    command = [sys.executable, "-c", script, str(folder / "model")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    rows = [
        {
            "data_source": "tandem/against_trl",
            "prompt": [{"role": "user", "content": f"{index:08d}".ljust(prompt_tokens, "x")}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "x"},
            "extra_info": {"max_response_tokens": length},
        }
        for index, length in enumerate(lengths)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        _RECIPE.format(
            folder=folder, steps=steps, groups=groups, prompt_tokens=prompt_tokens, longest_answer=max(lengths)
        )
    )
    return load_recipe(recipe, [])


_RECIPE = """
[run]
run_id = "against-trl"
folder = "{folder}/run"
total_batches = {steps}
groups_per_batch = {groups}
[model]
path = "{folder}/model"
[data]
train_file = "{folder}/train.parquet"
max_prompt_tokens = {prompt_tokens}
shuffle = false
[rollout]
samples_per_prompt = 8
max_response_tokens = {longest_answer}
[reward]
scorer = "repetition"
arguments = {{ n = 2, unit = "characters" }}
[trainer]
learning_rate = 1e-5
"""

_DEMO_BOUNDS = {"seconds_a_step": 0.7, f"seconds_to_accuracy_{ACCURACY}": 0.8}
WORKLOADS = {
    "demo": Workload(200, _DEMO_BOUNDS, _prepare_demo),
    "demo_transformers": Workload(200, _DEMO_BOUNDS, partial(_prepare_demo, engine="transformers")),
    "lognormal": Workload(30, {"seconds_a_step": 0.35}, _prepare_lognormal),
    "prompts": Workload(20, {"seconds_a_step": 0.4}, _prepare_prompts),
}


if __name__ == "__main__":
    sys.exit(main())
