"""Arguments and replies of the buffer's scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import cast

from tandem.protos.errors import DataError
from tandem.services.buffer.types import Sampler, SamplerState

_GROUP_ID = re.compile(r"[0-9]+-[0-9]+")
_MAX_INDEX = 2**32  # a group's index is the position of a bit in a Redis string
_MAX_REASON = 64


def checked_ids(group_ids: Iterable[str]) -> list[str]:
    """Returns the ids as a list. Raises DataError for an id that is not "<epoch>-<index>" with an index below 2³²."""
    checked = list(group_ids)
    for group_id in checked:
        if not _GROUP_ID.fullmatch(group_id) or int(group_id.partition("-")[2]) >= _MAX_INDEX:
            raise DataError(f"group id {group_id!r} is not <epoch>-<index> with an index below {_MAX_INDEX}")
    return checked


def checked_reason(reason: str) -> str:
    """Checks that the reason of a drop or release is short, because each reason has a counter."""
    assert 0 < len(reason) <= _MAX_REASON, f"a reason is a name of at most {_MAX_REASON} characters, got {reason!r}"
    return reason


def with_generations(samplers: Sequence[str | Sampler]) -> list[str | int]:
    """Returns id and generation of each sampler. The scripts do not check the generation '' of a plain id."""
    pairs = [(each.id, each.generation) if isinstance(each, Sampler) else (each, "") for each in samplers]
    return [value for pair in pairs for value in pair]


def sampler_of(name: bytes, address: bytes, state: bytes, *numbers: bytes) -> Sampler:
    """Returns the sampler of a row of `samplers_alive`."""
    version, incarnation, tensor_parallel_size, alive, generation, num_starts = map(int, numbers)
    texts = (name.decode(), address.decode(), cast("SamplerState", state.decode()))
    return Sampler(*texts, version, incarnation, tensor_parallel_size, alive == 1, generation, num_starts)


def rows(reply: Sequence[bytes], width: int) -> list[Sequence[bytes]]:
    """Returns a flat reply as rows of so many values."""
    return [reply[first : first + width] for first in range(0, len(reply), width)]
