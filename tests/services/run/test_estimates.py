"""Estimates of the memory, the disk and the room in Redis that a run needs."""

from __future__ import annotations

import pytest

from tandem.protos.contracts import MAX_SNAPSHOT_BYTES
from tandem.protos.errors import ConfigError
from tandem.services.config import Recipe
from tandem.services.run import estimates, model_check
from tests.support.run_inputs import Values, recipe_of


def test_disk_need_grows_with_checkpoints_and_exports(values: Values) -> None:
    facts = model_check.ModelFacts("Qwen2ForCausalLM", 10**9)
    length = {"total_batches": 40}
    plain = estimates.disk_need_bytes(recipe_of(values, run=length, trainer={"checkpoint_every": 1000}), facts)
    assert plain >= 16e9, "one checkpoint with its optimizer, and the final export"
    kept = recipe_of(values, run=length, trainer={"keep_checkpoints": 2})
    assert estimates.disk_need_bytes(kept, facts) >= plain + 24e9, "also by default"
    exported = recipe_of(values, run=length, trainer={"checkpoint_every": 1000, "export_every": 1})
    assert estimates.disk_need_bytes(exported, facts) >= plain + 12e9


def test_top_k_adds_the_ids_of_the_tokens_that_it_leaves(values: Values) -> None:
    plain, truncated = recipe_of(values), recipe_of(values, rollout={"top_k": 50})
    rows = plain.credits * plain.rows_per_group
    assert room_of(truncated) - room_of(plain) == rows * plain.max_model_tokens * 4 * 51
    assert estimates.disk_need_bytes(truncated, None) > 15 * estimates.disk_need_bytes(plain, None)


def test_a_batch_whose_sampling_masks_no_record_could_hold_is_refused(values: Values) -> None:
    large = {"samples_per_prompt": 16, "max_response_tokens": 16_384}
    roomy = {"run": {"groups_per_batch": 64}, "trainer": {"tokens_per_micro_batch": 32_768}}
    assert recipe_of(values, rollout={**large, "top_k": 100}, **roomy).rollout.top_k == 100
    with pytest.raises(ConfigError, match=r"2³¹ token ids in its sampling masks: .* lower rollout\.top_k"):
        recipe_of(values, rollout={**large, "top_k": 500}, **roomy)


def room_of(recipe: Recipe, rows_per_epoch: int = 10**9) -> int:
    return estimates.worst_case_redis_bytes(recipe, rows_per_epoch)


@pytest.mark.parametrize(("num_batches", "expected"), [(5, 10), (400, 20), (100_000, 50)])
def test_a_run_writes_checkpoints_by_default(values: Values, num_batches: int, expected: int) -> None:
    """Redis keeps what is trained until it is in one."""
    recipe = recipe_of(values, run={"total_batches": num_batches})
    assert (recipe.trainer.checkpoint_every, recipe.checkpoint_every) == (0, expected)


def test_a_greedy_answer_adds_a_payload(values: Values) -> None:
    plain, remax = recipe_of(values), recipe_of(values, trainer={"advantage": "remax"})
    added = room_of(remax) - room_of(plain)
    assert 13 * plain.credits * plain.max_model_tokens < added < 16 * 1.5 * plain.credits * plain.max_model_tokens
    assert estimates.disk_need_bytes(remax, None) == 1.5 * estimates.disk_need_bytes(plain, None)


@pytest.mark.parametrize(
    "changed",
    [
        {"run": {"total_batches": 10**6}, "trainer": {"checkpoint_every": 10}},
        {"trainer": {"checkpoint_every": 100}},
        {"rollout": {"num_replicas": 100}},
        {"autoscale": {"mode": "on", "max_samplers": 100}},
    ],
)
def test_the_room_in_redis_counts_history_what_waits_for_a_checkpoint_and_services(
    values: Values, changed: Values
) -> None:
    assert room_of(recipe_of(values, **changed)) > 1e5 + room_of(recipe_of(values))


