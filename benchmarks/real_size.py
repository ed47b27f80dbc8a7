"""Takes a model of the size and architecture of Qwen2.5-0.5B through a whole run on CPUs, and writes JSON.

    python benchmarks/real_size.py [--batches 3] [--small] [--output benchmarks/records/real_size.json] [KEY=VALUE ...]

494 M parameters with random weights and a vocabulary of 151,936; batches of 8 prompts with 4 answers of 128 tokens.
`--small` has a model of 1.6 M parameters, to try the benchmark itself; estimates of its memory are too coarse to hold.
KEY=VALUE changes the recipe. The record has the seconds of every phase of every batch, bytes and stall of every weight
update, and the largest proportional set size (PSS) of each process in samples a second apart, beside what the check
before a run estimates. Before and after that, a run at S = 0 with shorter answers, as many in flight, measures rates,
from which `tandem plan`'s simulation predicts how long the first batch is sampled, before there is anything to train,
how long it is trained, while the sampler samples the other batches, and how long a later batch takes, when nothing is
left to sample. The machine changes its speed meanwhile, so a prediction is the mean of both.

The exit code is 1 if the run ends early, if a service was restarted, or if the memory of the sampler or the trainer or
a prediction is off by more than a fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.process_usage import Sample, peak_memory, peaks, run_measured  # noqa: E402
from tandem.services.config import Recipe, load_recipe  # noqa: E402
from tandem.services.planning import calibration  # noqa: E402
from tandem.services.planning.rates import GroupSize  # noqa: E402
from tandem.services.planning.simulation import Ring  # noqa: E402
from tandem.services.run.estimates import memory_need_bytes  # noqa: E402
from tandem.services.run.model_check import check_model  # noqa: E402
from tandem.services.trainer.notes import read_notes  # noqa: E402

QWEN_0_5B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
}
SMALL = QWEN_0_5B | {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 2}
MOST_ERROR = 0.2
DEADLINE_SECONDS = 7200.0
PROMPTS, PROMPT_TOKENS, ANSWERS, ANSWER_TOKENS = 8, 16, 4, 128
CALIBRATION_TOKENS = (24, 24, 24, 4, 44, 14, 34, 44, 4, 34, 14)
"""Mean lengths of the answers of each batch in the run that measures rates, of which the first three do not count."""
SAMPLER, TRAINER = ("rollout", "VLLM::EngineCore"), ("trainer",)
UPDATE = ("weight_bytes", "weight_transfer_seconds", "weight_stall_seconds", "samplers_acknowledged")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=3, help="At least 2.")
    parser.add_argument("--small", action="store_true", help="Use a model of 1.6 M parameters.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "real_size.json")
    arguments, overrides = parser.parse_known_args()
    if arguments.batches < 2:
        parser.error("--batches: the predictions need two batches")
    with tempfile.TemporaryDirectory(prefix="tandem-real-size-") as scratch:
        recipe = _prepare(Path(scratch), SMALL if arguments.small else QWEN_0_5B, arguments.batches, overrides)
        rates = [_calibrated(recipe, overrides, "before")]
        command = " ".join(["python benchmarks/real_size.py", *sys.argv[1:]])
        record = {"command": command, **_run(recipe, overrides)}
        rates.append(_calibrated(recipe, overrides, "after"))
        record["plan"] = _compared(rates, recipe, record["batches"])
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = list(faults(record, arguments.batches))
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def faults(record: Mapping[str, Any], batches: int) -> Iterator[str]:
    """What a record shows that must not be."""
    if len(record["batches"]) != batches:
        yield f"{len(record['batches'])} of {batches} batches were trained"
    if record["restarts"]:
        yield f"{record['restarts']} services were restarted"
    for service, memory in record["memory"].items():
        error = memory["peak_mib"] / memory["estimated_mib"] - 1.0
        if abs(error) > MOST_ERROR:
            yield f"memory of the {service}: {error:+.0%} beside its estimate"
    if not record["plan"]:
        yield "nothing can be compared with the predictions"
    for name, seconds in record["plan"].items():
        error = seconds["measured"] / seconds["predicted"] - 1.0
        if abs(error) > MOST_ERROR:
            yield f"{name}: {error:+.0%} beside the prediction"


def _calibrated(recipe: Recipe, overrides: Sequence[str], name: str) -> calibration.Measured:
    """The rates of a run whose batches differ in their tokens."""
    folder = recipe.folder.with_name(name)
    own = {
        "run.folder": folder,
        "run.total_batches": calibration.WARM_UP_BATCHES + calibration.LEAST_BATCHES,
        "run.staleness_budget": 0,
        "data.train_file": recipe.folder.with_name("calibration.parquet"),
        "data.shuffle": "false",
        "trainer.packing": "padded",  # as the run's batches, of whose tokens too few are prompts
    }
    _measured_run(recipe, [*overrides, *(f"{key}={value}" for key, value in own.items())])
    return calibration.measure(folder)


def _compared(
    rates: Sequence[calibration.Measured], recipe: Recipe, batches: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Seconds as measured and as predicted; nothing after a run that ended early."""
    leases = [notes.leases for notes in read_notes(recipe.folder, 1).values()]
    if len(batches) < 2 or not leases:
        return {}
    sampled = max(one["generated"].since for one in leases) - min(one["prompts"].since for one in leases)
    measured = {
        "seconds_sampling_the_first_batch": sampled,
        "seconds_training_the_first_batch": batches[0]["seconds_train"],
        "seconds_of_later_batches": statistics.mean(batch["seconds_total"] for batch in batches[1:]),
    }
    predicted = [_predicted(one, recipe, len(batches)) for one in rates]
    return {
        name: {"measured": round(seconds, 2), "predicted": round(statistics.mean(one[name] for one in predicted), 2)}
        for name, seconds in measured.items()
    }


