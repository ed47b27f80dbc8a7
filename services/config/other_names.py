"""Explains errors of a configuration in one line, also for renamed keys, other trainers' keys and missing ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ValidationError

from tandem.reward.options import errors
from tandem.reward.options.tree import locate

OLD_KEYS: dict[str, str] = {}
"""Old dotted key → new name. Add an entry when you rename a key."""

ABSENT_KEYS: Mapping[str, str] = {
    "run.metrics_to_tensorboard": "TensorBoard events are always written; run.trackers names further trackers",
    "trainer.rendezvous": "the machines of a trainer find one another in the run's Redis; set run.host on each",
}
"""Key left out on purpose → reason."""

VERL_KEYS: Mapping[str, str] = {
    "actor_rollout_ref.actor.clip_ratio": "trainer.loss.clip_low and trainer.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "trainer.loss.dual_clip",
    "actor_rollout_ref.actor.clip_ratio_high": "trainer.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "trainer.loss.clip_low",
    "actor_rollout_ref.actor.entropy_coeff": "trainer.entropy_coefficient",
    "actor_rollout_ref.actor.grad_clip": "trainer.gradient_clip",
    "actor_rollout_ref.actor.kl_loss_coef": "trainer.kl.loss.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "trainer.kl.loss.estimator",
    "actor_rollout_ref.actor.loss_agg_mode": "trainer.aggregation",
    "actor_rollout_ref.actor.optim.lr": "trainer.learning_rate",
    "actor_rollout_ref.actor.optim.weight_decay": "trainer.weight_decay",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "trainer.loss",
    "actor_rollout_ref.actor.ppo_epochs": "trainer.epochs_per_batch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.tokens_per_micro_batch",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.optimizer_steps_per_batch",
    "actor_rollout_ref.actor.use_kl_loss": "trainer.kl.loss",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "actor_rollout_ref.model.lora_alpha": "trainer.lora.alpha",
    "actor_rollout_ref.model.lora_rank": "trainer.lora.rank",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_fraction",
    "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.sets[].samples_per_prompt",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.sets[].temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "eval.sets[].top_p",
    "algorithm.adv_estimator": "trainer.advantage",
    "algorithm.filter_groups.enable": "trainer.selection.drop_zero_variance",
    "algorithm.use_kl_in_reward": "trainer.kl.reward",
    "critic.cliprange_value": "trainer.critic.value_clip",
    "critic.model.path": "trainer.critic.path",
    "critic.optim.lr": "trainer.critic.learning_rate",
    "custom_reward_function.path": "reward.scorer",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.train_batch_size": "run.groups_per_batch",
    "data.val_files": "data.eval_file and eval.sets",
    "data.val_max_samples": "eval.sets[].limit",
    "trainer.critic_warmup": "trainer.critic.warmup_batches",
    "trainer.n_gpus_per_node": "trainer.num_ranks",
    "trainer.nnodes": "trainer.num_nodes",
    "trainer.save_freq": "trainer.checkpoint_every",
    "trainer.test_freq": "trainer.evaluate_every",
    "trainer.total_epochs": "data.max_epochs",
    "trainer.total_training_steps": "run.total_batches",
}
"""verl's key → ours."""

VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "reward_model")

TRL_KEYS: Mapping[str, str] = {
    "beta": "trainer.kl.loss.coefficient",
    "entropy_coef": "trainer.entropy_coefficient",
    "epsilon": "trainer.loss.clip_low",
    "epsilon_high": "trainer.loss.clip_high",
    "eval_steps": "trainer.evaluate_every",
    "learning_rate": "trainer.learning_rate",
    "loss_type": "trainer.loss and trainer.aggregation",
    "mask_truncated_completions": "trainer.selection.overlong_filter",
    "max_completion_length": "rollout.max_response_tokens",
    "max_grad_norm": "trainer.gradient_clip",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "run.total_batches",
    "min_p": "rollout.min_p",
    "model_name_or_path": "model.path",
    "num_iterations": "trainer.epochs_per_batch",
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_eval": "eval.sets[].samples_per_prompt",
    "num_train_epochs": "data.max_epochs",
    "per_device_train_batch_size": "run.groups_per_batch and trainer.tokens_per_micro_batch",
    "gradient_accumulation_steps": "trainer.tokens_per_micro_batch",
    "reward_funcs": "reward.scorer",
    "scale_rewards": "trainer.advantage",
    "steps_per_generation": "trainer.optimizer_steps_per_batch",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
}
"""TRL's argument (TRL has no sections) → our key."""

_PAGE = 'docs/algorithms.md, section "Names elsewhere"'


def explain(root: type[BaseModel], error: ValidationError) -> str:
    """Describes the first fault of `error`, its place and, if known, the remedy."""
    fault = errors.first_fault(error)
    elsewhere = fault["type"] == "extra_forbidden" and explain_other_name(
        locate(root, fault["loc"]).place, fault["input"]
    )
    return elsewhere or errors.explain(root, error)


def explain_other_name(key: str, value: object = None) -> str:
    """Says what to write instead of an unknown key with this value; "" if no table has the key."""
    for name in _keys_in(key, value):
        if name in OLD_KEYS:
            return f"unknown key {name}: its name is now {OLD_KEYS[name]}"
        if name in ABSENT_KEYS:
            return f"there is no key {name}: {ABSENT_KEYS[name]}"
        for trainer, ours in (("verl", VERL_KEYS), ("TRL", TRL_KEYS)):
            if name in ours:
                return f"unknown key {name}: {trainer}'s name; write {ours[name]} ({_PAGE}, has more names)"
    if key.partition(".")[0] in VERL_SECTIONS:
        return f"unknown key {key}: verl's name; see {_PAGE}"
    return ""


def _keys_in(key: str, value: object) -> Iterator[str]:
    """The key and, if its value is a table, the dotted keys in it."""
    yield key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _keys_in(f"{key}.{name}", inner)
