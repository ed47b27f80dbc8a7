"""Bad input is found before anything starts, as a UserError in one line with the fault, its place and the remedy."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import (
    ConfigError,
    DataError,
    EnvironmentLackError,
    ModelError,
    RunExistsError,
    ScorerError,
    UserError,
)
from tandem.rollout.engine import find_engine
from tandem.services.config import Recipe, dump_recipe
from tandem.services.run import estimates, model_check, preflight
from tandem.services.run.endpoint import with_own_host
from tandem.services.run.folder import CONFIG_FILE, RunAddress, RunLock
from tandem.services.run.model_check import check_model
from tandem.services.run.preflight import check_added_samplers, check_disk, check_memory, check_recipe, check_service
from tests.support.run_inputs import CONFIG, Values, recipe_of, write_dataset, write_model, write_safetensors

pytestmark = pytest.mark.usefixtures("plain_machine")


def refused(kind: type[UserError], recipe: Recipe, *says: str, resume: bool = False) -> str:
    """The error line with which the recipe is refused."""
    with pytest.raises(kind) as caught:
        check_recipe(recipe, resume=resume)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    for words in says:
        assert words in line
    return line


def test_a_good_recipe_passes_and_leaves_no_trace(values: Values, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    check_recipe(recipe_of(values), resume=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_with_a_run_is_refused_without_resume(values: Values) -> None:
    recipe = recipe_of(values)
    recipe.folder.mkdir()
    (recipe.folder / "notes.txt").touch()
    check_recipe(recipe, resume=False)  # a folder without a run is accepted
    (recipe.folder / CONFIG_FILE).write_text(dump_recipe(recipe))
    check_recipe(recipe, resume=False)  # so is one whose run took no step
    (recipe.folder / "batches" / "000001").mkdir(parents=True)
    refused(RunExistsError, recipe, str(recipe.folder), "--resume")
    check_recipe(recipe_of(values, run={"total_batches": 9}, trainer={"checkpoint_every": 3}), resume=True)
    refused(ConfigError, recipe_of(values, run={"seed": 1}), "run.seed was 0", "is 1 now", resume=True)


def test_a_folder_in_use_is_refused_with_and_without_resume(values: Values) -> None:
    recipe = recipe_of(values)
    with RunLock(recipe.folder) as lock, pytest.raises(RunExistsError, match="another supervisor"):
        lock.publish(RunAddress(pid=os.getpid(), redis_url="unix://nowhere", control="", token=""))
        check_recipe(recipe, resume=True)


def test_a_file_in_place_of_the_run_folder_is_refused(values: Values, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recipe = recipe_of(values, run={"folder": str(tmp_path / "file" / "run")})
    refused(EnvironmentLackError, recipe, "a file stands", "run.folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused(values: Values, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    recipe = recipe_of(values, run={"folder": str(locked / "run")})
    refused(EnvironmentLackError, recipe, str(locked), "cannot be written")


def rewrite(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda m: shutil.rmtree(m), "no such folder"),
        (lambda m: (m / "config.json").unlink(), "no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "cannot be read"),
        (lambda m: (m / "config.json").write_text("[]"), "not a JSON object"),
        (lambda m: rewrite(m, architectures=[]), "names no architecture"),
        (lambda m: rewrite(m, architectures=["Qwen2ForCausalLN"]), "the nearest is Qwen2ForCausalLM"),
        (lambda m: rewrite(m, max_position_embeddings=63), "reads at most 63 tokens"),
        (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda m: (m / "tokenizer_config.json").unlink(), "no chat template"),
        (lambda m: (m / "tokenizer_config.json").write_text("nonsense"), "tokenizer_config.json cannot be read"),
        (lambda m: (m / "model.safetensors").unlink(), "no weights"),
        (lambda m: cut(m / "model.safetensors"), "damaged or cut short"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 8), "damaged or cut short"),
    ],
)
def test_a_damaged_model_folder_is_refused(values: Values, damage: Callable[[Path], object], says: str) -> None:
    if "nearest" in says and not find_engine("vllm").installed:
        pytest.skip("vLLM is not installed")
    damage(Path(values["model"]["path"]))
    refused(ModelError, recipe_of(values), "model.path", values["model"]["path"], says)


def test_the_size_and_layout_of_a_model_come_from_its_headers(values: Values) -> None:
    facts = check_model(recipe_of(values))
    assert facts is not None
    assert (facts.architecture, facts.num_parameters) == ("Qwen2ForCausalLM", 240)


def test_a_configured_template_replaces_the_tokenizers(values: Values, tmp_path: Path) -> None:
    (Path(values["model"]["path"]) / "tokenizer_config.json").unlink()
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    recipe = recipe_of(values, model={"chat_template": str(template)})
    check_recipe(recipe, resume=False)
    template.write_text("line one\n{% for m in %}")
    refused(ModelError, recipe, f"{template}, line 2", "mend the template")
    template.unlink()
    refused(ModelError, recipe, str(template), "cannot be read")


def test_a_hub_name_needs_a_hub_or_its_cache(values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe = recipe_of(values, model={"path": "some/model"})
    refused(ModelError, recipe, "some/model", "HF_HUB_OFFLINE")
    with socket.socket() as silent:  # bound but not listening
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        refused(ModelError, recipe, "some/model", "cannot be reached")
    shutil.copytree(values["model"]["path"], tmp_path / "hub" / "models--some--model" / "snapshots" / "abc")
    check_recipe(recipe, resume=False)


@pytest.fixture
def port() -> Iterator[int]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("section", ["rollout", "reward", "trainer"])
def test_a_port_in_use_is_refused(values: Values, section: str, port: int) -> None:
    recipe = recipe_of(values, **{section: {"port": port}})
    refused(EnvironmentLackError, recipe, f"{section}.port", f"127.0.0.1:{port}", "in use")


def test_the_port_of_a_later_replica_is_checked(values: Values, port: int) -> None:
    recipe = recipe_of(values, rollout={"port": port - 1, "num_replicas": 2})
    refused(EnvironmentLackError, recipe, "rollout.port")
    with pytest.raises(EnvironmentLackError, match=str(port)):
        check_service(recipe, "rollout", 1)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (DataError, {"data": {"eval_file": "gone/eval.jsonl"}}, ["eval.jsonl", "no such file"]),
        (DataError, {"eval": {"sets": [{"file": "gone/aime.jsonl"}]}}, ["aime.jsonl", "no such file"]),
        (EnvironmentLackError, {"rollout": {"port": 65535, "num_replicas": 2}}, ["rollout.port"]),
        (
            ConfigError,
            {"reward": {"port": 21671}, "trainer": {"port": 21671}},
            ["trainer.port", "21671", "also that of reward"],
        ),
        (
            EnvironmentLackError,
            {"run": {"host": "192.0.2.1", "insecure": True}, "trainer": {"port": 21671}},
            ["192.0.2.1:21671"],
        ),
        (
            ConfigError,
            {"run": {"host": "192.0.2.1"}},
            ["192.0.2.1 is not a loopback", "`tandem certs init`", "insecure"],
        ),
        (ConfigError, {"run": {"certificates": "gone"}}, ["gone/ca.crt", "`tandem certs init gone` writes it"]),
        (ConfigError, {"weights": {"backend": "nccl"}}, ["weights.backend=nccl", "gloo"]),
        (ConfigError, {"weights": {"backend": "ipc"}}, ["weights.backend=ipc", "gloo"]),
        (ConfigError, {"trainer": {"num_nodes": 2}}, ["run.redis_url", "TANDEM_REDIS_URL"]),
        (
            ConfigError,
            {"trainer": {"num_nodes": 2}, "run": {"redis_url": "redis://192.0.2.1:6379"}},
            ["run.host=127.0.0.1", "run.host=10.0.0.1"],
        ),
        (ConfigError, {"run": {"redis_url": "http://x"}}, ["run.redis_url"]),
        (EnvironmentLackError, {"rollout": {"kv_cache_bytes": 1 << 50}}, ["rollout.kv_cache_bytes", "GB"]),
        (EnvironmentLackError, {"run": {"total_batches": 10**9}}, ["GB free", "checkpoints", "run.folder"]),
        (ScorerError, {"reward": {"scorer": "exakt"}}, ["reward.", "did you mean exact?"]),
        (ScorerError, {"reward": {"scorer": "no_module_here:score"}}, ["reward.", "no module named no_module_here"]),
        (ScorerError, {"reward": {"scorer": "missing.py:score"}}, ["reward.", "missing.py is no file"]),
        (ScorerError, {"reward": {"scorer": "exact", "arguments": {"tolerence": 1}}}, ["reward.", "tolerence"]),
        (ConfigError, {"environment": {"path": "missing.py:A"}}, ["environment.path: missing.py:A", "is no file"]),
    ],
)
def test_a_recipe_that_cannot_run_here_is_refused(
    values: Values, kind: type[UserError], changes: Values, says: list[str]
) -> None:
    refused(kind, recipe_of(values, **changes), *says)


def test_samplers_join_only_if_gpus_are_free_and_leave_in_any_case(
    values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpu_ids", lambda: ("0",))  # trainer and samplers share it
    check_added_samplers(recipe_of(values, rollout={"num_replicas": 1}), -1)
    with pytest.raises(EnvironmentLackError, match=r"would need 3 GPUs, this machine shows 1"):
        check_added_samplers(recipe_of(values, rollout={"num_replicas": 2}), 1)


def test_a_missing_redis_server_is_refused(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLackError, match="no redis-server"):
        preflight.check_redis(recipe_of(values))


@pytest.mark.parametrize("package", ["torch", "vllm"])
def test_a_package_that_is_not_installed_is_named_with_its_pip_command(
    values: Values, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    refused(EnvironmentLackError, recipe_of(values), f"{package} is not installed", "pip install 'tandem-rl[cpu]'")


def test_the_memory_of_replicas_adds_up(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = check_model(recipe_of(values))
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 4e9)
    check_memory(recipe_of(values), facts)
    with pytest.raises(EnvironmentLackError, match=r"4 engine\(s\)"):
        check_memory(recipe_of(values, rollout={"num_replicas": 4}), facts)
    monkeypatch.setattr(preflight, "gpu_ids", lambda: ("0",))
    check_memory(recipe_of(values, rollout={"num_replicas": 4}), facts)  # their weights are in GPU memory


def test_a_full_disk_is_reported_as_full(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentLackError, match="the disk is full"):
        check_disk(recipe_of(values), None)


def test_a_service_started_by_hand_is_checked_for_what_it_needs(values: Values, tmp_path: Path) -> None:
    recipe = recipe_of(values, data={"train_file": str(tmp_path / "gone")})
    check_service(recipe, "rollout", 0)
    check_service(recipe, "reward", 0)
    with pytest.raises(DataError):
        check_service(recipe, "feed", 0)
    write_dataset(tmp_path / "gone")
    check_service(recipe, "feed", 0)
    shutil.rmtree(values["model"]["path"])
    check_service(recipe, "reward", 0)
    for service in ("feed", "rollout", "trainer"):
        with pytest.raises(ModelError):
            check_service(recipe, service, 0)


# ---- requirements of the algorithm ----


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
    assert estimates.disk_need_bytes(plain, with_critic) == estimates.disk_need_bytes(plain, facts) + 12e9
    adapters = recipe_of(values, trainer={"lora": {}})
    assert estimates.disk_need_bytes(adapters, facts) == estimates.disk_need_bytes(plain, facts) - 12e9

    def fits(recipe: Recipe, facts: model_check.ModelFacts, gigabytes: float) -> bool:
        monkeypatch.setattr(preflight, "free_memory_bytes", lambda: gigabytes * 1e9)
        try:
            check_memory(recipe, facts)
        except EnvironmentLackError:
            return False
        return True

    # Two copies of the weights, the overhead of a sampler and a rank, a bucket, and the trainer's copy that is sent.
    engine = 8 + 1 + 1.17 + 4
    penalty = {"kl": {"loss": {"coefficient": 0.1}}}
    assert fits(plain, facts, engine + 17.1) and not fits(plain, facts, engine + 16)
    assert fits(plain, with_critic, engine + 53.1) and not fits(plain, with_critic, engine + 52), "ZeRO-3 takes 36"
    assert fits(adapters, facts, engine + 8.1) and not fits(adapters, facts, engine + 7), "a sampler keeps the base"
    assert fits(recipe_of(values, trainer={"lora": {"broadcast": "merged"}}), facts, engine + 4.1)
    held_to_the_first = recipe_of(values, trainer=penalty)
    assert fits(held_to_the_first, facts, engine + 21.1) and not fits(held_to_the_first, facts, engine + 20)
    assert fits(recipe_of(values, trainer={**penalty, "lora": {}}), facts, engine + 8.1), "the base weights are held to"
    partitioned = recipe_of(values, trainer={"num_ranks": 2})
    assert fits(partitioned, facts, engine + 1 + 36.1) and not fits(partitioned, facts, engine + 36)
    whole = recipe_of(values, trainer={"num_ranks": 2, "zero_stage": 0})
    assert fits(whole, facts, engine + 1 + 34.1) and not fits(whole, facts, engine + 34), "each rank holds all"


def test_a_service_finds_its_own_address_by_the_way_to_redis(values: Values) -> None:
    recipe = recipe_of(values, run={"host": "auto"})
    assert with_own_host(recipe, "redis://127.0.0.2:6379/0").run.host == "127.0.0.1"
    assert with_own_host(recipe, "unix:///tmp/redis.sock").run.host == "127.0.0.1"
    named = recipe_of(values, run={"host": "10.0.0.7"})
    assert with_own_host(named, "redis://127.0.0.1:6379/0") is named
    with pytest.raises(ConfigError, match=r"run\.host=auto: Redis' host redis\.invalid"):
        with_own_host(recipe, "redis://redis.invalid:6379/0")
