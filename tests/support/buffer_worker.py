"""A worker for the ledger's tests: it completes claims, stalls, gives up, saves half its work, or dies with a lease."""

from __future__ import annotations

import os
import random
import time

from tandem.protos.errors import NotAdmittedError
from tandem.services.buffer.buffer import Buffer, Claim, Stage
from tandem.services.process import die_with_parent

LEASE_SECONDS = 0.6


def work(buffer: Buffer, claim: Claim, acknowledgements: int, chance: random.Random) -> None:
    dice = chance.random()
    if dice < 0.02:
        os._exit(9)
    if dice < 0.06:
        time.sleep(1.2 * LEASE_SECONDS)  # past the lease: the group is claimed again or this result is refused
    elif dice < 0.16:
        buffer.release(claim, "tired", chance.choice(["voluntary", "infrastructure"]))
        return
    elif dice < 0.3:
        buffer.renew([claim], LEASE_SECONDS, {claim.token: b"half of " + claim.group_id.encode()})
        if dice < 0.18:
            os._exit(9)
    assert claim.partial in (None, b"half of " + claim.group_id.encode())
    headers = "[]" if claim.stage == "generated" else ""
    if buffer.complete(claim, f"{claim.stage} {claim.group_id}".encode(), headers):
        os.write(acknowledgements, f"{claim.stage} {claim.group_id}\n".encode())


def main(stage: Stage, url: str, run_id: str, name: str, acknowledgement_file: str) -> None:
    """Works until killed. Appends "<stage> <group id>" to the file for every result that the buffer acknowledged."""
    die_with_parent()
    acknowledgements = os.open(acknowledgement_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    buffer = Buffer(url, run_id)
    if stage == "prompts":
        buffer.register_sampler(name, "127.0.0.1:1", 1)
    else:
        buffer.register_service(name, "127.0.0.1:1")
    chance = random.Random()
    while True:
        try:
            claims = buffer.claim(stage, name, 3, LEASE_SECONDS, 0.5)
        except NotAdmittedError:
            time.sleep(0.02)
            continue
        for claim in claims:
            work(buffer, claim, acknowledgements, chance)
