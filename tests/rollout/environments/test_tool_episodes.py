"""Episodes with tools: the first prompt, the tokens of calls and answers, and tools that fail beside others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.protos.errors import ModelError
from tandem.protos.types import SamplingParameters, Trajectory
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.metrics.page import page_of
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.episodes import ScriptedSampler, prompt_of, sampled_parts
from tests.support.tiny_model import TOOL_TEMPLATE, character_tokenizer

SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>'
FAIL = '<tool_call>{"name": "fail", "arguments": {"how": "HOW"}}</tool_call>'
SPELLED = "spelled: "
"""Begins a turn whose characters are a token each."""


@cache
def tokenizer() -> Any:
    """Has a token each for the markers of calls."""
    made = character_tokenizer(TOOL_TEMPLATE)
    made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an encoder reads."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


class Caller(ScriptedSampler):
    """Writes its words with the tokens of calls, or spells them."""

    def __init__(self, words: Callable[[int], Sequence[str]]) -> None:
        super().__init__(words, own_tokenizer=tokenizer())
        self._encode = self._ids

    def _ids(self, words: str) -> list[int]:
        parts = list(words.removeprefix(SPELLED)) if words.startswith(SPELLED) else [words]
        return [token for part in parts for token in tokenizer().encode(part, add_special_tokens=False)]


def play(
    model: Path,
    words: Callable[[int], Sequence[str]],
    rows: int = 1,
    max_tokens: int = 400,
    figures: dict[str, object] | None = None,
    **config: Any,
) -> list[Trajectory]:
    """The episodes. `figures` gets what the metrics show of their tools."""

    async def main() -> list[Trajectory]:
        tools = tuple(f"tests.support.tools:{name}" for name in ("add", "fail", "wait"))
        settings = EnvironmentConfig(tools=tools, **config)
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            encoder = ChatEncoder(str(model), tools=pool.tools)
            encoder.check_replies()
            sampler = Caller(words)
            sampler.max_model_tokens = 4000
            episodes = EpisodeSampler(sampler, pool, EpisodeEncoder(encoder), settings, seed=5)
            sampling = SamplingParameters(max_tokens=max_tokens)
            samples = (episodes.sample(prompt_of(), sampling, number) for number in range(rows))
            found = await asyncio.gather(*samples)
            if figures is not None:
                figures.update(episodes.tools.tables())
            return found
        finally:
            await pool.close()

    return asyncio.run(main())


def test_the_policy_sees_the_tools_calls_one_and_reads_its_result(model: Path) -> None:
    (row,) = play(model, lambda _: [f"I add. {ADD}", "it is 23"])
    (segment,) = row.segments
    text = tokenizer().decode(segment.ids.tolist())
    shown, _, conversation = text.partition("<|im_end|>\n")
    assert '"name": "add"' in shown and "Their sum is exact." in shown
    assert conversation == (
        "<|im_start|>system\nRepeat.<|im_end|>\n<|im_start|>assistant\n"
        f"I add. {ADD}<|im_end|>\n<|im_start|>tool\n23<|im_end|>\n<|im_start|>assistant\nit is 23<|im_end|>"
    )
    assert [tokenizer().decode(segment.ids[a:b].tolist()) for a, b in sampled_parts(segment)] == [
        f"I add. {ADD}<|im_end|>",
        "it is 23<|im_end|>",
    ]
    arguments = {"name": "add", "arguments": '{"a": 20, "b": 3}'}
    assert row.metadata["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"id": "call_0_0", "type": "function", "function": arguments}],
        },
        {"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": "23"},
        {"role": "assistant", "content": "it is 23"},
    ]
    assert (row.metadata["stop"], row.metadata["info"]["num_tool_calls"]) == ("terminated", 1)
    assert row.text == f"I add. {ADD}\nit is 23", "scorers read what was sampled"


def test_only_the_models_own_token_begins_a_call(model: Path) -> None:
    (row,) = play(model, lambda _: [f"{SPELLED}{ADD}", "unreached"])
    assert row.metadata["messages"][1:] == [{"role": "assistant", "content": ADD}]
    assert row.metadata["info"]["num_tool_calls"] == 0 and row.metadata["num_turns"] == 1


def test_a_turn_that_is_cut_off_executes_no_call(model: Path) -> None:
    call = FAIL.replace("HOW", "hang")
    (row,) = play(model, lambda _: [call], max_tokens=len(tokenizer().encode(call)))
    assert row.metadata["stop"] == "episode_tokens" and row.text == call, (
        "the call is whole, and the end of the turn is missing"
    )
    assert row.metadata["messages"][1:] == [{"role": "assistant", "content": call}] and row.metadata["info"] == {}


def test_tools_that_hang_or_crash_harm_no_other_episode(model: Path) -> None:
    kinds = ["hang", "exit", "crash", "raise"]

    def words(number: int) -> list[str]:
        return [FAIL.replace("HOW", kinds[number]) if number < len(kinds) else ADD, ADD, "done"]

    rows = play(model, words, rows=16, step_seconds=4.0, max_attempts=1)
    answers = [[one["content"] for one in row.metadata["messages"] if one["role"] == "tool"] for row in rows]
    assert [first.split(": ")[1] for first, _ in answers[:4]] == ["timeout", "crashed", "crashed", "exception"]
    assert answers[4:] == [["23", "23"]] * 12 and all(second == "23" for _, second in answers[:4])
    assert [row.metadata["info"]["num_tool_failures"] for row in rows] == [1] * 4 + [0] * 12


def test_the_metrics_show_how_long_each_tool_takes_and_how_its_calls_fail(model: Path) -> None:
    """The page is read by Prometheus' own parser: buckets that are cumulative, a sum and a count for each tool."""
    wait = '<tool_call>{"name": "wait", "arguments": {"name": "a", "seconds": 0.06}}</tool_call>'
    unknown = [f'<tool_call>{{"name": "invented_{number}", "arguments": {{}}}}</tool_call>' for number in range(2)]
    turn = "".join([*unknown, ADD, wait, FAIL.replace("HOW", "raise"), FAIL.replace("HOW", "exit"), "<tool_call>{"])
    figures: dict[str, object] = {}
    rows = play(model, lambda _: [turn, ADD, "done"], rows=2, figures=figures, max_tokens=3000)
    assert [row.metadata["num_turns"] for row in rows] == [3, 3]
    assert all("tool_outcomes" not in str(row.metadata) for row in rows)

    page = page_of("mine", "rollout-1", {"tools": lambda: figures})().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    calls = families["tandem_tool_call_seconds"]
    assert calls.type == "histogram"
    buckets: dict[str, dict[float, float]] = defaultdict(dict)
    for sample in calls.samples:
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["tool"]][float(sample.labels["le"])] = sample.value
    assert all(list(one.values()) == sorted(one.values()) and list(one) == sorted(one) for one in buckets.values())
    counts = {one.labels["tool"]: one.value for one in calls.samples if one.name.endswith("_count")}
    sums = {one.labels["tool"]: one.value for one in calls.samples if one.name.endswith("_sum")}
    assert counts == {"add": 4, "fail": 4, "wait": 2, "other": 0} == {tool: one[inf] for tool, one in buckets.items()}
    assert buckets["wait"][0.05] == 0 and sums["wait"] > 0.1 and sums["other"] == 0
    labels = {"run": "mine", "service": "rollout", "replica": "1"}
    assert {**calls.samples[0].labels, "tool": "", "le": ""} == {**labels, "tool": "", "le": ""}
    failures = families["tandem_tool_failures"].samples
    assert {(one.labels["tool"], one.labels["outcome"]): one.value for one in failures if one.value} == {
        ("fail", "exception"): 2,
        ("fail", "crashed"): 2,
        ("other", "unknown_tool"): 4,
        ("other", "unparsable_call"): 2,
    }


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "does not show the policy the tool add; set model."),
        (
            "{{ tools }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{{ m['content'] }}{% endfor %}",
            "refuses the messages of tools: no tools",
        ),
        (
            "{{ tools }}{% for m in messages %}{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}{% endfor %}",
            "leaves out the answers of tools",
        ),
        (
            "{{ tools }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "teaches no format of tool calls that is known; set environment.tool_format",
        ),
    ],
)
def test_a_template_without_tools_is_refused(model: Path, tmp_path: Path, template: str, told: str) -> None:
    (tmp_path / "template.jinja").write_text(template)
    encoder = ChatEncoder(str(model), str(tmp_path / "template.jinja"), [SCHEMA])
    with pytest.raises(ModelError) as refused:
        encoder.check_replies()
        EpisodeEncoder(encoder)
    assert told in str(refused.value) and "template.jinja" in str(refused.value)
