"""The recipe: one TOML file per run with a section for each component. Imports neither torch, vllm, grpc nor redis."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from tandem.protos.errors import ConfigError
from tandem.protos.options import Options
from tandem.protos.secret_values import masked
from tandem.reward.config import RewardConfig
from tandem.reward.options.tree import shape_at
from tandem.rollout.config import RolloutConfig
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.services.config.eval_sets import EvalConfig, EvalSet, check_metric, check_sets
from tandem.services.config.other_names import explain
from tandem.services.config.overrides import apply_overrides, as_table, selects_another
from tandem.trainer.config import SftConfig, TrainerConfig, WeightsConfig

_MOST_MASK_IDS = 2**31 - 1  # what Arrow counts in a record


class RunConfig(Options):
    """`[run]`: name, folder and length of the run, and how far sampling may run ahead of training."""

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
    """Name of the run, part of each of its Redis keys and of the default folder."""
    folder: str = ""
    """Folder for all files of the run; default `runs/<run_id>`."""
    seed: int = 0
    """Seed of shuffling, sampling and initialisation."""
    total_batches: Annotated[int, Field(ge=1)] = 100
    """Policy versions to train."""
    groups_per_batch: Annotated[int, Field(ge=1)] = 32
    """P: groups per batch."""
    staleness_budget: Annotated[int, Field(ge=0)] = 2
    """S: batches that sampling may run ahead of training. 0 is synchronous training."""
    hard_staleness_cap: Annotated[int, Field(ge=0)] = 0
    """Groups older than this many versions are dropped when they are claimed; 0 turns this off."""
    keep_batches: Annotated[int, Field(ge=0)] = 0
    """Records of trained batches (`batches/`), and of what was rejected for them (`rejected/`), that are kept besides
    those that a kept checkpoint needs; 0 keeps all. Older ones are removed at the next checkpoint, and `tandem replay`
    then begins at a checkpoint.
    """
    max_consecutive_drops: Annotated[int, Field(ge=0)] = 64
    """The run stops once this many groups in a row could not be sampled or scored, e.g. because the scorer always
    raises; 0 turns this off.
    """
    redis_url: str = ""
    """`redis://…` or `unix://…`; default: `TANDEM_REDIS_URL`, else an embedded server in the run folder."""
    redis_outage_seconds: Annotated[float, Field(ge=0.0)] = 300.0
    """How long the services wait for a Redis that does not answer, loads its data or fails over; then the run ends.
    Several trainer ranks wait no longer than trainer.collective_timeout_seconds.
    """
    host: str = "127.0.0.1"
    """Address on which the services listen. `auto`: the address from which the service's machine reaches Redis."""
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the controller; 0 picks a free one. `tandem status RUN` finds it by itself on the run's machine."""
    certificates: str = ""
    """Folder written by `tandem certs init`: the services then talk TLS, and take calls only with a certificate of the
    folder's CA.
    """
    server_name: str = ""
    """Name that the services' certificate has to have, where it does not name their addresses, e.g. `localhost`.
    Default: the host of the address.
    """
    insecure: bool = False
    """Listen on a host other than loopback without certificates."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Experiment trackers besides TensorBoard: `wandb` is Weights & Biases."""
    metrics_port: Annotated[int, Field(ge=0, le=60000)] = 0
    """Lowest of the ports on which the services answer Prometheus; 0 turns this off (docs/metrics.md)."""

    @model_validator(mode="before")
    @classmethod
    def _default_folder(cls, values: object) -> object:
        if isinstance(values, dict) and not values.get("folder") and values.get("run_id"):
            return {**values, "folder": f"runs/{values['run_id']}"}
        return values


class ModelConfig(Options):
    """`[model]`: the policy."""

    path: str
    """Hugging Face folder, or hub name if a hub can be reached, of a causal language model with its tokenizer."""
    chat_template: str = ""
    """File with a Jinja chat template; default: the tokenizer's template."""


class TrainFile(Options):
    """One of several training files."""

    path: str
    """Parquet or JSON lines."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Times that an epoch reads this file. With 0.5, an epoch takes half of the rows and the next epoch the others."""


class DataConfig(Options):
    """`[data]`: Parquet or JSON lines in verl's or TRL's columns."""

    train_file: str = ""
    """Prompts to train on."""
    train: tuple[TrainFile, ...] = ()
    """Several training files instead of train_file: `train = [{ path = "a.parquet", weight = 2.0 }, …]`."""
    eval_file: str = ""
    """Prompts to evaluate on, one greedy answer each; `eval.sets` has more choices."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longer prompts are dropped and counted."""
    max_epochs: Annotated[int, Field(ge=0)] = 0
    """Maximum number of passes over the data; 0 means no limit."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, depending on the seed."""

    @property
    def train_files(self) -> tuple[TrainFile, ...]:
        """The training files, from `train` or `train_file`."""
        return self.train or (TrainFile(path=self.train_file),)


