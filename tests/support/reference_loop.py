"""A reference implementation of learning in one file: trains a model on the recorded batches of a run.

It reads `batches/<version>` with json and pyarrow alone and computes rows, advantages, weights and loss by itself. It
uses nothing of `services/`, and of `trainer/` only the engine's set-up and the layout of shared prompts. With
`engine="deepspeed"` (world size 1, thread count and configuration of the run) its weights equal the run's bit for bit;
`engine="torch"` is plain torch, which differs in the last bits of a sum and computes every row by itself.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.protos.types import Segment
from tandem.trainer.backend.deepspeed.engine import build_engine, join_process_group, leave_process_group
from tandem.trainer.batch.shared_prompts import SharedPrompts
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.shared_attention import SHARED_PROMPTS
from tandem.trainer.models.token_model import add_token_statistics

Row = dict[str, Any]


def train_reference(
    run_folder: Path, model_path: Path, config: TrainerConfig, total_batches: int, engine: Literal["deepspeed", "torch"]
) -> dict[str, Tensor]:
    """The weights after all recorded batches, by name."""
    policy = Policy(model_path, config, engine)
    for folder in sorted((run_folder / "batches").iterdir()):
        plan = json.loads((folder / "plan.json").read_text())
        assert plan["packing"] in ("padded", "shared"), "rows end to end are not in here"
        policy.packing = plan["packing"]
        policy.set_learning_rate(learning_rate(plan["policy_version"], config, total_batches))
        steps = read_rows(folder, plan, config)
        num_steps = len(steps) * config.epochs_per_batch
        proximal = [[proximal_logprobs(policy, rows, num_steps, config) for rows in cells] for cells in steps]
        for cells, known in list(zip(steps, proximal, strict=True)) * config.epochs_per_batch:
            for rows, proximal_N in zip(cells, known, strict=True):
                policy.backward(loss_of(policy.logprobs(rows), proximal_N, rows, config))
            policy.step()
    return policy.close()


def learning_rate(version: int, config: TrainerConfig, total_batches: int) -> float:
    if version < config.warmup_batches:
        return config.learning_rate * version / config.warmup_batches
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (version - config.warmup_batches) / max(1, total_batches - config.warmup_batches))
    return config.learning_rate * (0.1 + 0.9 * (0.5 * (1.0 + math.cos(math.pi * progress))))


def read_rows(folder: Path, plan: dict[str, Any], config: TrainerConfig) -> list[list[list[Row]]]:
    """Optimizer step → micro-batch → rows, each with its advantage and the weight of its tokens in the loss."""
    table = pa.ipc.open_file(folder / "groups.arrow").read_all()
    segments = {(row["group_id"], row["trajectory_id"], row["segment"]): row for row in table.to_pylist()}
    advantages = advantages_of(list(segments.values()), config)
    steps: list[list[list[Row]]] = [[[] for _ in range(count)] for count in plan["num_micro_batches"]]
    sampled: list[dict[tuple[str, int], int]] = [defaultdict(int) for _ in steps]
    for planned in plan["plan"]:
        place = dict(zip(plan["plan_columns"], planned, strict=True))
        assert place["rank"] == 0, "a reference loop is one rank"
        row = dict(segments[place["group_id"], place["trajectory_id"], place["segment"]])
        row["key"] = row["group_id"], row["trajectory_id"]
        row["advantage"] = advantages[row["key"]]
        sampled[place["optimizer_step"]][row["key"]] += sum(row["loss_mask"])
        steps[place["optimizer_step"]][place["micro_batch"]].append(row)
    for cells, counts in zip(steps, sampled, strict=True):
        for row in (row for rows in cells for row in rows):
            token_mean = config.aggregation == "token-mean"
            row["share"] = 1.0 / sum(counts.values()) if token_mean else 1.0 / (len(counts) * counts[row["key"]])
    return steps


def advantages_of(rows: list[Row], config: TrainerConfig) -> dict[tuple[str, int], float]:
    groups: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["role"] == "policy" and row["reward"] is not None:
            groups[row["group_id"]][row["trajectory_id"]] = row["reward"]
    result = {}
    for group_id, rewards in groups.items():
        values = np.array(list(rewards.values()))
        mean, std = (values.mean(), values.std(ddof=1)) if len(values) > 1 else (0.0, 1.0)
        scale = std + 1e-6 if config.advantage.name == "grpo" else 1.0
        result.update({(group_id, key): (value - mean) / scale for key, value in rewards.items()})
    return result


def sampled_places(rows: list[Row]) -> Iterator[tuple[int, int]]:
    return ((number, t) for number, row in enumerate(rows) for t, mask in enumerate(row["loss_mask"]) if mask)


def per_token(rows: list[Row], name: str) -> Tensor:
    return torch.tensor([rows[number][name] for number, _ in sampled_places(rows)], dtype=torch.float32)


def behavior_of(rows: list[Row]) -> Tensor:
    places = sampled_places(rows)
    return torch.tensor([rows[number]["behavior_logprobs"][t] for number, t in places], dtype=torch.float32)


def proximal_logprobs(policy: Policy, rows: list[Row], num_steps: int, config: TrainerConfig) -> Tensor | None:
    """Log-probs under the weights at the batch's start; with one optimizer step these are the current ones."""
    if config.correction.preset == "none":
        return behavior_of(rows)
    if num_steps == 1:
        return None
    with torch.no_grad():
        return policy.logprobs(rows)