def _predicted(rates: calibration.Measured, recipe: Recipe, num_batches: int) -> dict[str, float]:
    setting = replace(calibration.setting_of(recipe), processors=rates.processors, total_groups=num_batches * PROMPTS)
    group = GroupSize(PROMPT_TOKENS, (recipe.rollout.max_response_tokens,) * recipe.rollout.samples_per_prompt)
    simulated = Ring(setting, rates.rates, [group]).run(num_batches)
    return {
        "seconds_sampling_the_first_batch": simulated[0].idle_seconds,
        "seconds_training_the_first_batch": simulated[0].seconds - simulated[0].idle_seconds,
        "seconds_of_later_batches": statistics.mean(batch.seconds for batch in simulated[1:]),
    }


def _measured_run(recipe: Recipe, overrides: Sequence[str]) -> list[Sample]:
    command = [sys.executable, "-m", "tandem.services.cli", "run", str(recipe.folder.with_name("recipe.toml"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""}
    return run_measured([*command, *overrides], environment, recipe.folder.with_name("log"), DEADLINE_SECONDS)


def _run(recipe: Recipe, overrides: Sequence[str]) -> dict[str, Any]:
    samples = _measured_run(recipe, overrides)
    lines = _lines(recipe.folder / "metrics.jsonl")
    facts = check_model(recipe)
    assert facts is not None, "the model's folder is local"
    found = peaks(samples)
    estimates = memory_need_bytes(recipe, facts)
    used = [sum(found.get(kind, 0) for kind in kinds) for kinds in (SAMPLER, TRAINER)]
    return {
        "cores": os.cpu_count(),
        "parameters": facts.num_parameters,
        "batches": [
            {name: _rounded(value) for name, value in line.items() if name.startswith("seconds_") or name in UPDATE}
            for line in lines
        ],
        "response_tokens_mean": [_rounded(line["response_length_mean"]) for line in lines],
        "restarts": sum("; restarting it in " in event["text"] for event in _lines(recipe.folder / "events.jsonl")),
        "memory": {
            name: {"peak_mib": used_bytes >> 20, "estimated_mib": int(estimate) >> 20}
            for name, used_bytes, estimate in zip(("sampler", "trainer"), used, estimates, strict=True)
        },
        "peak_mib_of_processes": {kind: peak >> 20 for kind, peak in found.items()},
        "peak_mib_in_all": peak_memory(samples) >> 20,
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _prepare(folder: Path, shape: Mapping[str, float], batches: int, overrides: Sequence[str]) -> Recipe:
    """Writes model, prompts and recipe."""
    build_model(folder / "model", shape)
    dice = random.Random(0)
    means = [mean for mean in CALIBRATION_TOKENS for _ in range(PROMPTS)]
    _write_prompts(folder / "train.parquet", [None] * 100)
    _write_prompts(folder / "calibration.parquet", [round(mean * dice.uniform(0.6, 1.4)) for mean in means])
    (folder / "recipe.toml").write_text(_RECIPE.format(folder=folder, batches=batches))
    return load_recipe(folder / "recipe.toml", overrides)


def build_model(folder: Path, shape: Mapping[str, float]) -> None:
    """Writes a random model, in a process of its own, which gives its memory back."""
    made = subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder), json.dumps(shape)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if made.returncode:
        raise SystemExit(f"the model could not be made:\n{made.stderr[-2000:]}")


def _write_prompts(file: Path, lengths: Sequence[int | None]) -> None:
    """Writes prompts, with the longest answer to each: the model does not end one earlier."""
    rows = [
        {
            "data_source": "tandem/real_size",
            "prompt": [{"role": "user", "content": f"{index:08d}".ljust(PROMPT_TOKENS, "x")}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "x"},
            "extra_info": {"index": index, "max_response_tokens": length},
        }
        for index, length in enumerate(lengths)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


_BUILD = """
import json, sys
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from tandem.services.data.tiny_model import BOS_ID, EOS_ID, PAD_ID, PLAIN_TEMPLATE, VOCABULARY

folder, shape = sys.argv[1], json.loads(sys.argv[2])
ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(**shape, **ids, tie_word_embeddings=True, dtype="float32"))
model.save_pretrained(folder)
words = [*VOCABULARY, *(f"w{number}" for number in range(len(VOCABULARY), shape["vocab_size"]))]
vocabulary = {{" ": "Ġ", "\\n": "Ċ"}.get(word, word): number for number, word in enumerate(words)}
names = {"pad_token": "<pad>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<pad>"}
tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], **names)
tokenizer.chat_template = PLAIN_TEMPLATE
tokenizer.save_pretrained(folder)
"""

_RECIPE = f"""
[run]
run_id = "real-size"
folder = "{{folder}}/run"
total_batches = {{batches}}
groups_per_batch = {PROMPTS}
[model]
path = "{{folder}}/model"
[data]
train_file = "{{folder}}/train.parquet"
max_prompt_tokens = {PROMPT_TOKENS}
[rollout]
samples_per_prompt = {ANSWERS}
max_response_tokens = {ANSWER_TOKENS}
max_groups_in_flight = {PROMPTS}
[reward]
scorer = "repetition"
arguments = {{{{ n = 2, unit = "characters" }}}}
[trainer]
tokens_per_micro_batch = 512
collective_timeout_seconds = 1800
[weights]
deadline_seconds = 600
"""


if __name__ == "__main__":
    sys.exit(main())