class JobsConfig(Options):
    """`[jobs]`: where the reward jobs of clients are kept, for how long, and how many bytes of them."""

    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """Services with the same namespace on one Redis share their jobs. Default: the run's id, or `reward` for a
    standalone service.
    """
    max_unscored_bytes: Annotated[int, Field(ge=1 << 25)] = 1 << 28
    """Bytes of items that wait for a score; above this limit, submission waits. One job may use half of it."""
    max_result_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of results that are kept; above this limit, ended jobs lose their results (`expired`), in the order in
    which they ended. One job may use half of it. 0: twice max_unscored_bytes.
    """
    retention_seconds: Annotated[float, Field(gt=0.0)] = 604800.0
    """Time for which the results of an ended job are kept; then the job and its idempotency key are deleted."""

    @property
    def result_bytes(self) -> int:
        """`max_result_bytes`, or its default."""
        return self.max_result_bytes or 2 * self.max_unscored_bytes

    @property
    def redis_bytes(self) -> int:
        """Bytes that jobs may take in Redis: waiting items and kept results."""
        return self.max_unscored_bytes + self.result_bytes

    def in_namespace(self, default: str) -> JobsConfig:
        """A copy with the default namespace filled in."""
        return self.model_copy(update={"namespace": self.namespace or default})


class AutoscaleConfig(Options):
    """`[autoscale]`: how many samplers and reward services a running run has, decided from how long its trainer waits.
    docs/scaling.md explains the rules.
    """

    mode: Literal["off", "dry_run", "on"] = "off"
    """`on` changes the number of replicas; `dry_run` only says what it would do."""
    min_samplers: Annotated[int, Field(ge=1)] = 1
    """Fewest samplers."""
    max_samplers: Annotated[int, Field(ge=0)] = 0
    """Most samplers; must be given unless the mode is `off`."""
    max_scorers: Annotated[int, Field(ge=1)] = 1
    """Most reward services. With 1, there is always one."""
    trainer_idle: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Samplers are added while the trainer waits for scored groups for a larger fraction of its time. They are removed
    only while it waits for less than half of this fraction.
    """
    sampler_idle: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """Samplers are removed while all credits are taken and they are idle for more than this fraction of their time."""
    cooldown_seconds: Annotated[float, Field(ge=0.0)] = 120.0
    """Shortest time between two changes."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> AutoscaleConfig:
        if self.mode != "off" and not self.max_samplers:
            raise ValueError("max_samplers is missing: the autoscaler needs to know how many samplers it may start")
        if self.max_samplers and self.max_samplers < self.min_samplers:
            raise ValueError("max_samplers is below min_samplers")
        return self


class ServiceConfig(Options):
    """Configuration of `tandem reward serve`: the sections of a recipe that concern scoring."""

    reward: RewardConfig = RewardConfig()
    jobs: JobsConfig = JobsConfig()


class Recipe(Options):
    """The whole configuration of a run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    jobs: JobsConfig = JobsConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    sft: SftConfig = SftConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    @property
    def weights_folder(self) -> Path:
        """Where the trainer writes versions and samplers read them, with `weights.backend = "disk"`."""
        return self.folder / "weights"

    @property
    def max_model_tokens(self) -> int:
        """The longest possible prompt and response together."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def rows_per_group(self) -> int:
        """Trajectories per prompt: n samples, and a greedy answer if the advantage estimator needs one."""
        return self.rollout.samples_per_prompt + self.trainer.needs_baselines

    @property
    def credits(self) -> int:
        """(S + 1)·P: maximum number of outstanding groups."""
        return (self.run.staleness_budget + 1) * self.run.groups_per_batch

    @property
    def checkpoint_every(self) -> int:
        """Batches between two checkpoints: `trainer.checkpoint_every`, or its default."""
        return self.trainer.checkpoint_every or min(50, max(10, self.run.total_batches // 20))

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """All evaluation sets with their defaults filled in, that of `data.eval_file` first."""
        short = (EvalSet(file=self.data.eval_file),) if self.data.eval_file else ()
        return tuple(one.filled(self.trainer.evaluate_every, self.rollout) for one in (*short, *self.eval.sets))

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        if not self.data.train_file and not self.data.train:
            raise ValueError("data.train_file is missing")
        if self.data.train_file and self.data.train:
            raise ValueError("data.train_file and data.train exclude each other; give one of them")
        if self.reward.min_scored_samples > self.rollout.samples_per_prompt:
            raise ValueError("reward.min_scored_samples is above rollout.samples_per_prompt")
        if self.trainer.tokens_per_micro_batch < self.max_model_tokens:
            raise ValueError(
                "trainer.tokens_per_micro_batch is below data.max_prompt_tokens + rollout.max_response_tokens "
                f"({self.max_model_tokens}): one sequence must fit"
            )
        if self.trainer.optimizer_steps_per_batch > self.run.groups_per_batch:
            raise ValueError("trainer.optimizer_steps_per_batch is above run.groups_per_batch")
        per_prompt = self.rollout.samples_per_prompt * self.rollout.max_response_tokens * self.rollout.top_k
        if self.run.groups_per_batch * per_prompt > _MOST_MASK_IDS:
            raise ValueError(
                "a batch could have more than 2³¹ token ids in its sampling masks: groups_per_batch × "
                "samples_per_prompt × max_response_tokens × rollout.top_k; lower rollout.top_k"
            )
        self._check_encoding()
        num_ranks = self.trainer.num_ranks * self.trainer.num_nodes
        self.weights.check_deadline(num_ranks, self.trainer.collective_timeout_seconds)
        scorer = "" if self.reward.rubric else self.reward.scorer
        check_sets(self.eval_sets, self.rollout.max_response_tokens, self.environment, scorer)
        check_metric(self.eval.keep_best, self.eval_sets)
        self.trainer.check_sampling(
            samples_per_prompt=self.rollout.samples_per_prompt,
            min_scored_samples=self.reward.min_scored_samples,
            max_response_tokens=self.rollout.max_response_tokens,
        )
        return self

    def _check_encoding(self) -> None:
        if self.weights.encoding == "full":
            return
        if self.weights.backend != "gloo":
            raise ValueError(
                f'weights.encoding "delta" needs weights.backend "gloo", not "{self.weights.backend}"; '
                'set weights.encoding to "full"'
            )
        lora = self.trainer.lora
        if lora is not None and lora.broadcast == "adapter":
            raise ValueError(
                'weights.encoding "delta" is for whole weights, and trainer.lora.broadcast is "adapter"; '
                'set weights.encoding to "full"'
            )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Loads a recipe (TOML or config.json) over its `base`, with dotted overrides. Raises a one-line ConfigError."""
    file = Path(path)
    values = read_values(file)
    apply_overrides(values, overrides, Recipe)
    return parse_recipe(values, source=str(file))


