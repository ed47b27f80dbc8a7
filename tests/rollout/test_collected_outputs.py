"""Outputs of vLLM's steps, which are collected until a request ends or the weights change."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tandem.rollout.vllm.collected_outputs import SAMPLED_LOGPROBS, CollectedOutputs


class Logprobs(NamedTuple):
    """vLLM's LogprobsLists: a row a token."""

    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    ranks: np.ndarray[Any, Any]
    counts: None = None


@dataclass
class Output:
    """vLLM's EngineCoreOutput for one token."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs | None
    finished: bool
    prefill_stats: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


def token(request_id: str, token_id: int, *, finished: bool = False, prefill_stats: str | None = None) -> Any:
    ids, values = np.array([[token_id]]), np.array([[-token_id / 8]])
    return Output(request_id, [token_id], Logprobs(ids, values, np.array([1])), finished, prefill_stats)


def requests(**detokenized: bool) -> Any:
    return {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(output_kind=SimpleNamespace(name="FINAL_ONLY"), detokenize=detokenize)
        )
        for name, detokenize in detokenized.items()
    }


RUNNING = requests(a=False, b=False)


def told(output: Any) -> tuple[str, list[int], list[float]]:
    assert output.new_logprobs is None, "arrays would take longer to send"
    return output.request_id, output.new_token_ids, output.kv_transfer_params[SAMPLED_LOGPROBS]


def test_a_request_is_told_of_once_with_all_its_tokens() -> None:
    collected = CollectedOutputs()
    assert collected.add([token("a", 1, prefill_stats="prompt"), token("b", 2)], RUNNING) == []
    assert collected.add([token("a", 3), token("b", 4)], RUNNING) == []
    (last,) = collected.add([token("a", 5, finished=True), token("b", 6)], RUNNING)
    assert told(last) == ("a", [1, 3, 5], [-0.125, -0.375, -0.625])
    assert (last.finished, last.prefill_stats) == (True, "prompt")
    (single,) = collected.add([token("c", 7, finished=True)], RUNNING)
    assert told(single) == ("c", [7], [-0.875]), "an answer of one token"


def test_what_is_taken_before_a_change_of_the_weights_is_not_told_again() -> None:
    collected = CollectedOutputs()
    collected.add([token("a", 1), token("b", 2)], RUNNING)
    collected.add([token("a", 3)], RUNNING)
    assert [told(output)[:2] for output in collected.take_all()] == [("a", [1, 3]), ("b", [2])]
    assert collected.take_all() == []
    (last,) = collected.add([token("a", 5, finished=True)], RUNNING)
    assert last.new_token_ids == [5]


def test_a_request_keeps_its_candidates_beside_one_that_has_more() -> None:
    def step(*candidates: int, finished: bool = False) -> Any:
        output = token("a", 1, finished=finished)
        ids = np.array([[1, *candidates]])
        output.new_logprobs = Logprobs(ids, ids / -8, np.array([1]))
        return output

    collected = CollectedOutputs()
    collected.add([step(1, 2)], RUNNING)
    collected.add([step(2, 1, 7, 8)], RUNNING)
    (last,) = collected.add([step(1, 3, finished=True)], RUNNING)
    assert last.new_logprobs.token_ids.tolist() == [[1, 1, 2], [1, 2, 1], [1, 1, 3]]
    assert last.new_logprobs.logprobs.shape == (3, 3) and last.kv_transfer_params is None


def test_an_aborted_request_leaves_nothing() -> None:
    collected = CollectedOutputs()
    collected.add([token("a", 1), token("b", 2)], RUNNING)
    collected.forget(["a", "unknown"])
    assert [output.request_id for output in collected.take_all()] == ["b"]


def test_tokens_in_which_a_stop_string_is_looked_for_do_not_wait() -> None:
    collected = CollectedOutputs()
    output = token("a", 1)
    assert collected.add([output], requests(a=True)) == [output] and collected.take_all() == []
