"""Trains one workload of benchmarks/against_trl.py with TRL's GRPOTrainer. Runs in TRL's environment, without tandem.

    python benchmarks/trl_side.py SETTINGS.json

SETTINGS.json has the fields of `Settings`. `folder` gets steps.jsonl, with a line when training starts (step 0) and one
after each optimizer step, and a Hugging Face folder `exports/<step>` after every `export_every` steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    model: str
    """Hugging Face folder in float32."""
    train_file: str
    """Parquet in verl's columns. A prompt is the content of its one message."""
    folder: str
    steps: int
    prompts_per_step: int
    answers_per_prompt: int
    longest_answer: int
    """In tokens. `extra_info.max_response_tokens` of a row lowers it."""
    shuffle: bool
    reward: str
    """A name in REWARDS."""
    learning_rate: float
    schedule: str
    """`constant`, or `cosine`, which falls to a tenth at the last step."""
    warmup_steps: int
    adam_betas: tuple[float, float]
    weight_decay: float
    gradient_clip: float
    checkpoint_every: int
    export_every: int
    seed: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings", type=Path, metavar="SETTINGS.json")
    settings = Settings(**json.loads(parser.parse_args().settings.read_text()))
    folder = Path(settings.folder)
    folder.mkdir(parents=True)
    _trainer(settings, StepLog(folder / "steps.jsonl")).train()
    return 0


def exact(answer: str, ground_truth: str) -> float:
    """1 if the answer equals the ground truth, as tandem's scorer `exact`."""
    return float(answer.strip() == ground_truth.strip())


def repetition(answer: str, _ground_truth: str) -> float:
    """The share of repeated pairs of characters, negated: tandem's scorer `repetition`, with n = 2 and characters."""
    characters = "".join(answer.lower().split())
    pairs = [characters[place : place + 2] for place in range(len(characters) - 1)]
    return len(set(pairs)) / len(pairs) - 1.0 if pairs else 0.0


REWARDS = {"exact": exact, "repetition": repetition}


class StepLog:
    """Appends a line for each step, with the tokens that the step sampled."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self.prompt_tokens = 0
        self.answer_tokens = 0

    def write(self, step: int) -> None:
        line = {"step": step, "time": time.time()}
        line |= {"prompt_tokens": self.prompt_tokens, "answer_tokens": self.answer_tokens}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.prompt_tokens = self.answer_tokens = 0


def _trainer(settings: Settings, log: StepLog) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    rows = _rows(settings)
    limits = {row["prompt"]: row["limit"] for row in rows}

    class LimitedTrainer(GRPOTrainer):  # type: ignore[misc]
        """Ends each answer at the limit of its prompt.

        A batch is sampled until its longest answer ends, as `generate` does in any case: rows that ended stay in it.
        """

        def _generate(self, prompts: list[str]) -> Any:
            self.row_limits = [limits[prompt] for prompt in prompts]
            self.generation_config.max_new_tokens = max(self.row_limits)
            return super()._generate(prompts)

        def _generate_single_turn(self, prompt_ids: Sequence[Sequence[int]], *more: Any) -> Any:
            answers, logprobs = super()._generate_single_turn(prompt_ids, *more)
            answers = [answer[:limit] for answer, limit in zip(answers, self.row_limits, strict=True)]
            log.prompt_tokens += sum(map(len, prompt_ids))
            log.answer_tokens += sum(map(len, answers))
            return answers, logprobs

    class Measurement(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **more: Any) -> None:
            log.write(0)

        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **more: Any) -> None:
            log.write(state.global_step)
            if settings.export_every and state.global_step % settings.export_every == 0:
                folder = Path(settings.folder) / "exports" / f"{state.global_step:06d}"
                more["model"].save_pretrained(folder)
                more["processing_class"].save_pretrained(folder)

    reward = REWARDS[settings.reward]

    def score(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
        return [reward(answer, truth) for answer, truth in zip(completions, ground_truth, strict=True)]

    return LimitedTrainer(
        model=settings.model,
        reward_funcs=score,
        args=_arguments(settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings.model, padding_side="left"),
        callbacks=[Measurement()],
    )


def _rows(settings: Settings) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return [
        {
            "prompt": row["prompt"][0]["content"],
            "ground_truth": row["reward_model"]["ground_truth"],
            "limit": row["extra_info"].get("max_response_tokens") or settings.longest_answer,
        }
        for row in pq.read_table(settings.train_file).to_pylist()
    ]


def _arguments(settings: Settings) -> Any:
    """TRL's defaults, except for what tandem's recipe says, and for bfloat16 and gradient checkpointing, which are off
    on both sides.
    """
    from trl import GRPOConfig

    is_cosine = settings.schedule == "cosine"
    return GRPOConfig(
        output_dir=str(Path(settings.folder) / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.prompts_per_step * settings.answers_per_prompt,
        num_generations=settings.answers_per_prompt,
        max_completion_length=settings.longest_answer,
        shuffle_dataset=settings.shuffle,
        temperature=1.0,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine_with_min_lr" if is_cosine else "constant_with_warmup",
        lr_scheduler_kwargs={"min_lr_rate": 0.1} if is_cosine else None,
        warmup_steps=settings.warmup_steps,
        adam_beta1=settings.adam_betas[0],
        adam_beta2=settings.adam_betas[1],
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.gradient_clip,
        save_strategy="steps" if settings.checkpoint_every else "no",
        save_steps=settings.checkpoint_every or settings.steps,
        save_total_limit=2,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
    )


if __name__ == "__main__":
    raise SystemExit(main())
