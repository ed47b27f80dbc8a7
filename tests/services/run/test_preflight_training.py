"""Requirements of the algorithm on engines, models, memory and disk are checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError, EnvironmentLackError, ModelError
from tandem.services.config import Recipe
from tandem.services.run import model_check, preflight
from tandem.services.run.preflight import check_memory, check_recipe, check_service
from tests.services.run.test_preflight import refused
from tests.support.run_inputs import CONFIG, Values, recipe_of, write_model, write_safetensors

pytestmark = pytest.mark.usefixtures("plain_machine")


def test_incompatible_engine_settings_are_refused(values: Values) -> None:
    for trainer, says in (
        ({"offload_optimizer": True, "zero_stage": 0}, "trainer.offload_optimizer needs ZeRO"),
        ({"offload_optimizer": True, "zero_stage": 2, "dtype": "bfloat16"}, "in bfloat16 needs trainer.zero_stage = 3"),
        ({"offload_parameters": True, "zero_stage": 1}, "trainer.offload_parameters needs partitioned parameters"),
    ):
        recipe = recipe_of(values, trainer=trainer)
        refused(ConfigError, recipe, says)
        with pytest.raises(ConfigError, match=says):
            check_service(recipe, "trainer", 0)
        check_service(recipe, "rollout", 0)


def test_adapters_need_layers_that_the_model_has(values: Values) -> None:
    model = Path(values["model"]["path"])
    layers = {"model.embed_tokens.weight": (10, 16), "model.layers.0.self_attn.q_proj.weight": (4, 4)}
    write_safetensors(model / "model.safetensors", layers)

    def recipe(*targets: str) -> Recipe:
        return recipe_of(values, trainer={"lora": {"target_modules": targets}})

    check_recipe(recipe("q_proj", "self_attn.q_proj"), resume=False)
    check_recipe(recipe_of(values, trainer={"lora": {}}), resume=False)
    refused(ConfigError, recipe("q_proj", "q_porj"), "trainer.lora.target_modules", "no linear layer q_porj", "q_proj")
    refused(ConfigError, recipe("lm_head"), "no linear layer lm_head with a weight of its own")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\0" * 960)
    check_recipe(recipe("anything"), resume=False)  # this file format lists no layers without being loaded


def test_a_critic_that_does_not_fit_the_policy_is_refused(values: Values, tmp_path: Path) -> None:
    critic = tmp_path / "critic"

    def recipe(advantage: str = "gae") -> Recipe:
        trainer = {"advantage": advantage, **({"critic": {"path": str(critic)}} if advantage == "gae" else {})}
        return recipe_of(values, trainer=trainer)

    refused(ModelError, recipe(), f"trainer.critic.path {critic}", "no such folder")
    write_model(critic)
    check_recipe(recipe(), resume=False)
    (critic / "tokenizer.json").unlink()  # the policy's tokenizer is used
    check_recipe(recipe(), resume=False)
    (critic / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 32}))
    refused(ModelError, recipe(), "trainer.critic.path", "reads at most 32 tokens")
    (critic / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 10}))
    (Path(values["model"]["path"]) / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 12}))
    refused(ModelError, recipe(), "trainer.critic.path", "knows 10 tokens and the policy 12")
    check_recipe(recipe("grpo"), resume=False)
    (critic / "config.json").write_text(json.dumps(CONFIG))
    (critic / "model.safetensors").unlink()
    refused(ModelError, recipe(), "trainer.critic.path", "no weights")


def test_models_besides_the_policy_count_in_memory_and_on_disk(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = model_check.ModelFacts("Qwen2ForCausalLM", 10**9)
    with_critic = model_check.ModelFacts("Qwen2ForCausalLM", 10**9, num_critic_parameters=10**9)
    plain = recipe_of(values)
    assert preflight.check_models(recipe_of(values, trainer={"advantage": "gae"})).num_critic_parameters == 240
    assert preflight.disk_need_bytes(plain, with_critic) == preflight.disk_need_bytes(plain, facts) + 12e9
    adapters = recipe_of(values, trainer={"lora": {}})
    assert preflight.disk_need_bytes(adapters, facts) == preflight.disk_need_bytes(plain, facts) - 12e9

    def fits(recipe: Recipe, facts: model_check.ModelFacts, gigabytes: float) -> bool:
        monkeypatch.setattr(preflight, "free_memory_bytes", lambda: gigabytes * 1e9)
        try:
            check_memory(recipe, facts)
        except EnvironmentLackError:
            return False
        return True

    engine = 8 + 1 + 1.1  # two copies of the weights, and the overhead of a sampler and a rank
    penalty = {"kl": {"loss": {"coefficient": 0.1}}}
    assert fits(plain, facts, engine + 16.1) and not fits(plain, facts, engine + 15)
    assert fits(plain, with_critic, engine + 32.1) and not fits(plain, with_critic, engine + 31)
    assert fits(adapters, facts, engine + 8.1) and not fits(adapters, facts, engine + 7), "a sampler keeps the base"
    assert fits(recipe_of(values, trainer={"lora": {"broadcast": "merged"}}), facts, engine + 4.1)
    held_to_the_first = recipe_of(values, trainer=penalty)
    assert fits(held_to_the_first, facts, engine + 20.1) and not fits(held_to_the_first, facts, engine + 19)
    assert fits(recipe_of(values, trainer={**penalty, "lora": {}}), facts, engine + 8.1), "the base weights are held to"


def test_a_greedy_answer_adds_a_payload(values: Values) -> None:
    plain, remax = recipe_of(values), recipe_of(values, trainer={"advantage": "remax"})
    assert 2 * preflight.worst_case_redis_bytes(remax) == 3 * preflight.worst_case_redis_bytes(plain)
    assert preflight.disk_need_bytes(remax, None) == 1.5 * preflight.disk_need_bytes(plain, None)