def load_service_config(path: str | Path | None, overrides: Sequence[str] = ()) -> ServiceConfig:
    """Loads the configuration of a standalone reward service; raises ConfigError as `load_recipe` does."""
    values = read_values(Path(path), ServiceConfig) if path is not None else {}
    apply_overrides(values, overrides, ServiceConfig)
    try:
        return ServiceConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path or 'overrides'}: {explain(ServiceConfig, error)}") from None


def read_values(file: Path, root: type[BaseModel] = Recipe, *, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads the values of a TOML or JSON file, merged over those of its `base`, a path relative to the file.

    `above` holds the files that led to this one. Raises ConfigError if a file is missing or malformed, or the bases
    form a cycle.
    """
    via = "".join(f" (base of {one})" for one in above[-1:])
    values = _read_file(file, f"recipe {file}{via}", "see examples/recipes for some to start from")
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str) or not base or "\0" in base:
        raise ConfigError(f'recipe {file}: base: should be the path of another recipe, e.g. base = "gsm8k.toml"')
    chain = (*above, file)
    target = file.parent / base
    if target.resolve() in {one.resolve() for one in chain}:
        names = " -> ".join(one.name for one in (*chain, target))
        raise ConfigError(f"recipe {chain[0]}: its bases form a cycle ({names}); take one `base` line out")
    return _merged(read_values(target, root, above=chain), values, root)


def _merged(
    base: Mapping[str, object], values: Mapping[str, object], root: type[BaseModel], path: tuple[str, ...] = ()
) -> dict[str, object]:
    """Merges `values` over `base`, table by table. As with overrides, selecting another table discards the old one."""
    merged = dict(base)
    for key, value in values.items():
        shape = shape_at(root, (*path, key))
        if shape is None or not shape.is_table or not isinstance(value, dict):
            merged[key] = value
            continue
        below = as_table(merged.get(key), shape)
        name = shape.naming_key
        if not isinstance(below, dict) or (name in value and selects_another(below, shape, value[name])):
            below = {}
        merged[key] = _merged(below, value, root, (*path, key))
    return merged


def _read_file(file: Path, name: str, if_missing: str) -> dict[str, object]:
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file; {if_missing}") from None
    except IsADirectoryError:
        raise ConfigError(f"{name} is a folder; name the TOML file inside it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not text; a recipe is a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    except OSError as error:  # e.g. permission denied, a parent that is no folder, a name too long
        raise ConfigError(f"{name} cannot be read ({error.strerror}); mend that, or name another file") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is not a JSON object; name the config.json of a run")
    return values


def parse_recipe(values: Mapping[str, object], source: str = "recipe") -> Recipe:
    """Builds a recipe from nested values. Raises a one-line ConfigError with the first fault, its place and remedy."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(Recipe, error)}") from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as JSON text for `load_resolved`."""
    return json.dumps(recipe.model_dump(mode="json"), indent=2) + "\n"


def without_secrets(recipe: Recipe) -> Recipe:
    """The recipe with its passwords and keys masked, to be shown."""
    return Recipe.model_validate(masked(recipe.model_dump(mode="json")))


def load_resolved(path: str | Path) -> Recipe:
    """Loads the recipe that a run saved as `config.json`."""
    file = Path(path)
    return parse_recipe(_read_file(file, str(file), f"is {file.parent} a run folder?"), source=str(file))
