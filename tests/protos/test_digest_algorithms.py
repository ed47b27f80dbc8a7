"""Versions that were sent from a GPU's memory, with the digests of that, reach a late joiner over gloo."""

from __future__ import annotations

from tandem.protos.manifest import weights_digest
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.weight_sender import WeightSender
from tests.support.memory_store import IN_MEMORY
from tests.support.weight_pair import CPU, TIMEOUT, Pair, Tensors, equal, error


def test_a_late_joiner_checks_the_digests_of_the_run() -> None:
    source = Tensors()
    sender = WeightSender(source, bucket_bytes=400, store=IN_MEMORY)
    pair = Pair(sender, StagedReceiver(CPU, 0, source.shapes(), frozenset()))
    sent = sender.broadcast(sender.manifest(1, 0, "nccl"), TIMEOUT)  # to nobody
    assert pair.copy().digest_algorithm == "sums"
    assert equal(pair.staged(), source)
    assert weights_digest(sent) == sender.digest("sums") != sender.digest("xxh3")
    sender.copy.buffers[1][0] ^= 1
    pair.copy()
    assert "nothing was applied" in error(pair.receiver)[1]
