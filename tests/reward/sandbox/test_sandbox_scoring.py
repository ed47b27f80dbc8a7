"""The code scorer in the pool and in the service, with misbehaving answers in the same batch."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from tandem.protos import reward_pb2
from tandem.protos.contracts import Scored, ScoreItem
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.services.rpc.client import connect
from tests.support.code_answers import isolated
from tests.support.reward_process import running_reward
from tests.support.reward_server import Item, Stub

pytestmark = isolated

RUBRIC = '[[components]]\nname = "tests"\nscorer = "code"\narguments = {seconds_per_test = 1.0}\n'
TESTS = {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]}
FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
NEIGHBOURS = {
    "passed": "print(2 * int(input()))",
    "wrong": "print(3 * int(input()))",
    "time": FORK_BOMB,
    "output": "while True: print('x' * 100_000)",
    "error": "import sys\nsys.exit(3)",
    "memory": "x = 'x' * (1 << 40)",
}
"""Programs by the counter of the breakdown in which each shows."""
ANSWERS = [*NEIGHBOURS.items(), ("passed", NEIGHBOURS["passed"])]


def solution(program: str) -> str:
    return f"```python\n{program}\n```"


def shown(breakdown: dict[str, float]) -> set[str]:
    """Names of the nonzero counters without their component prefix, except those that every answer has."""
    names = {name.rpartition("/")[2] for name, number in breakdown.items() if number}
    return names & set(NEIGHBOURS)


def test_answers_beside_misbehaving_ones_get_their_own_results_in_get_pool() -> None:
    with closing(ScoringCore(RewardConfig(num_workers=2))) as core:
        items = [ScoreItem("", solution(program), TESTS) for _, program in ANSWERS]
        scores = core.score(core.compile(RUBRIC), items, "calls")
    for (counter, _), score in zip(ANSWERS, scores, strict=True):
        assert isinstance(score, Scored), (counter, score)
        assert score.value == (counter == "passed"), (counter, score)
        assert shown(dict(score.breakdown)) == {counter}, score


def test_answers_beside_misbehaving_ones_get_their_own_results_in_the_service(tmp_path: Path) -> None:
    with running_reward(tmp_path, "reward.num_workers=2") as address, connect(address) as channel:
        items = [Item(solution=solution(program), ground_truth=json.dumps(TESTS)) for _, program in ANSWERS]
        reply = Stub(channel).Score(reward_pb2.ScoreRequest(items=items, rubric=RUBRIC), timeout=40)
    for (counter, _), item in zip(ANSWERS, reply.items, strict=True):
        assert item.WhichOneof("result") == "scored", (counter, item)
        assert item.scored.value == (counter == "passed"), (counter, item)
        assert shown(dict(item.scored.breakdown)) == {counter}, item
