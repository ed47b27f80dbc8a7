"""Estimates of the memory, the disk and the room in Redis that a run needs. Imports neither torch nor vllm."""

from __future__ import annotations

from tandem.protos.contracts import MAX_SNAPSHOT_BYTES
from tandem.services.config import Recipe
from tandem.services.run.folder import external_redis_url
from tandem.services.run.model_check import ModelFacts

ENGINE_BYTES = 1e9
"""Resident memory of one engine without its weights and its KV cache, and of one trainer rank without its state."""
OPTIMIZER_BYTES_PER_PARAMETER = 12
"""The float32 master weight and AdamW's two moments."""
_TRAINING_BYTES = {"float32": (17, 29, 29, 36), "bfloat16": (23, 22, 27, 31)}
"""Bytes that one rank takes at its peak for each trained parameter, measured at each ZeRO stage, without publishing."""
_HEAD_CHUNK_LOGITS = 3 << 25
"""Logits that the trainer holds at once at most, in float32; see tandem.trainer.models.token_logprobs."""
_KEPT_SLOPES = 1 << 27
"""Gradients of logits that it keeps besides, in bfloat16, unless the head is frozen."""
_SAMPLING_EMBEDDINGS = 2
"""Memory that sampling leaves with the allocator, in embeddings, measured with a vocabulary of 151,936."""
_LAYER_ACTIVATIONS = (12, 6)
"""Numbers that a layer keeps for each token until the backward pass, by hidden and by intermediate size."""
GROUP_BYTES = 1500
"""Of Redis for a group that is not committed, besides its payload: its state, queue, lease, credit and keys."""
NOTES_BYTES = 3500
"""Of Redis for the notes of such a group: why its last leases ended without a result."""
SET_ASIDE_BYTES = 600_000
"""Of Redis for the prompts that failed too often."""
HEADER_BYTES = 250
"""Of Redis for a row of a scored group: its header."""
FINISHED_GROUP_BYTES = 2
"""Of Redis for a group that is over: a bit of its epoch for each way to end."""
EPOCH_BYTES = 1000
"""Of Redis for an epoch of the training data: the keys of these bits."""
SERVICE_BYTES = 1 << 16
"""Of Redis for a service: its figures, and the answers to its last calls."""
LOG_COPIES = 3
"""Redis's append-only file is rewritten at twice its size: both files are then on disk."""
_TEXT_BYTES_PER_TOKEN = 4
_PAYLOAD_BYTES_PER_TOKEN = 4 + 4 + 1  # an id, a log-prob and a mask byte
_EPISODE_BYTES = MAX_SNAPSHOT_BYTES * 4 // 3  # in base64


