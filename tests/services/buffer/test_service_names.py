"""Two processes under one name: the later one has it, the earlier one is refused and told."""

from __future__ import annotations

import pytest

from tandem.protos.errors import FencedError
from tandem.services.buffer.buffer import Buffer
from tests.support import redis_ring as ring


def test_of_two_services_with_one_name_the_earlier_claims_nothing_more_and_is_told(
    buffer: Buffer, redis_url: str
) -> None:
    ring.offer(buffer, 2)
    for claimed in ring.claim(buffer, "prompts", 2):
        ring.finish(buffer, claimed)
    buffer.register_service(ring.SCORER, "127.0.0.1:2")
    (held,) = ring.claim(buffer, "generated")
    later = Buffer(redis_url, buffer.run_id)
    later.register_service(ring.SCORER, "127.0.0.1:3")
    with pytest.raises(FencedError, match="service reward was replaced by a later start"):
        ring.claim(buffer, "generated")
    assert buffer.heartbeat(ring.SCORER, {}) == "replaced" and later.heartbeat(ring.SCORER, {}) == ""
    assert not ring.finish(buffer, held), "its lease was given back"
    assert all(ring.finish(later, claimed) for claimed in ring.claim(later, "generated", 2))
    generations = buffer.connection.key("generations")
    buffer.connection.redis.hset(generations, ring.SCORER, 1)
    assert later.heartbeat(ring.SCORER, {}) == "", "a Redis that lost the last start replaces nobody"
