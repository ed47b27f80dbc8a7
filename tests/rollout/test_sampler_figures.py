"""The seconds that a sampler reports as busy and as idle."""

import asyncio
from itertools import pairwise
from typing import Any, cast

from tandem.protos.types import SamplingParameters
from tandem.rollout.sampler import Completion, Sampler, SamplingRequest, Tokenizer


class OneTokenEngine(Sampler):
    """Answers with one token after the event loop has turned a few times."""

    is_dead = False

    async def check(self) -> None: ...

    def close(self) -> None: ...

    async def _generate(self, request: SamplingRequest) -> Completion:
        for _ in range(50):
            await asyncio.sleep(0)
        return Completion([1], [0.0], [], "stop")

    async def _sampled_so_far(self, request_ids: Any) -> Any: ...

    async def _start_transfer(self, kind: Any, arguments: Any) -> None: ...

    async def _transfer_progress(self, version: Any) -> Any: ...


class Words:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def test_busy_and_idle_seconds_never_fall_and_one_of_them_stands_still() -> None:
    asyncio.run(_read_figures_during_a_request())


async def _read_figures_during_a_request() -> None:
    engine = OneTokenEngine(cast(Tokenizer, Words()), max_model_tokens=8, seed=0)
    seen = [engine.figures()]
    request = asyncio.create_task(engine.sample_one([1, 2], SamplingParameters(max_tokens=1), trajectory_id=0))
    await asyncio.sleep(0)  # the request is in flight
    while not request.done():
        seen.append(engine.figures())
        await asyncio.sleep(0)
    busy = [one.busy_seconds for one in seen[1:]]
    assert len(busy) > 40 and all(earlier < later for earlier, later in pairwise(busy))
    assert len({one.idle_seconds for one in seen[1:-1]}) == 1, "a request is in flight"
    after = [engine.figures() for _ in range(3)]
    assert len({one.busy_seconds for one in after}) == 1, "nothing is in flight"
    idle = [one.idle_seconds for one in (*seen, *after)]
    assert idle == sorted(idle) and idle[-1] > idle[0]
