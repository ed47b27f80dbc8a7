"""The process of one conformance check of an environment class: `python -m tandem.rollout.environments.conformance`.

It reads the check as one JSON object from standard input. On standard output it writes a JSON object a line: what it is
about to call, and at the end what the check found. An environment that hangs or crashes ends only its own check.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import cast

from tandem.protos.contracts import JsonObject, SnapshotEnvironment
from tandem.rollout.environments.checked_episode import CheckedClass, CheckError, Episode, first_difference, played
from tandem.rollout.environments.inside import checked_final_reward, checked_snapshot, taken_pipes
from tandem.rollout.environments.leaks import growth, held

_SEEDS = (0, 1, 2**31 - 1)
_NUM_CONCURRENT = 8
_CANCELLED_AFTER_SECONDS = (0.0, 0.05)  # 0: as soon as the call waits for anything
_WARMUP_EPISODES = 4
_NUM_EPISODES = 12
_LEAKED = _NUM_EPISODES // 3  # pools of threads and connections may still grow a little
_SETTLE_SECONDS = 2.0  # in which what an environment closed may end


async def _import(checked: CheckedClass, _given: JsonObject) -> JsonObject:
    checked.create()
    return {}


async def _contract(checked: CheckedClass, _given: JsonObject) -> JsonObject:
    environment = checked.create()
    has = [name for name in ("snapshot", "restore") if callable(getattr(environment, name, None))]
    if len(has) == 1:
        raise CheckError(f"the class has {has[0]} alone; a snapshot needs both snapshot and restore")
    _bind(environment.reset, {}, seed=0, episode_id="")
    _bind(environment.step, {}, deadline=0.0, idempotency_key="")
    _bind(environment.close)
    await played(checked)
    if (final_reward := getattr(environment, "final_reward", None)) is not None:
        _bind(final_reward)
        episode = Episode(checked)
        await episode.reset()
        await episode.step()
        await checked.call("final_reward", partial(checked_final_reward, episode.environment))
        await episode.close()
    return {"has_snapshot": bool(has)}


def _bind(method: Callable[..., object], *arguments: object, **named: object) -> None:
    try:
        inspect.signature(method).bind(*arguments, **named)
    except TypeError as error:
        raise CheckError(f"{method.__name__} cannot be called as tandem.Environment says: {error}") from None


async def _determinism(checked: CheckedClass, given: JsonObject) -> JsonObject:
    """`given` may have the observations of another process."""
    observations = await played(checked)
    if difference := first_difference(given.get("observations", observations), observations):
        raise CheckError(f"two processes with the same seed and actions differ: {difference}")
    if difference := first_difference(observations, await played(checked)):
        raise CheckError(f"two episodes with the same seed and actions differ: {difference}")
    return {"observations": observations}


async def _seeds(checked: CheckedClass, _given: JsonObject) -> JsonObject:
    episodes = []
    for seed in _SEEDS:
        try:
            episodes.append(await played(checked, seed))
        except CheckError as error:
            raise CheckError(f"with the seed {seed}, {error}") from None
    different = {json.dumps(observations, sort_keys=True) for observations in episodes}
    return {"note": f"{len(_SEEDS)} seeds, {len(different)} different episodes"}


async def _concurrency(checked: CheckedClass, given: JsonObject) -> JsonObject:
    """`given` says whether episodes may be compared."""
    numbers = range(_NUM_CONCURRENT)
    alone = [await played(checked, number, number) for number in numbers]
    together = await asyncio.gather(*(played(checked, number, number) for number in numbers))
    if not given["deterministic"]:
        return {"note": "without comparison: it is not deterministic"}
    for one, other in zip(alone, together, strict=True):
        if difference := first_difference(one, other):
            raise CheckError(f"an episode alone and one beside {_NUM_CONCURRENT - 1} others differ: {difference}")
    return {}


async def _cancellation(checked: CheckedClass, given: JsonObject) -> JsonObject:
    """`given` says whether episodes may be compared."""
    before = await played(checked)
    for seconds in _CANCELLED_AFTER_SECONDS:
        for method in ("reset", "step"):
            episode = Episode(checked)
            if method == "step":
                await episode.reset()
            await _cancel(checked, method, episode.begin_step if method == "step" else episode.begin_reset, seconds)
            await episode.close(f"close after a cancelled {method}")
    try:
        after = await played(checked)
    except CheckError as error:
        raise CheckError(f"in an episode after cancelled ones, {error}") from None
    if given["deterministic"] and (difference := first_difference(before, after)):
        raise CheckError(f"an episode before and one after cancelled ones differ: {difference}")
    return {}


async def _cancel(checked: CheckedClass, what: str, begin: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Cancels a call under way. It may raise what it likes, but has to end."""

    async def begun() -> None:
        await begin()

    checked.say(f"{what}, to be cancelled")
    task = asyncio.create_task(begun())
    await asyncio.sleep(seconds)
    task.cancel()
    ended, _ = await asyncio.wait([task], timeout=checked.seconds)
    if not ended:
        raise CheckError(f"{what} goes on for {checked.seconds:.3g} s after it was cancelled")
    if not task.cancelled():
        task.exception()  # asyncio would print it, had nobody asked


