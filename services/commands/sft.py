"""`tandem sft`: a supervised warm start on a dataset with verl's columns, validated by the recipe's scorer."""

from __future__ import annotations

import time
from pathlib import Path

from tandem.protos.contracts import Scored, ScoreItem
from tandem.protos.errors import ConfigError, DataError, EnvironmentLackError
from tandem.reward.scoring import ScoringCore
from tandem.services.config import Recipe
from tandem.services.data.chat import ChatEncoder, RefusedPromptError, load_tokenizer
from tandem.services.data.dataset import Dataset, RowFault, load_prompts
from tandem.trainer.checkpoints.durable import begin_folder
from tandem.trainer.sft import SftRow, Validate, sample_answers, train_sft


def main(recipe: Recipe) -> int:
    """Trains `model.path` as `[sft]` says, and prints the figures. Returns the exit code.

    Raises UserError if a key is missing, the output cannot be written, or no row can be used.
    """
    for key in ("train_file", "output"):
        if not getattr(recipe.sft, key):
            raise ConfigError(f"sft.{key} is empty; `tandem sft` needs it")
    has_answers = bool(recipe.data.eval_file) and not recipe.environment.path  # else single answers earn nothing
    if recipe.sft.target_accuracy and not has_answers:
        raise ConfigError("sft.target_accuracy needs data.eval_file to be measured on, without an environment")
    _check_output(Path(recipe.sft.output))
    rows = _load_rows(recipe)
    core = ScoringCore(recipe.reward)
    try:
        validate = _validation(recipe, core) if has_answers else None
        result = train_sft(rows, recipe.model.path, recipe.sft, recipe.run.seed, validate)
    finally:
        core.close()
    reached = "" if result.accuracy is None else f", sampled accuracy {result.accuracy:.3f}"
    print(
        f"sft: {result.steps} steps, loss {result.loss:.4f}{reached}; the model is in {recipe.sft.output}", flush=True
    )
    if result.accuracy is not None and result.accuracy < recipe.sft.target_accuracy:
        missed = f"the target {recipe.sft.target_accuracy} was not reached"
        print(f"sft: {missed} within sft.max_steps = {recipe.sft.max_steps}", flush=True)
        return 1
    return 0


def _check_output(output: Path) -> None:
    """Checks the output. A model is not replaced, since runs that started from it could not be replayed."""
    empty = output.is_dir() and not any(output.iterdir())
    if output.exists() and not empty:
        raise ConfigError(f"sft.output: {output} is there already; move it away, or choose another sft.output")
    try:
        begin_folder(output).rmdir()
    except OSError as error:
        fault = f"sft.output: {output} cannot be written ({error.strerror})"
        raise EnvironmentLackError(f"{fault}; mend that, or choose another sft.output") from None


def _load_rows(recipe: Recipe) -> list[SftRow]:
    encoder = ChatEncoder(recipe.model.path, recipe.model.chat_template)
    tokenizer = load_tokenizer(recipe.model.path)
    file, dataset = recipe.sft.train_file, Dataset(recipe.sft.train_file)
    rows: list[SftRow] = []
    for row in dataset:
        if isinstance(row, RowFault):
            continue
        try:
            prompt_ids = encoder.encode(row.messages).tolist()
        except RefusedPromptError:
            continue
        answer = str(row.extra_info.get("answer") or row.ground_truth)
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        if len(prompt_ids) <= recipe.data.max_prompt_tokens and len(answer_ids) <= recipe.rollout.max_response_tokens:
            rows.append(SftRow(prompt_ids, answer_ids))
    if skipped := len(dataset) - len(rows):
        print(f"sft: {skipped} of {len(dataset)} rows of {file} skipped: too long, or see `tandem data check`")
    if not rows:
        raise DataError(f"{file} holds no row to imitate")
    return rows


def _validation(recipe: Recipe, core: ScoringCore) -> Validate:
    """Samples at the recipe's temperature, as reinforcement learning does, and scores with the recipe's scorer."""
    prompts, faults = load_prompts(recipe.data.eval_file, recipe, limit=recipe.sft.validation_rows)
    if faults:
        print(f"sft: validation file {recipe.data.eval_file}: rows skipped: {dict(faults)}", flush=True)
    tokenizer = load_tokenizer(recipe.model.path)
    started = time.monotonic()

    def validate(model: object, step: int, loss: float) -> float:
        answers = sample_answers(
            model,
            [prompt.token_ids.tolist() for prompt in prompts],
            max_tokens=recipe.rollout.max_response_tokens,
            temperature=recipe.rollout.temperature,
            seed=recipe.run.seed,
            end_ids=[tokenizer.eos_token_id],
        )
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        items = [
            ScoreItem(prompt.data_source, text, prompt.ground_truth, prompt.judged_info(len(answer)))
            for prompt, text, answer in zip(prompts, texts, answers, strict=True)
        ]
        scores = core.score(core.default, items, "calls")
        rewards = [score.value for score in scores if isinstance(score, Scored)]
        accuracy = sum(value >= 1.0 for value in rewards) / len(rewards) if rewards else 0.0
        unscored = f" ({len(scores) - len(rewards)} unscored)" if len(rewards) < len(scores) else ""
        figures = f"step {step}  loss {loss:.3f}  sampled accuracy {accuracy:.3f}{unscored}"
        print(f"sft: {figures}  {time.monotonic() - started:.0f} s", flush=True)
        return accuracy

    return validate
