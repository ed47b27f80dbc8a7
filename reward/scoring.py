"""The scoring core of the service. It scores groups of the ring, calls and jobs by any rubric.

Cheap scorers run in the caller's thread, remote scorers on threads. Scorers that may hang or crash run in one pool of
processes, with a priority per caller. A bad item never raises an error.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from tandem.protos.child_environment import child_environment
from tandem.protos.contracts import Score, Scored, ScoreItem, ScorerInfo, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.answer_faults import AnswerFaults
from tandem.reward.config import RewardConfig
from tandem.reward.contracts import BatchJudge, Judge
from tandem.reward.judging import RemoteJudges, judge_each
from tandem.reward.options.tree import toml_of
from tandem.reward.registry import SCORERS, ScorerSpec, describe
from tandem.reward.rubric.rubric import Catalogue, Rubric
from tandem.reward.scheduling.cancellation import CANCELLED, CancellationToken
from tandem.reward.scheduling.interpreter_scheduler import InterpreterScheduler
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.workers.pool import ScorerPool

MAX_RUBRICS = 256
"""Cached rubrics of clients."""
_MAX_JUDGES = 1024
_REMOTE_GROUPS = 16  # scored at once by the ring if it waits for remote judges

Wait = Callable[[], list[Score]]


class _Caller(NamedTuple):
    priority: Priority
    cancellation: CancellationToken
    scheduler: InterpreterScheduler | None
    settled: Sequence[ScoreItem] | None = None
    rising: bool = True
    """Whether a higher score of the present component raises the reward."""


@dataclass(frozen=True, slots=True)
class CompiledRubric:
    """A checked rubric. `digest` identifies its text together with the versions of its scorers."""

    rubric: Rubric
    text: str
    digest: str
    in_process: bool
    """Whether all its scorers run in the caller's thread."""
    grouped: bool
    """Whether a scorer compares the items of a group, so that a group must be scored in one call."""
    num_callers: int
    """Number of concurrent calls up to which scoring gets faster."""
    sole: Callable[[ScoreItem], Score] | None = None
    """The judge, if the rubric is a single in-process scorer."""


