"""The remote judges of a service. They are built once and asked by priority, and report figures by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from tandem.protos.contracts import Score, ScoreItem
from tandem.reward.contracts import Closable, RemoteJudge, Startable
from tandem.reward.judging import judge_remotely, wait_aside
from tandem.reward.registry import ScorerSpec
from tandem.reward.rubric.rubric import Rubric
from tandem.reward.scheduling.cancellation import CancellationToken
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority

_THREADS = 32  # per priority; callers wait for a rubric's first remote scorer, these threads for the others


class RemoteJudges:
    """Thread-safe except for `add`, which is called before the first judge is asked."""

    def __init__(self) -> None:
        self._judges: dict[str, RemoteJudge] = {}
        self._names: dict[str, str] = {}
        # One pool per priority, so that jobs cannot use up the threads of the ring.
        self._threads = {priority: ThreadPoolExecutor(_THREADS, f"remote-scorer-{priority}") for priority in PRIORITIES}
        self._closing = False

    def __contains__(self, spec: ScorerSpec) -> bool:
        return spec.key in self._judges

    def add(self, spec: ScorerSpec, name: str, *, start: bool) -> None:
        """Builds and starts a judge. `name` identifies it in figures; a number is appended if the name is taken.

        Raises:
            ScorerError: the judge cannot be started. It is closed with the others.
        """
        taken = set(self._names.values())
        names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 2))]
        self._names[spec.key] = next(one for one in names if one not in taken)
        judge = self._judges[spec.key] = cast(RemoteJudge, spec.build())
        if start and isinstance(judge, Startable):
            judge.start()

    def begin(
        self,
        spec: ScorerSpec,
        items: Sequence[ScoreItem],
        priority: Priority,
        cancellation: CancellationToken,
        *,
        aside: bool,
    ) -> Callable[[], list[Score]]:
        """Returns a function that waits for the scores. With `aside`, another thread asks the judge at once."""
        judge_all = partial(judge_remotely, self._judges[spec.key], items, priority, cancellation, spec.grouped)
        if aside and not self._closing:
            return partial(wait_aside, self._threads[priority].submit(judge_all), cancellation, len(items))
        return judge_all

    def figures(self) -> dict[str, float]:
        """Figures of every judge (spend, requests, waiting), as `figure:name`."""
        figures: dict[str, float] = {}
        for key, judge in list(self._judges.items()):
            read = getattr(judge, "figures", None)
            own: dict[str, float] = read() if read is not None else {}
            figures.update({f"{figure}:{self._names[key]}": number for figure, number in own.items()})
        return figures

    def close(self) -> None:
        """Closes the judges; running items become unscored (`infrastructure`)."""
        self._closing = True
        for judge in list(self._judges.values()):
            if isinstance(judge, Closable):
                judge.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def named_specs(rubric: Rubric, within: str = "") -> Iterator[tuple[str, ScorerSpec]]:
    """Yields the scorers of a rubric with their names in the breakdown; a single scorer with its own name."""
    for component in rubric.components:
        name = within + component.name
        if isinstance(component.source, Rubric):
            yield from named_specs(component.source, f"{name}/")
        else:
            yield name or component.source.scorer, component.source
