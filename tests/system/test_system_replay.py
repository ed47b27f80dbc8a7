"""A run can be trained again from its records: bit for bit at S = 0 and S = 4, with one rank and with two. And what it
trained on can be sampled again.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tandem.services.buffer.redis_server import start_redis
from tandem.services.config import load_resolved
from tests.support.engine_inputs import relative_error
from tests.support.reference_loop import train_reference
from tests.support.tampered import other_first_logprob, tamper, with_last_segment
from tests.support.whole_run import WholeRun, service_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


SHORT = {
    "run": {"total_batches": 5, "groups_per_batch": 2, "staleness_budget": 2},
    "rollout": {"samples_per_prompt": 2, "max_response_tokens": 400, "max_groups_in_flight": 2},
}
"""A short run whose last two batches can only be sampled once the first version is trained. A batch has few rows: it is
trained in a fraction of the time of its 400 engine steps, and the next version arrives in the middle of them.
"""


def check_asynchronous(run: WholeRun) -> None:
    """Checks that the run is asynchronous: long answers, weights that changed inside them, and stale ones."""
    rows = [row.trajectory for _version, row in run.trained_rows()]
    assert min(sum(segment.num_loss_tokens for segment in row.segments) for row in rows) >= 256
    versions = [{span.policy_version for segment in row.segments for span in segment.spans} for row in rows]
    share = sum(len(seen) > 1 for seen in versions) / len(versions)
    staleness = run.summary()["mean_staleness"]
    assert share >= 0.2 and staleness >= 0.5, f"{share:.0%} of trajectories of several versions, {staleness:.2f} old"


def check_replay(run: WholeRun, *options: str) -> str:
    """Training again from the records ends with the same weights bit for bit. Returns what was printed."""
    done = run.tandem("replay", str(run.folder), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_generation(run: WholeRun) -> None:
    """As `check_replay`, and every token that can be compared is sampled again."""
    spans = [row.trajectory.segments[0].spans for _, row in run.trained_rows()]
    several = any(one.policy_version != row[0].policy_version for row in spans for one in row)
    said = check_replay(run, "--generation")
    assert f"{len(spans)} trajectories, {len(spans)} turns, " in said and "sampled again: no difference" in said, said
    assert ("tokens sampled after the weights changed within their turn" in said) == several, said


@pytest.mark.parametrize(("engine", "tied"), [("vllm", True), ("transformers", False)])
def test_an_asynchronous_run_replays_bit_for_bit(tmp_path: Path, engine: str, tied: bool) -> None:
    run = WholeRun(tmp_path, tied=tied, rollout={"engine": engine})
    run.finish()
    check_asynchronous(run)
    check_generation(run)
    check_against_the_reference_loop(run)
    if engine == "transformers":  # which starts sooner
        check_that_another_logprob_is_named(run)


def check_that_another_logprob_is_named(run: WholeRun) -> None:
    name = tamper(run.folder, lambda row: with_last_segment(row, other_first_logprob))
    done = run.tandem("replay", str(run.folder), "--generation")
    told = f"{name}, turn 0, sampled by version 0: token 0 of the turn: token id "
    assert done.returncode == 1 and told in done.stdout, done.stdout + done.stderr


def check_against_the_reference_loop(run: WholeRun) -> None:
    """The reference loop gives the same bits; plain torch gives the same update up to rounding."""
    recipe = load_resolved(run.folder / "config.json")
    start = load_file(run.model / "model.safetensors")
    trained = load_file(run.folder / "hf" / "model.safetensors")
    arguments = (run.folder, run.model, recipe.trainer, recipe.run.total_batches)
    same = train_reference(*arguments, "deepspeed")
    assert set(same) == set(trained) and all(torch.equal(same[name], trained[name]) for name in trained)
    assert relative_error(trained, train_reference(*arguments, "torch"), start) <= 1e-4


def test_a_synchronous_run_is_sampled_wholly_by_the_published_version_and_replays(tmp_path: Path) -> None:
    run = WholeRun(tmp_path, run={"staleness_budget": 0, "total_batches": 10})
    run.finish()
    for version, row in run.trained_rows():
        spans = [span for segment in row.trajectory.segments for span in segment.spans]
        assert {span.policy_version for span in spans} == {version - 1}
    assert run.summary()["observed_max_staleness"] == 0
    check_generation(run)


@pytest.mark.parametrize("backend", ["deepspeed", pytest.param("fsdp", marks=pytest.mark.deploy)])
def test_two_ranks_that_shard_train_and_replay(tmp_path: Path, backend: str) -> None:
    trainer = {"num_ranks": 2, "backend": backend}
    run = WholeRun(tmp_path, trainer=trainer, **SHORT)
    run.finish()
    check_asynchronous(run)
    check_generation(run)


def test_only_adapters_are_broadcast_even_after_kills(tmp_path: Path) -> None:
    lora = {"lora": {"rank": 2}, "learning_rate": 1e-2, "checkpoint_every": 3}
    run = WholeRun(tmp_path, trainer=lora, run={"total_batches": 8, "staleness_budget": 0})
    supervisor = run.start("run", str(run.recipe))
    for moment, service in ((2, "rollout"), (5, "trainer")):
        run.wait_for(lambda moment=moment: len(run.metrics()) >= moment, supervisor)
        service_process(supervisor, service).kill()
    assert supervisor.wait(200) == 0, (run.scratch / "run.out").read_text()[-3000:] + run.logs()
    adapters = sum(
        tensor.nbytes for tensor in load_file(run.folder / "hf-adapter" / "adapter_model.safetensors").values()
    )
    whole = (run.folder / "hf" / "model.safetensors").stat().st_size
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 9)) and 4 * adapters < whole
    assert {line["weight_bytes"] for line in lines if not line.get("replayed")} == {adapters}
    # At S = 0 samplers and trainer have the same weights, merged or beside the base as in PEFT.
    assert all(line["behavior_proximal_kl"] < 1e-9 for line in lines)
    check_generation(run)


@pytest.mark.deploy
def test_a_trainer_runs_on_two_hosts(tmp_path: Path) -> None:
    """Two launchers on this machine that share only Redis and the run folder. A rank is killed; both start anew."""
    redis = start_redis(tmp_path / "shared")
    trainer = {"num_nodes": 2, "checkpoint_every": 2}
    run = WholeRun(tmp_path, trainer=trainer, run={**SHORT["run"], "redis_url": redis.url}, rollout=SHORT["rollout"])
    supervisor = run.start("run", str(run.recipe))
    other = run.start("serve", "trainer", str(run.recipe))
    try:
        run.wait_for(lambda: len(run.metrics()) >= 2, supervisor)
        (rank,) = psutil.Process(other.pid).children()
        rank.kill()
        assert supervisor.wait(200) == 0, (run.scratch / "run.out").read_text()[-3000:] + run.logs()
        assert other.wait(30) == 0
        assert run.summary()["train_steps"] == 5
        said = (run.folder / "logs" / "trainer.log").read_text() + (run.scratch / "run.out").read_text()
        assert "ended with exit code -9" in said and said.count("starts ranks as machine") == 4
        check_replay(run)
    finally:
        for process in (supervisor, other):
            process.terminate()
            process.wait(20)
        redis.stop()


def test_several_optimizer_steps_and_epochs_and_the_disk_weight_backend_replay(tmp_path: Path) -> None:
    changes = {"trainer": {"optimizer_steps_per_batch": 2, "epochs_per_batch": 2}, "weights": {"backend": "disk"}}
    run = WholeRun(tmp_path, tied=False, **changes, **SHORT)
    run.finish()
    check_asynchronous(run)
    summary = run.summary()
    assert (summary["optimizer_steps"], summary["weight_updates"], summary["groups"]["dropped"]) == (20, 5, 0)
    check_replay(run)


def test_greedy_answers_are_sampled_again_without_a_difference(tmp_path: Path) -> None:
    """ReMax compares the samples of a prompt with its greedy answer, which is recorded, too."""
    run = WholeRun(
        tmp_path,
        run={"total_batches": 2, "groups_per_batch": 2, "staleness_budget": 1},
        rollout={"samples_per_prompt": 2, "max_response_tokens": 64},
        trainer={"advantage": "remax", "learning_rate": 1e-3},
    )
    run.finish()
    rows = [row.trajectory for _, row in run.trained_rows()]
    assert [row.sampling.temperature for row in rows if row.role == "baseline"] == [0.0] * 4
    assert len(rows) == 4 * 3
    check_generation(run)
