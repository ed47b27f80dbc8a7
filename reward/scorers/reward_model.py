"""Reward model: a Hugging Face sequence classifier from a local folder, in its own process and on its own device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.protos.extras import require_installed
from tandem.reward.contracts import Scorer
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority
from tandem.reward.text.judge_text import prompt_of
from tandem.reward.workers.model_batcher import ModelBatcher, Question


class RewardModel(Scorer):
    """The value that a sequence classifier gives to an answer in its conversation: one of the logits.

    With a chat template, prompt and answer are one conversation in it; without, they are the tokenizer's pair of texts.
    Answers of one priority are batched by length, so the last bits of a score may depend on the rest of its batch. The
    folder holds safetensors and needs no code of its own: none is run, and nothing is fetched. A process that hangs or
    dies is replaced, and its batch is tried again one by one, so that only the culprit is unscored (`timeout`,
    `crashed`); a text longer than the model takes is unscored (`limit`).

    Example:
        >>> RewardModel(path="/nowhere")
        Traceback (most recent call last):
        pydantic_core._pydantic_core.ValidationError: 1 validation error for RewardModel
          Value error, path /nowhere is not a folder with a config.json ...
    """

    ISOLATION = "remote"

    path: str
    """Folder with model and tokenizer (`config.json`, `*.safetensors`, `tokenizer.json`, …)."""
    device: str = "auto"
    """The device's name in torch, e.g. `cuda:1`, `cpu`; `auto`: the first visible GPU, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type it computes in; `auto`: the type of the stored weights."""
    label: Annotated[int, Field(ge=0)] = 0
    """Index of the logit that is the score, from 0."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Function applied to the logits first."""
    prompt_field: str = "prompt"
    """Key of `extra_info` with the prompt: text, or chat messages. Empty: the model sees the answer alone."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 16384
    """Maximum number of tokens in one forward pass, with padding; a longer text gets a pass of its own."""
    max_length: Annotated[int, Field(ge=0)] = 0
    """Maximum number of tokens of prompt and answer together; 0: the limit of model and tokenizer."""
    truncate: bool = False
    """Cut the beginning of a longer text (of a pair: of the prompt) and score the rest. Otherwise it is unscored."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Threads that the process computes with on the CPU."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Longest time for one forward pass."""
    startup_seconds: Annotated[float, Field(gt=0.0)] = 300.0
    """Longest time to load the model."""
    _batcher: ModelBatcher = PrivateAttr()

    def model_post_init(self, context: object, /) -> None:
        if not (Path(self.path) / "config.json").is_file():
            raise ValueError(f"path {self.path} is not a folder with a config.json")
        names = ("device", "dtype", "label", "activation", "max_batch_tokens", "max_length", "truncate", "num_threads")
        setup = {name: getattr(self, name) for name in names} | {"path": str(Path(self.path).resolve())}
        self._batcher = ModelBatcher(setup, startup_seconds=self.startup_seconds, timeout_seconds=self.timeout_seconds)

    def start(self) -> None:
        """Loads the model. Raises ScorerError, or EnvironmentLackError if torch or transformers is not installed."""
        require_installed("torch", "transformers")
        self._batcher.start()

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        """One result an item, in order. Thread-safe; blocks its caller."""
        read = [self._question(item) for item in items]
        answers = iter(self._batcher.ask([one for one in read if isinstance(one, Question)], priority))
        return [next(answers) if isinstance(one, Question) else one for one in read]

    def close(self) -> None:
        self._batcher.close()

    def figures(self) -> dict[str, float]:
        """How often the process was started, and the questions that wait now."""
        waiting = {f"reward_model_waiting_{one}": float(self._batcher.waiting(one)) for one in PRIORITIES}
        return {"reward_model_starts": float(self._batcher.num_starts), **waiting}

    def _question(self, item: ScoreItem) -> Question | Unscored:
        if not self.prompt_field:
            return Question(None, item.solution)
        prompt = prompt_of(item, self.prompt_field)
        return prompt if isinstance(prompt, Unscored) else Question(prompt, item.solution)