async def _close(checked: CheckedClass, _given: JsonObject) -> JsonObject:
    """After `reset`, after a step, and at the end."""
    for num_steps in (0, 1, len(checked.actions)):
        episode = Episode(checked)
        await episode.reset()
        while not episode.has_ended and len(episode.observations) <= num_steps:
            await episode.step()
        await episode.close(f"close after {len(episode.observations) - 1} steps")
        await episode.close(f"a second close after {len(episode.observations) - 1} steps")
    return {}


async def _leaks(checked: CheckedClass, _given: JsonObject) -> JsonObject:
    """Every other episode is closed after its first step."""

    async def play(num_episodes: int) -> None:
        for number in range(num_episodes):
            episode = Episode(checked)
            await episode.reset()
            await episode.step()
            if number % 2:
                await episode.play()
            await episode.close()

    await play(_WARMUP_EPISODES)
    before = held()
    await play(_NUM_EPISODES)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (found := growth(before, held(), _LEAKED)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if found:
        raise CheckError(f"after {_NUM_EPISODES} closed episodes there are {found}")
    return {}


async def _snapshot(checked: CheckedClass, _given: JsonObject) -> JsonObject:
    """An episode, and its snapshots after `reset` and after each step but the last."""
    episode, states = Episode(checked), list[str]()
    await episode.reset()
    while not episode.has_ended:
        state = await checked.call("snapshot", partial(checked_snapshot, episode.environment))
        states.append(b64encode(state).decode())
        await episode.step()
    await episode.close()
    return {"observations": episode.observations, "states": states}


async def _restore(checked: CheckedClass, given: JsonObject) -> JsonObject:
    """`given` are the observations and snapshots of another process."""
    for num_steps, state in enumerate(given["states"]):
        episode = Episode(checked)
        environment = cast(SnapshotEnvironment, episode.environment)
        await checked.call("restore", partial(environment.restore, b64decode(state)))
        episode.observations += given["observations"][: num_steps + 1]
        await episode.play()
        await episode.close()
        if difference := first_difference(given["observations"], episode.observations):
            place = f"step {num_steps}" if num_steps else "reset"
            raise CheckError(f"an episode and one restored from its snapshot after {place} differ: {difference}")
    return {}


CHECKS: Mapping[str, Callable[[CheckedClass, JsonObject], Awaitable[JsonObject]]] = {
    "import": _import,
    "contract": _contract,
    "determinism": _determinism,
    "seeds": _seeds,
    "concurrency": _concurrency,
    "cancellation": _cancellation,
    "close": _close,
    "leaks": _leaks,
    "snapshot": _snapshot,
    "restore": _restore,
}
"""By name. Each takes what another check found, and returns what it found. Raises CheckError."""


def main() -> None:
    """Makes the check that standard input names."""
    calls, reply = taken_pipes()

    def write(line: JsonObject) -> None:
        reply.write(json.dumps(line) + "\n")
        reply.flush()

    async def check() -> None:
        request: JsonObject = json.loads(calls.readline())
        try:
            checked = CheckedClass(request, lambda what: write({"at": what}))
            write({"found": await CHECKS[request["check"]](checked, request["given"])})
        except CheckError as error:
            write({"failed": str(error)})

    asyncio.run(check())


if __name__ == "__main__":
    main()