def loss_of(current_N: Tensor, proximal_N: Tensor | None, rows: list[Row], config: TrainerConfig) -> Tensor:
    proximal_N = current_N.detach() if proximal_N is None else proximal_N
    weight_N = torch.ones_like(proximal_N)
    advantage_N = per_token(rows, "advantage")
    if config.correction.preset in ("token_clip", "token_tis"):
        bounds = config.correction.weights
        behavior_ratio_N = (proximal_N - behavior_of(rows)).clamp(-20, 20).exp()
        weight_N = behavior_ratio_N.clamp(max=bounds.high)
        if config.correction.preset == "token_clip":
            stopped_N = torch.where(advantage_N > 0, behavior_ratio_N > bounds.high, behavior_ratio_N < bounds.low)
            weight_N = torch.where(stopped_N & (advantage_N != 0), 0.0, weight_N)
    ratio_N = (current_N - proximal_N).clamp(-20, 20).exp()
    clipped_N = ratio_N.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
    loss_N = torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped_N)
    loss_N = torch.where(advantage_N < 0, torch.minimum(loss_N, -3.0 * advantage_N), loss_N)
    return torch.dot(loss_N * weight_N, per_token(rows, "share"))


def share_prompts(tokens: SimpleNamespace, rows: list[Row]) -> None:
    """Changes the engine's inputs to one line in which equal prompts are computed once."""
    segments = [
        Segment(np.array(row["ids"], np.int32), np.zeros(0, np.float32), np.array(row["loss_mask"], np.uint8), ())
        for row in rows
    ]
    shared = SharedPrompts.of(segments, torch.device("cpu"))
    before = [int(shared.columns(number, np.array(t - 1))) for number, t in sampled_places(rows)]
    columns = sorted(set(before))
    ids = torch.from_numpy(shared.ids_T)[None]
    tokens.inputs = {"input_ids": ids, "position_ids": shared.positions_BT, "shared_prompts": shared}
    tokens.row_N = torch.zeros(len(before), dtype=torch.long)
    tokens.column_N = torch.tensor([columns.index(column) for column in before])
    tokens.columns_K = torch.tensor(columns)


class Policy:
    """A model and its optimizer: DeepSpeed's, or plain torch's."""

    def __init__(self, model_path: Path, config: TrainerConfig, engine: Literal["deepspeed", "torch"]) -> None:
        assert config.dtype == "float32", "the twin trains in float32 only"
        self.config = config
        self.packing = "padded"
        self.module = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).train()
        self.engine: Any = None
        if engine == "deepspeed":
            join_process_group(config.collective_timeout_seconds)
            add_token_statistics(self.module)
            self.engine = build_engine(config, self.module)
        else:
            settings = {"betas": config.adam_betas, "weight_decay": config.weight_decay}
            self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0, **settings)

    def logprobs(self, rows: list[Row]) -> Tensor:
        """Log-probs of the sampled tokens, flat, under each row's temperature."""
        assert not any(json.loads(row["sampling"])["top_k"] for row in rows), "the twin knows no truncated samples"
        ids = torch.zeros((len(rows), max(len(row["ids"]) for row in rows)), dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row["ids"])] = torch.tensor(row["ids"])
        places = list(sampled_places(rows))
        columns = sorted({t - 1 for _, t in places})
        row_N = torch.tensor([number for number, _ in places])
        column_N = torch.tensor([columns.index(t - 1) for _, t in places])
        temperature_N = torch.tensor([json.loads(rows[number]["sampling"])["temperature"] for number, _ in places])
        target_N = torch.tensor([rows[number]["ids"][t] for number, t in places])
        if self.engine is not None:  # outside the engine, the head's gradient would differ in its last bits
            tokens = SimpleNamespace(
                inputs={"input_ids": ids},
                row_N=row_N,
                column_N=column_N,
                columns_K=torch.tensor(columns),
                target_N=target_N,
                temperature_N=temperature_N,
                kept=None,
            )
            if self.packing == "shared":
                share_prompts(tokens, rows)
            self.module.set_attn_implementation(SHARED_PROMPTS if self.packing == "shared" else "sdpa")
            return self.engine(tokens=tokens)[0]
        logits = self.module(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(columns)).logits
        logits_NV = logits[row_N, column_N].float() / temperature_N[:, None]
        return -torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="none")

    def set_learning_rate(self, rate: float) -> None:
        self.rate = rate

    def backward(self, loss: Tensor) -> None:
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss)

    def step(self) -> None:
        if self.engine is not None:
            assert self.engine.step(self.rate) is not None
            return
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.gradient_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> dict[str, Tensor]:
        """Closes the engine and returns the weights."""
        named = dict(self.module.named_parameters())
        if self.engine is None:
            return {name: parameter.detach().clone() for name, parameter in named.items()}
        with self.engine.gather(list(named)) as tensors:
            weights = {name: tensor.clone() for name, tensor in tensors.items()}
        self.engine.close()
        leave_process_group()
        return weights
