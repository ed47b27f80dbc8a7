"""`tandem eval`: starts a sampler and a reward service, and evaluates the model once on the evaluation sets.

With a folder for the output, the samples and results are kept there as in a run's folder, where the model is version 0.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from tandem.protos.errors import ConfigError, DeadlineError
from tandem.protos.scratch_folder import ScratchFolder
from tandem.rollout.engine import find_engine, remove_leftovers
from tandem.services.buffer.buffer import Buffer
from tandem.services.command_line import print_error, print_text
from tandem.services.config import Recipe, dump_recipe, without_secrets
from tandem.services.launchers.process_group import FAILED, FINISHED, ProcessGroup
from tandem.services.launchers.supervisor import child_specs
from tandem.services.process import in_thread
from tandem.services.run.endpoint import check_network
from tandem.services.run.environment_checks import check_environment
from tandem.services.run.folder import CONFIG_FILE, RunLock, cannot_write, write_text
from tandem.services.run.json_files import EVALUATIONS_FILE, GENERATIONS_FOLDER, METRICS_FILE, JsonLines
from tandem.services.run.ledger import create_ledger
from tandem.services.run.model_check import check_model
from tandem.services.run.placement import workers_of
from tandem.services.run.preflight import check_ports, check_reward
from tandem.services.run.redis_child import RedisChild
from tandem.services.run.threads import check_threads
from tandem.services.trainer.evaluation import Evaluation, evaluate, load_set, wait_for_endpoints
from tandem.services.trainer.generations import EvaluationSet, SetResult
from tandem.trainer.batch.record import BATCHES_FOLDER

START_SECONDS = 600.0
"""Time limit for the start of the services. Loading a large model from a slow disk takes longest."""


_VERSION = 0
"""Of the model, in the files of the output."""


def evaluate_recipe(recipe: Recipe, output: Path | None = None) -> int:
    """Answers the evaluation sets with `model.path` and prints the results. Returns the exit code: 1 if a set failed.
    Samples that are in `output` already are not sampled again.

    Raises UserError for an unusable file, model, function or output, DeadlineError if services do not start in ten
    minutes.
    """
    if not recipe.eval_sets:
        raise ConfigError(
            "data.eval_file is empty, and so is eval.sets: name a file of prompts to evaluate on, e.g. "
            "data.eval_file=data/test.parquet"
        )
    find_engine(recipe.rollout.engine).check(recipe.rollout)  # before anything starts
    check_model(recipe)
    check_threads(recipe, "rollout", workers_of(recipe)["rollout"])
    check_network(recipe)
    check_ports(recipe)
    check_reward(recipe)
    check_environment(recipe)
    sets = [load_set(one, recipe) for one in recipe.eval_sets]
    with ScratchFolder("eval") as folder, ExitStack() as stack:
        stack.callback(remove_leftovers)
        if output is not None:
            stack.enter_context(_opened(output))
            write_text(output / CONFIG_FILE, dump_recipe(without_secrets(recipe)))
        samples = (output or folder) / GENERATIONS_FOLDER / f"{_VERSION:06d}"
        run = recipe.run.model_copy(update={"folder": str(folder), "run_id": "eval", "redis_url": ""})
        recipe = recipe.model_copy(update={"run": run})
        processes = ProcessGroup(report=print_text, keep_logs=False)
        stack.enter_context(processes.signals())
        redis = stack.enter_context(RedisChild(folder, report=processes.report))
        processes.on_poll.append(redis.restart_if_dead)
        buffer = Buffer(redis.url, recipe.run.run_id)
        stack.callback(buffer.close)
        create_ledger(buffer, recipe, resume=False)
        specs = child_specs(recipe, redis.url)
        processes.add(spec for spec in specs if spec.name.startswith(("rollout", "environments", "reward")))
        evaluation = in_thread("evaluation", _evaluate, recipe, sets, buffer, samples)
        evaluation.add_done_callback(lambda _: processes.finish())
        outcome = processes.run()
        if not evaluation.done():
            return outcome
        if output is not None:
            _write(output, evaluation.result())
        return _report(recipe, evaluation.result())


def _opened(output: Path) -> RunLock:
    """Locks the folder. Raises ConfigError if it is a run's, RunExistsError if another evaluation writes there."""
    if any((output / name).exists() for name in (METRICS_FILE, BATCHES_FOLDER)):
        raise ConfigError(f"--output {output} is the folder of a run; name another one")
    return RunLock(output)


def _write(output: Path, result: Evaluation) -> None:
    """Writes the result's line, in place of an earlier one."""
    lines = JsonLines(output / EVALUATIONS_FILE)
    try:
        lines.keep(lambda _: False)
        lines.append(asdict(replace(result, version=_VERSION)))
    except OSError as error:
        raise cannot_write(output, error) from None
    print_text(f"samples and results are in {output}")


def _evaluate(recipe: Recipe, sets: Sequence[EvaluationSet], buffer: Buffer, samples: Path) -> Evaluation:
    endpoints = wait_for_endpoints(buffer, recipe, None, START_SECONDS, threading.Event())
    if endpoints is None:
        raise DeadlineError(
            f"sampler and reward service were not ready within {START_SECONDS:.0f} s, so nothing was evaluated; is "
            f"{recipe.model.path} too large for this machine, or its disk too slow?"
        )
    return evaluate(None, sets, endpoints, recipe, samples)


def _report(recipe: Recipe, result: Evaluation) -> int:
    files = {one.name: one.file for one in recipe.eval_sets}
    for name, one in result.sets.items():
        print(f"{name}: {recipe.model.path} on {files[name]}")
        print_set(one)
    print(f"{result.num_rows} rows in {result.seconds:.1f} s")
    for failure in result.failures:
        print_error(failure)
    return FAILED if result.failures else FINISHED


def print_set(one: SetResult) -> None:
    """Prints the metrics and the counts of a set."""
    if one.accuracy is not None:
        means = f"accuracy {one.accuracy:.4f}, mean reward {one.metrics['mean_reward']:.4f}"
        print(f"  {means} over {one.num_scored} rows")
    for metric, value in one.metrics.items():
        low, high = one.intervals[metric]
        print(f"  {metric} {value:.4f} ({low:.4f} to {high:.4f})")
    for source, metrics in one.data_sources.items() if len(one.data_sources) > 1 else ():
        share = next(value for metric, value in metrics.items() if metric.startswith("mean@"))
        print_text(f"  {source or 'no data_source'}: accuracy {share:.4f} over {metrics['num_prompts']:.0f} prompts")
    if one.num_truncated or one.num_no_answer:
        print(f"  truncated: {one.num_truncated} rows; without an answer: {one.num_no_answer} rows")
    if one.episodes:
        print_text("  episodes: " + ", ".join(f"{name} {number}" for name, number in one.episodes.items()))
    for reason, number in one.unscored.items():
        print_text(f"  not scored: {number} rows ({reason})")