def disk_need_bytes(recipe: Recipe, facts: ModelFacts | None, *, last_version: int = 0) -> float:
    """Estimates what a run writes after this version, with payloads of half the maximum length. Adapters are not
    counted.
    """
    run, trainer = recipe.run, recipe.trainer
    coming = max(0, run.total_batches - last_version)
    row = recipe.max_model_tokens / 2 * (12 + _mask_bytes_per_token(recipe))
    group = recipe.rows_per_group * _most_segments(recipe) * row
    kept = max(run.keep_batches, trainer.keep_checkpoints * recipe.checkpoint_every) + recipe.checkpoint_every
    batches = min(coming, kept) if run.keep_batches else coming
    recorded = 2 * batches * run.groups_per_batch  # at most as many rejected groups as trained ones are kept
    payloads = group * (recorded + LOG_COPIES * recipe.credits)
    payloads += 0 if external_redis_url(recipe) else LOG_COPIES * job_bytes(recipe)
    if facts is None:
        return payloads
    checkpoints = min(trainer.keep_checkpoints + 1, 1 + coming // recipe.checkpoint_every)
    exports = 1 + (coming // trainer.export_every if trainer.export_every else 0)
    exports += recipe.eval.num_best + 1 if recipe.eval.keep_best else 0
    num_trained = facts.num_critic_parameters + (facts.num_parameters if trainer.lora is None else 0)
    checkpoint = num_trained * OPTIMIZER_BYTES_PER_PARAMETER
    return payloads + checkpoints * checkpoint + exports * facts.num_parameters * _weight_bytes(recipe)


def worst_case_redis_bytes(recipe: Recipe, rows_per_epoch: int) -> int:
    """Bytes of a run at its end if all credits are in use, all answers have the maximum length, and the next
    checkpoint is due. Prompts that are dropped and replaced add FINISHED_GROUP_BYTES each, and their share of an epoch.
    """
    run = recipe.run
    segment = recipe.max_model_tokens * (_PAYLOAD_BYTES_PER_TOKEN + _mask_bytes_per_token(recipe)) + HEADER_BYTES
    row = _most_segments(recipe) * segment + recipe.max_model_tokens * _TEXT_BYTES_PER_TOKEN
    if recipe.environment.path:  # its trajectories have the conversation, too, and unfinished ones a snapshot
        row += recipe.max_model_tokens * _TEXT_BYTES_PER_TOKEN + _EPISODE_BYTES
    outstanding = recipe.credits * (recipe.rows_per_group * row + GROUP_BYTES + NOTES_BYTES)
    trained = recipe.checkpoint_every * run.groups_per_batch * (GROUP_BYTES + NOTES_BYTES)
    num_groups = run.total_batches * run.groups_per_batch
    finished = num_groups * FINISHED_GROUP_BYTES + -(-num_groups // rows_per_epoch) * EPOCH_BYTES
    samplers = max(recipe.rollout.num_replicas, recipe.autoscale.max_samplers)
    services = samplers + recipe.autoscale.max_scorers + 3  # feed, trainer, controller
    return outstanding + trained + finished + services * SERVICE_BYTES + SET_ASIDE_BYTES


def _most_segments(recipe: Recipe) -> int:
    """Of a trajectory: an episode may fork after every turn."""
    forks = recipe.environment.path and recipe.environment.rewritten_history == "fork"
    return recipe.environment.max_turns if forks else 1


def _mask_bytes_per_token(recipe: Recipe) -> int:
    """At most: the tokens that top-k leaves, and how many these are."""
    return 4 * recipe.rollout.top_k + 4 if recipe.rollout.top_k else 0


def job_bytes(recipe: Recipe) -> int:
    """Bytes that jobs may take in the run's Redis. 0 without `reward.port`, because clients then cannot submit jobs."""
    return recipe.jobs.redis_bytes if recipe.reward.port else 0


def memory_need_bytes(recipe: Recipe, facts: ModelFacts) -> tuple[float, float]:
    """What all engines need on CPUs, and what the trainer needs: its state, the copy of the published weights, and the
    forward and backward pass of the largest micro-batch. Differences may take nearly as much as a second copy. A late
    sampler that reads a copy while the next version is made adds one more.
    """
    trainer, weights = recipe.trainer, facts.num_parameters * _weight_bytes(recipe)
    stage, by_stage = trainer.resolved_zero_stage, _TRAINING_BYTES[trainer.dtype]
    copies_sent = 2 if recipe.weights.encoding == "delta" else 1
    training = trainer.num_ranks * (ENGINE_BYTES + _pass_bytes(recipe, facts)) + copies_sent * weights
    training += facts.num_critic_parameters * by_stage[3]  # always partitioned
    copies = 1 if stage == 3 else trainer.num_ranks
    if trainer.lora is not None:
        training += copies * weights  # they are the reference, too
    else:
        training += copies * facts.num_parameters * by_stage[stage] + trainer.needs_reference * weights
    return recipe.rollout.num_replicas * sampler_bytes(recipe, facts), training


def _pass_bytes(recipe: Recipe, facts: ModelFacts) -> float:
    """Activations of the largest micro-batch on one rank, and the gradient of the output head, which is computed apart
    before it is added, with the logits of a chunk and the gradients that are kept. Without the model's sizes 0.
    """
    trainer, hidden, layers = recipe.trainer, facts.hidden_size, facts.num_layers
    rows = recipe.run.groups_per_batch * recipe.rollout.samples_per_prompt
    tokens = min(trainer.tokens_per_micro_batch, -(-rows // trainer.num_ranks) * recipe.max_model_tokens)
    by_hidden, by_intermediate = _LAYER_ACTIVATIONS
    layer = by_hidden * hidden + by_intermediate * (facts.intermediate_size or 4 * hidden)
    kept = layers * hidden + layer if trainer.gradient_checkpointing else layers * layer
    head = 0 if trainer.lora is not None else _embedding_bytes(recipe, facts)
    if head and trainer.dtype == "bfloat16":
        head += 2 * min(_KEPT_SLOPES, tokens * facts.vocabulary)
    return tokens * kept * _weight_bytes(recipe) + head + 4 * min(_HEAD_CHUNK_LOGITS, 3 * tokens * facts.vocabulary)


def sampler_bytes(recipe: Recipe, facts: ModelFacts) -> float:
    """Memory of one engine on CPUs: its weights twice, since a staged update is a second copy, with the embedding both
    as it is and packed as a head; memory for received buckets, of which the embedding is the largest; and what sampling
    leaves with the allocator.
    """
    lora, weights = recipe.trainer.lora, facts.num_parameters * _weight_bytes(recipe)
    embedding = _embedding_bytes(recipe, facts)
    # If only adapters are broadcast, it also holds the base weights to merge them into.
    copies = 2 + (lora is not None and lora.broadcast == "adapter")
    copies += recipe.weights.encoding == "delta"  # the version to which differences are applied
    buckets = min(max(recipe.weights.bucket_bytes, embedding), weights)
    in_use = copies * weights + 2 * embedding + buckets + _SAMPLING_EMBEDDINGS * embedding
    return recipe.rollout.kv_cache_bytes + in_use + ENGINE_BYTES


def _embedding_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    return facts.vocabulary * facts.hidden_size * _weight_bytes(recipe)


def _weight_bytes(recipe: Recipe) -> int:
    return 4 if recipe.trainer.dtype == "float32" else 2
