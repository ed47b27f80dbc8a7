"""`tandem eval`: starts a sampler and a reward service, and evaluates the model once on the evaluation file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from tandem.protos.errors import ConfigError, DeadlineError
from tandem.protos.scratch_folder import ScratchFolder
from tandem.protos.types import Prompt
from tandem.rollout.engine import find_engine, remove_leftovers
from tandem.services.buffer.buffer import Buffer
from tandem.services.command_line import print_text
from tandem.services.config import Recipe
from tandem.services.launchers.process_group import FAILED, FINISHED, ProcessGroup
from tandem.services.launchers.supervisor import child_specs
from tandem.services.process import in_thread
from tandem.services.run.endpoint import check_network
from tandem.services.run.ledger import create_ledger
from tandem.services.run.model_check import check_model
from tandem.services.run.preflight import check_ports, check_reward
from tandem.services.run.redis_child import RedisChild
from tandem.services.trainer.evaluation import Evaluation, evaluate, load_evaluation_prompts, wait_for_endpoints

START_SECONDS = 600.0
"""Time limit for the start of the services. Loading a large model from a slow disk takes longest."""


def evaluate_recipe(recipe: Recipe) -> int:
    """Answers `data.eval_file` greedily with `model.path` and prints the result. Returns the exit code.

    Raises UserError for an unusable file, model or function, DeadlineError if services do not start in ten minutes.
    """
    if not recipe.data.eval_file:
        raise ConfigError(
            "data.eval_file is empty: name a file of prompts to evaluate on, e.g. data.eval_file=data/test.parquet"
        )
    find_engine(recipe.rollout.engine).check(recipe.rollout)  # before anything starts
    check_model(recipe)
    check_network(recipe)
    check_ports(recipe)
    check_reward(recipe)
    prompts = load_evaluation_prompts(recipe)
    with ScratchFolder("eval") as folder, ExitStack() as stack:
        stack.callback(remove_leftovers)
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
        processes.add(spec for spec in specs if spec.name.startswith(("rollout", "reward")))
        evaluation = in_thread("evaluation", _evaluate, recipe, prompts, buffer)
        evaluation.add_done_callback(lambda _: processes.finish())
        outcome = processes.run()
        return _report(recipe, evaluation.result()) if evaluation.done() else outcome


def _evaluate(recipe: Recipe, prompts: Sequence[Prompt], buffer: Buffer) -> Evaluation:
    endpoints = wait_for_endpoints(buffer, recipe, None, START_SECONDS, threading.Event())
    if endpoints is None:
        raise DeadlineError(
            f"sampler and reward service were not ready within {START_SECONDS:.0f} s, so nothing was evaluated; is "
            f"{recipe.model.path} too large for this machine, or its disk too slow?"
        )
    return evaluate(None, prompts, endpoints)


def _report(recipe: Recipe, result: Evaluation) -> int:
    print(f"{recipe.model.path} on {recipe.data.eval_file}:")
    if result.accuracy is not None and result.mean_reward is not None:
        means = f"accuracy {result.accuracy:.4f}, mean reward {result.mean_reward:.4f}"
        print(f"  {means} over {result.num_scored} rows")
    for reason, number in result.unscored.items():
        print_text(f"  not scored: {number} rows ({reason})")
    print(f"  {result.num_rows} rows in {result.seconds:.1f} s")
    return FINISHED if result.num_scored else FAILED
