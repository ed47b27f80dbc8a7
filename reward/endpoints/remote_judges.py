"""The judges of a service that wait for others: built once, asked by priority, told apart in what they report."""

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

_THREADS = 32  # of each priority, that wait for a second remote scorer of one rubric; the first has the caller's


class RemoteJudges:
    """Thread-safe, but for `add`: all are there before the first is asked."""

    def __init__(self) -> None:
        self._judges: dict[str, RemoteJudge] = {}
        self._names: dict[str, str] = {}
        # By priority: threads that wait for the answers of jobs are none that the ring could need.
        self._threads = {priority: ThreadPoolExecutor(_THREADS, f"remote-scorer-{priority}") for priority in PRIORITIES}
        self._closing = False

    def __contains__(self, spec: ScorerSpec) -> bool:
        return spec.key in self._judges

    def add(self, spec: ScorerSpec, name: str, *, start: bool) -> None:
        """Builds and starts a judge. `name` tells its figures from those of others; if it is taken, a number is added
        to it.

        Raises:
            ScorerError: it cannot be started. It is closed with the others.
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
        """What waits for the scores. `aside`: another thread begins to wait for them now."""
        judge_all = partial(judge_remotely, self._judges[spec.key], items, priority, cancellation, spec.grouped)
        if aside and not self._closing:
            return partial(wait_aside, self._threads[priority].submit(judge_all), cancellation, len(items))
        return judge_all

    def figures(self) -> dict[str, float]:
        """What each says of itself (spend, requests, who waits), as `figure:name`."""
        figures: dict[str, float] = {}
        for key, judge in list(self._judges.items()):
            read = getattr(judge, "figures", None)
            own: dict[str, float] = read() if read is not None else {}
            figures.update({f"{figure}:{self._names[key]}": number for figure, number in own.items()})
        return figures

    def close(self) -> None:
        """Ends what they hold; what is under way comes back unscored (`infrastructure`)."""
        self._closing = True
        for judge in list(self._judges.values()):
            if isinstance(judge, Closable):
                judge.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def named_specs(rubric: Rubric, within: str = "") -> Iterator[tuple[str, ScorerSpec]]:
    """The scorers of a rubric under the names that the breakdown has for them; a scorer alone under its own."""
    for component in rubric.components:
        name = within + component.name
        if isinstance(component.source, Rubric):
            yield from named_specs(component.source, f"{name}/")
        else:
            yield name or component.source.scorer, component.source
