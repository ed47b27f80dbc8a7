"""The examples of tools, in whole episodes whose policy reads what they answer: a search, and a code to look up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tandem.protos.contracts import Scored, ScoreItem
from tandem.protos.types import SamplingParameters, Trajectory
from tandem.reward.scorers.short_answer import ShortAnswer
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.rollout.sampler import Completion, SamplingRequest
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.rollout.environments.test_tool_episodes import Caller, tokenizer
from tests.support.episodes import prompt_of, sampled_parts
from tests.support.paths import ROOT
from tests.support.processes import run_python

EXAMPLES = ROOT / "examples" / "environments"
LOOKUP = '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>'
TOWN = re.compile(r"born in the town of (\w+)\.")
PROVINCE = re.compile(r"in the province of (\w+)\.")


class Reader(Caller):
    """Says what `answer` makes of the conversation so far."""

    def __init__(self, answer: Callable[[str, int], str]) -> None:
        super().__init__(lambda _: [])
        self._answer = answer

    async def _generate(self, request: SamplingRequest) -> Completion:
        key, number, _ = request.request_id.rsplit("/", 2)
        said = self._answer(tokenizer().decode(request.prompt_ids.tolist()), int(number))
        self._words = lambda _: [said] * (int(key.rpartition("/")[2]) + 1)
        return await super()._generate(request)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an encoder reads."""
    folder = tmp_path_factory.mktemp("reader")
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


def play(folder: Path, answer: Callable[[str, int], str], config: EnvironmentConfig, rows: int) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        pool = EnvironmentPool(config)
        await pool.start()
        try:
            sampler = Reader(answer)
            sampler.max_model_tokens = 4000
            encoder = EpisodeEncoder(ChatEncoder(str(folder), tools=pool.tools))
            episodes = EpisodeSampler(sampler, pool, encoder, config, seed=5)
            sampling = SamplingParameters(max_tokens=3000)
            return await asyncio.gather(*(episodes.sample(prompt_of(), sampling, number) for number in range(rows)))
        finally:
            await pool.close()

    return asyncio.run(main())


def test_a_code_that_differs_in_each_episode_of_a_group_is_earned_only_by_looking_it_up(reader: Path) -> None:
    """The last episode guesses, and says the code of the first."""
    codes: list[str] = []

    def answer(conversation: str, number: int) -> str:
        if number == 7:
            return f"It is {codes[0]}" if codes else "It is 0000"
        if found := re.findall(r"<\|im_start\|>tool\n(\d{4})", conversation):
            codes.append(found[-1])
            return f"It is {found[-1]}"
        return LOOKUP

    config = EnvironmentConfig(path=f"{EXAMPLES / 'lookup.py'}:Lookup")
    rows = play(reader, answer, config, rows=8)
    assert [row.earned_reward for row in rows] == [1.0] * 7 + [0.0]
    assert len(set(codes)) == len(codes) == 7, "each episode has a code of its own"
    for row in rows[:7]:
        (segment,) = row.segments
        (_, call_end), (answer_start, _) = sampled_parts(segment)
        shown = tokenizer().decode(segment.ids[call_end:answer_start].tolist())
        assert re.search(r"\b\d{4}\b", shown), "the code that the policy reads is not trained"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of the recipe `search`."""
    folder = tmp_path_factory.mktemp("search")
    done = run_python(ROOT / "examples" / "prepare_search.py", folder)
    assert done.returncode == 0 and "1712 passages" in done.stdout, done.stderr
    return folder


def test_questions_of_the_search_recipe_are_answered_by_two_searches(
    reader: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = pq.read_table(library / "test.parquet").to_pylist()
    questions = [row for row in asked if row["extra_info"]["question"].startswith("In which province")][:8]
    monkeypatch.setenv("TANDEM_SEARCH_CORPUS", str(library / "corpus.jsonl"))

    def answer(conversation: str, number: int) -> str:
        """Searches the person, then the town, then answers."""
        read = conversation.partition("<|im_start|>tool")[2]
        towns = TOWN.findall(read)
        if not towns:
            person = questions[number]["extra_info"]["question"].partition(" of ")[2].rstrip("?")
            return search_for(person)
        _, second, found = read.partition("<|im_start|>tool")
        return f"<answer>{PROVINCE.findall(found)[0]}</answer>" if second else search_for(towns[0])

    config = EnvironmentConfig(
        tools=(f"{EXAMPLES / 'search.py'}:search",), sandbox=True, sandbox_files=(str(library / "corpus.jsonl"),)
    )
    rows = play(reader, answer, config, rows=len(questions))
    for row, question in zip(rows, questions, strict=True):
        truth = question["reward_model"]["ground_truth"]
        item = ScoreItem(question["data_source"], row.text, truth, question["extra_info"])
        score = ShortAnswer().judge(item)
        assert isinstance(score, Scored) and score.value == 1.0
        (segment,) = row.segments
        parts = [tokenizer().decode(segment.ids[a:b].tolist()) for a, b in sampled_parts(segment)]
        assert len(parts) == 3 and "passage" not in "".join(parts) and row.metadata["info"]["num_tool_calls"] == 2
        given = tokenizer().decode(segment.ids[np.flatnonzero(segment.loss_mask == 0)].tolist())
        assert "born in the town of" in given and "born in the town of" not in "".join(parts)


def search_for(words: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': words}})}</tool_call>"