class ScoringCore:
    """Scores items by rubrics. Thread-safe. Starts the processes and judges of the default rubric.

    Construction raises ScorerError if the rubric or a scorer of `[reward]` cannot be used, ConfigError if a variable of
    `reward.environment` is not set.
    """

    def __init__(self, config: RewardConfig, *, start: bool = True) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._pool: ScorerPool | None = None
        self._judge = lru_cache(_MAX_JUDGES)(ScorerSpec.build)
        self._remote = RemoteJudges()
        self._compile = lru_cache(MAX_RUBRICS)(self._compiled_for_client)
        self._scheduler = InterpreterScheduler()
        self._faults = AnswerFaults()
        self._closing = False
        try:
            child_environment(config.environment)  # raises here rather than in a client's call
            self._catalogue = Catalogue.of(config)
            self._clients = replace(self._catalogue, for_clients=True)
            self.default = self._default(start)
        except BaseException:
            self.close()
            raise

    def compile(self, text: str) -> CompiledRubric:
        """Compiles a client's rubric, "" for the default. Cached. Raises ScorerError as `Rubric.parse`."""
        return self._compile(text) if text else self.default

    def score(
        self,
        rubric: CompiledRubric,
        items: Sequence[ScoreItem],
        priority: Priority,
        cancellation: CancellationToken | None = None,
        *,
        at_once: bool = False,
        settled: Sequence[ScoreItem] | None = None,
    ) -> list[Score]:
        """Returns one result per item, in order. Blocks. A bad item raises no error.

        `at_once`: scorers of this process run without waiting for a time slice, for an event loop whose request takes
        only a few milliseconds. A cancelled call returns the existing scores, and `CANCELLED` for the other items. They
        leave every queue; one that a worker has begun may run for another second. Network requests are cancelled.

        `settled`: further answers, which have a score. With it, an answer that is itself at fault for having no score
        gets the worst one (`AnswerFaults`).
        """
        scheduler = None if at_once else self._scheduler
        if rubric.sole is not None:
            return judge_each(rubric.sole, items, priority, cancellation, scheduler)
        if not items:
            return []
        caller = _Caller(priority, cancellation or CancellationToken(), scheduler, settled)
        return self._begin(rubric.rubric, items, caller)()

    def scorers(self) -> list[ScorerInfo]:
        """The scorers that a client's rubric may name: built-in ones that need no recipe, and declared ones."""
        known = describe()
        summaries = {info.name: info.summary for info in known}
        found = [info for info in known if info.isolation != "remote"]
        for name, spec in self._catalogue.declared.items():
            summary = summaries.get(spec.scorer, "A function of the service's recipe.")
            found.append(ScorerInfo(name, spec.version, summary, (), spec.isolation))
        return sorted(found, key=lambda info: info.name)

    @property
    def closing(self) -> bool:
        """Whether `close` was called, which causes later `infrastructure` results."""
        return self._closing

    def figures(self) -> dict[str, float]:
        """Totals since the start and the number of waiting requests."""
        figures = {"workers_replaced": 0.0} if self._pool is None else self._pool.figures()
        return figures | self._remote.figures()

    def close(self) -> None:
        """Ends processes and connections. Running calls return at once; items without a score are `infrastructure`."""
        with self._lock:
            self._closing = True
            pool = self._pool
        if pool is not None:
            pool.close()
        self._remote.close()

    # ---- processes and judges ----

    def _default(self, start: bool) -> CompiledRubric:
        config, place = self._config, "reward"
        if config.rubric:
            place = f"reward.rubric {config.rubric}: "
            text = _read(config.rubric)
            try:
                rubric = Rubric.parse(text, allowed=self._catalogue)
            except ScorerError as error:
                raise ScorerError(f"{place}{error}") from None
        else:
            spec = self._catalogue.spec(config.scorer, config.arguments, place)
            rubric, text = Rubric.alone(spec), _as_rubric(config)
            place = "reward.scorer "
        for name, spec in [*self._catalogue.declared.items(), *rubric.named_specs()]:
            self._prepare(name, spec, start)
        places = {spec: f"reward.scorers.{name}.scorer " for name, spec in self._catalogue.declared.items()}
        for spec, where in {**places, **dict.fromkeys(rubric.specs(), place)}.items():
            try:
                if spec.runs_in_pool:
                    self._get_pool().load(spec)
            except ScorerError as error:
                raise ScorerError(f"{where}{error}") from None
        return self._compiled(rubric, text)

    def _compiled_for_client(self, text: str) -> CompiledRubric:
        made = self._compiled(Rubric.parse(text, allowed=self._clients), text)
        for name, spec in made.rubric.named_specs():
            self._prepare(name, spec)
        return made

    def _prepare(self, name: str, spec: ScorerSpec, start: bool = True) -> None:
        """Builds in-process and remote judges, and the pool if needed. The name is used in figures."""
        if spec.runs_in_pool:
            self._get_pool()
        elif spec.isolation == "remote":
            if spec not in self._remote:  # a client's rubric names only declared ones, which exist already
                self._remote.add(spec, name, start)
        else:
            self._judge(spec)

    def _get_pool(self) -> ScorerPool:
        with self._lock:
            if self._pool is None:
                self._pool = ScorerPool(self._config)
                if self._closing:
                    self._pool.close()
            return self._pool

    def _compiled(self, rubric: Rubric, text: str) -> CompiledRubric:
        specs = rubric.specs()
        in_process = all(spec.isolation == "in_process" for spec in specs)
        remote = any(spec.isolation == "remote" for spec in specs)
        sole = None
        if in_process and len(rubric.components) == 1 and not rubric.components[0].name:
            judge = self._judge(specs[0])
            sole = judge.judge if isinstance(judge, Judge) and not isinstance(judge, BatchJudge) else None
        versions = "\n".join([text, *(f"{spec.version} {spec.key}" for spec in specs)])
        return CompiledRubric(
            rubric=rubric,
            text=text,
            digest=hashlib.sha256(versions.encode(errors="surrogatepass")).hexdigest(),
            in_process=in_process,
            grouped=any(spec.grouped for spec in specs),
            num_callers=1 if in_process else max(self._config.num_workers, _REMOTE_GROUPS if remote else 1),
            sole=sole,
        )

    # ---- scoring ----

    def _begin(self, rubric: Rubric, items: Sequence[ScoreItem], caller: _Caller) -> Wait:
        """Starts the first stage. The returned function runs the other stages and returns the scores."""
        components, stages = rubric.components, rubric.stages()
        columns: list[list[Score | None]] = [[None] * len(items) for _ in components]
        started = self._begin_stage(rubric, stages[0], range(len(items)), items, caller)

        def finish() -> list[Score]:
            running, undecided = started, list(range(len(items)))
            for number, stage in enumerate(stages):
                if number:
                    running = self._begin_stage(rubric, stage, undecided, items, caller)
                for component, numbers, wait in running:
                    for place, score in zip(numbers, wait(), strict=True):
                        columns[component][place] = score
                if number + 1 < len(stages):
                    undecided = [n for n in undecided if not _is_over(rubric, stage, [column[n] for column in columns])]
            # An item whose judge was cancelled has no score, even if the judge was optional.
            cut = caller.cancellation.cancelled
            return [
                CANCELLED
                if cut and any(score is CANCELLED for score in scores)
                else rubric.combine(scores, item.data_source)
                for item, scores in zip(items, zip(*columns, strict=True), strict=True)
            ]

        return finish

    def _begin_stage(
        self, rubric: Rubric, stage: Sequence[int], rows: Sequence[int], items: Sequence[ScoreItem], caller: _Caller
    ) -> list[tuple[int, Sequence[int], Wait]]:
        running, remote = [], 0
        for number in stage:
            component = rubric.components[number]
            numbers = rows
            if component.data_sources is not None:
                fits = {source: component.applies(source) for source in {items[n].data_source for n in rows}}
                numbers = [n for n in rows if fits[items[n].data_source]]
            if not numbers:
                continue
            part = items if len(numbers) == len(items) else [items[n] for n in numbers]
            source = component.source
            own = caller._replace(rising=caller.rising == component.rising)
            if isinstance(source, Rubric):
                wait = self._begin(source, part, own)
            else:
                remote += source.isolation == "remote"
                wait = self._begin_scorer(source, part, caller, aside=remote > 1)
                if caller.settled is not None and source.isolation != "in_process" and not source.grouped:
                    wait = partial(self._decided, source, part, own, wait)
            running.append((number, numbers, wait))
        return running

    def _begin_scorer(self, spec: ScorerSpec, items: Sequence[ScoreItem], caller: _Caller, aside: bool) -> Wait:
        priority, cancellation, scheduler, *_ = caller
        if spec.runs_in_pool:
            pool = self._get_pool()
            request = pool.submit(spec, items, priority)

            def wait_in_pool() -> list[Score]:
                with cancellation.on_cancel(partial(pool.withdraw, request)):
                    return request.wait()

            return wait_in_pool
        if spec.isolation == "remote":
            return self._remote.begin(spec, items, priority, cancellation, aside)
        judge = self._judge(spec)
        if not isinstance(judge, BatchJudge):
            return partial(judge_each, judge.judge, items, priority, cancellation, scheduler)
        judge_all = judge.judge_batch  # it compares the items: all in one time slice
        if scheduler is None:
            return partial(judge_all, items)
        return lambda: scheduler.run_each(priority, judge_all, [items])[0]

    def _decided(self, spec: ScorerSpec, items: Sequence[ScoreItem], caller: _Caller, wait: Wait) -> list[Score]:
        def ask(again: Sequence[ScoreItem]) -> list[Score]:
            if not spec.runs_in_pool:
                return self._remote.begin(spec, again, caller.priority, caller.cancellation, False)()
            pool = self._get_pool()
            requests = [pool.submit(spec, [item], caller.priority, fresh=True) for item in again]
            return [score for request in requests for score in request.wait()]

        outside = not spec.runs_in_pool or spec.scorer not in SCORERS
        settled = caller.settled or ()
        return self._faults.decide(spec.key, items, wait(), ask, settled=settled, outside=outside, rising=caller.rising)


