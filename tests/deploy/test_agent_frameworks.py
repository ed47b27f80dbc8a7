"""Agents of the OpenAI Agents SDK and of LangGraph as published, each in a folder of its own, on a served proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.types import Trajectory
from tandem.rollout.environments.agent_episodes import AgentSampler
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tandem.services.rollout.openai_proxy import OpenAIProxy
from tests.deploy.test_environment_libraries import installed
from tests.support.episodes import SAMPLING, ScriptedSampler, prompt_of, texts_of, tokenizer
from tests.support.paths import ROOT
from tests.support.tiny_model import TOOL_TEMPLATE, build_tiny_model

pytestmark = pytest.mark.timeout(180)

OPENAI_AGENTS = "openai-agents==0.24.0 griffelib==2.4.1"
LANGGRAPH = (
    "langgraph==1.2.24 langgraph-checkpoint==4.3.2 langgraph-prebuilt==1.1.3 langgraph-sdk==0.4.14 "
    "langchain-openai==1.7.4 langchain-core==1.8.3 langchain-protocol==0.0.20 langsmith==0.15.1 "
    "orjson ormsgpack jsonpatch jsonpointer requests-toolbelt uuid-utils zstandard"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@pytest.fixture(scope="module")
def openai_agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai-agents")
    with pytest.MonkeyPatch.context() as patch:
        installed(OPENAI_AGENTS, folder, patch)
    return folder


def play(model: Path, said: Sequence[str], agent: str, arguments: Mapping[str, Any] | None = None) -> Trajectory:
    """One episode in which the policy says this, in turn."""

    async def main() -> Trajectory:
        path = f"tests.support.framework_agents:{agent}"
        config = EnvironmentConfig(path=path, arguments=arguments or {}, max_attempts=1, step_seconds=90.0)
        pool = EnvironmentPool(config)
        try:
            await pool.start()
            encoder = EpisodeEncoder(ChatEncoder(str(model)))
            agents = AgentSampler(ScriptedSampler(lambda _: said), pool, encoder, config, seed=5)
            row = {"role": "user", "content": "Add 2 and 3."}
            asked = replace(prompt_of(), messages=(row,), ground_truth="5")
            async with OpenAIProxy(agents.sessions).serving() as agents.address:
                return await agents.sample(asked, SAMPLING, 0)
        finally:
            await pool.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), chat_template=TOOL_TEMPLATE)


def check_tokens(row: Trajectory) -> None:
    """The conversation is one segment, with what was sampled in it as it was sampled."""
    assert texts_of(row) == [[f"{CALL}<|im_end|>", "5<|im_end|>"]]
    whole = tokenizer().decode(row.segments[0].ids.tolist())
    assert '"name": "add"' in whole, "the template shows the tool"
    assert "system\nUse the tool.<|im_end|>" in whole and "user\nAdd 2 and 3.<|im_end|>" in whole
    assert "<|im_start|>tool\n5<|im_end|>" in whole, "the framework has called its function"
    assert (row.earned_reward, row.metadata["stop"], row.metadata["num_turns"]) == (1.0, "terminated", 2)


@pytest.mark.parametrize(("api", "streams"), [("chat", False), ("responses", True)])
def test_an_agent_of_the_openai_agents_sdk_is_trained_on_its_tokens(
    openai_agents: Path, model: Path, monkeypatch: pytest.MonkeyPatch, api: str, streams: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{openai_agents}:{ROOT}")
    row = play(model, [CALL, "5"], "OpenAIAgents", {"api": api, "streams": streams})
    check_tokens(row)
    assert (row.metadata["info"]["events"] > 0) is streams


def test_a_handoff_of_the_openai_agents_sdk_is_a_conversation_of_its_own(
    openai_agents: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{openai_agents}:{ROOT}")
    passed = '<tool_call>{"name": "transfer_to_expert", "arguments": {}}</tool_call>'
    row = play(model, [passed, "5"], "Team")
    assert texts_of(row) == [[f"{passed}<|im_end|>"], ["5<|im_end|>"]], "the expert has other instructions"
    assert row.earned_reward == 1.0 and row.metadata["info"]["last"] == "expert"


def test_a_graph_of_langgraph_is_trained_on_its_tokens(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(LANGGRAPH, tmp_path, monkeypatch)
    check_tokens(play(model, [CALL, "5"], "LangGraph"))