def test_the_room_in_redis_counts_the_conversation_and_the_snapshot_of_each_episode(values: Values) -> None:
    plain, played = recipe_of(values), recipe_of(values, environment={"path": "games.py:Game"})
    rows = plain.credits * plain.rows_per_group
    assert room_of(played) - room_of(plain) == rows * (4 * plain.max_model_tokens + MAX_SNAPSHOT_BYTES * 4 // 3)


def test_the_room_in_redis_and_on_disk_counts_a_segment_for_each_turn_of_an_episode_that_may_fork(
    values: Values,
) -> None:
    game = {"path": "games.py:Game", "max_turns": 5}
    kept, forked = (recipe_of(values, environment={**game, "rewritten_history": how}) for how in ("keep", "fork"))
    segment = kept.max_model_tokens * 9 + estimates.HEADER_BYTES
    assert room_of(forked) - room_of(kept) == kept.credits * kept.rows_per_group * 4 * segment
    assert estimates.disk_need_bytes(forked, None) > 4 * estimates.disk_need_bytes(kept, None)


def test_the_room_in_redis_counts_the_epochs_of_a_small_dataset(values: Values) -> None:
    recipe = recipe_of(values, run={"total_batches": 10_000, "groups_per_batch": 8})
    assert room_of(recipe, rows_per_epoch=8) - room_of(recipe) == (10_000 - 1) * estimates.EPOCH_BYTES


def test_batches_that_are_not_kept_need_no_disk(values: Values) -> None:
    needs = {
        keep: estimates.disk_need_bytes(recipe_of(values, run={"total_batches": 1000, "keep_batches": keep}), None)
        for keep in (0, 200, 2000)
    }
    assert needs[200] < 0.3 * needs[0] and needs[2000] == needs[0]


def test_batches_that_are_written_need_no_further_disk(values: Values) -> None:
    recipe = recipe_of(values, run={"total_batches": 1000})
    whole, half, none = (estimates.disk_need_bytes(recipe, None, last_version=last) for last in (0, 500, 1000))
    assert none < half == pytest.approx((whole + none) / 2)


def test_the_disk_has_room_for_rejected_groups(values: Values) -> None:
    """A trainer keeps as many of them for each batch as it trains, and an id and a log-prob take 8 bytes at least."""
    run = recipe_of(values, run={"total_batches": 1000})
    longer = recipe_of(values, run={"total_batches": 2000})
    answers = 1000 * run.run.groups_per_batch * run.rows_per_group
    added = estimates.disk_need_bytes(longer, None) - estimates.disk_need_bytes(run, None)
    assert added >= 2 * answers * run.max_model_tokens / 2 * 8


def real_facts(num_layers: int, num_parameters: int) -> model_check.ModelFacts:
    return model_check.ModelFacts(
        "Qwen2ForCausalLM",
        num_parameters,
        vocabulary=151_936,
        num_layers=num_layers,
        hidden_size=896,
        intermediate_size=4864,
    )


def small_batches(values: Values, **changed: Values) -> Recipe:
    """The recipe of benchmarks/real_size.py, as far as memory depends on it."""
    rollout = {"samples_per_prompt": 4, "max_response_tokens": 128, "kv_cache_bytes": 256 << 20}
    trainer = {"tokens_per_micro_batch": 512} | changed.pop("trainer", {})
    return recipe_of(values, rollout=rollout, run={"groups_per_batch": 8}, trainer=trainer, **changed)


def test_gradient_checkpointing_small_micro_batches_and_small_vocabularies_need_less_memory(values: Values) -> None:
    facts = real_facts(24, 494_032_768)
    sampler, trainer = estimates.memory_need_bytes(small_batches(values), facts)
    for fewer in ({"tokens_per_micro_batch": 256}, {"gradient_checkpointing": True}):
        assert estimates.memory_need_bytes(small_batches(values, trainer=fewer), facts)[1] < trainer - 0.8e9
    without_sizes = model_check.ModelFacts("Qwen2ForCausalLM", 494_032_768)
    assert estimates.memory_need_bytes(small_batches(values), without_sizes)[0] < sampler - 2e9


def test_activations_count_no_more_tokens_than_a_batch_has(values: Values) -> None:
    facts = real_facts(24, 494_032_768)
    needs = [
        estimates.memory_need_bytes(small_batches(values, trainer={"tokens_per_micro_batch": budget}), facts)[1]
        for budget in (1 << 14, 1 << 20)
    ]
    assert needs[0] == needs[1]