def validate(config: RewardConfig, of_evaluation: Mapping[str, str] | None = None) -> Rubric:
    """The rubric. Raises as `ScoringCore`. Imports user code in a worker process and starts no remote judge. Checks the
    rubrics that evaluation sets send, too, by the name of the set.
    """
    core = ScoringCore(config.model_copy(update={"num_workers": 1}), start=False)
    core.close()
    for name, text in (of_evaluation or {}).items():
        try:
            Rubric.parse(text, allowed=replace(Catalogue.of(config), for_clients=True))
        except ScorerError as error:
            raise ScorerError(f"evaluation set {name}: {error}") from None
    return core.default.rubric


def _is_over(rubric: Rubric, stage: Sequence[int], scores: Sequence[Score | None]) -> bool:
    """Whether the item's score is decided, so that later stages can skip it."""
    for number in stage:
        component, score = rubric.components[number], scores[number]
        if isinstance(score, Unscored) and not component.optional:
            return True
        if component.gate and isinstance(score, Scored) and component.normalised(score.value) < component.pass_at:
            return True
    return False


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScorerError(f"reward.rubric {file}: no such file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise ScorerError(f"reward.rubric {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScorerError(f"reward.rubric {file} is not text; a rubric is a TOML file") from None


def _as_rubric(config: RewardConfig) -> str:
    arguments = f"arguments = {toml_of(config.arguments)}\n" if config.arguments else ""
    return f"[[components]]\nscorer = {toml_of(config.scorer)}\n{arguments}"
