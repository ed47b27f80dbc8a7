"""Environments of verifiers as published, in virtual environments of their own, with tokens of a real sampler."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos.errors import ConfigError, EpisodeError
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine
from tandem.rollout.environments.agent_episodes import AgentSampler
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool, check_class
from tandem.rollout.sampler import Sampler
from tandem.services.data.chat import ChatEncoder, load_tokenizer
from tandem.services.data.dataset import parse_row
from tandem.services.rollout.episodes import EpisodeEncoder
from tandem.services.rollout.openai_proxy import OpenAIProxy
from tests.support.episodes import ScriptedSampler, prompt_of, sampled_parts, texts_of, tokenizer
from tests.support.paths import ROOT
from tests.support.tiny_model import TOOL_TEMPLATE, build_tiny_model
from tests.support.wheels import pip

pytestmark = pytest.mark.timeout(180)

OF_PRIME = "prime-pydantic-config prime-sandboxes prime-tunnel pyqwest connectrpc==0.11.1 protobuf-py==0.1.1"
OF_BOTH = f"{OF_PRIME} protobuf-py-ext==0.1.1 renderers openai-harmony gepa aiofiles tomli tomli_w"
LEGACY = (
    f"verifiers==0.3.1 mcp<2 {OF_BOTH} datasets<6 pandas multiprocess python-dateutil tzdata openai-agents griffelib "
    "aiolimiter httpx-sse"
)
TASKS = f"verifiers==0.4.0 openai<3 mcp==2.0.0 mcp-types==2.0.0 {OF_BOTH} prime-runs prime-traces"
TURNS = SamplingParameters(max_tokens=300)
WORDS = ["<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Tokens that the renderer for Qwen3 needs."""
LOADER = "verifiers.v1:load_environment"
SUMS = {
    "taskset": {"id": "verifiers-tasks"},
    "agent": {"runtime": {"type": "subprocess"}},
    "renderer": {"name": "qwen3"},
}


def interpreter_with(packages: str, folder: Path) -> str:
    """Of a virtual environment with these packages in front of those of this one, and without Tandem."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    pip("--python", python, "install", "-q", "--no-deps", "--no-compile", *packages.split())
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    assert subprocess.run([python, "-Ic", "import tandem"], capture_output=True, check=False).returncode == 1
    return str(python)


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter_with(LEGACY, tmp_path_factory.mktemp("verifiers") / "0.3")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter_with(TASKS, tmp_path_factory.mktemp("verifiers") / "0.4")


def copied(name: str, folder: Path) -> Path:
    """A file of environments in a folder of its own, whose other files `import` would find."""
    (folder / "environments").mkdir()
    return Path(shutil.copy(ROOT / f"tests/support/{name}.py", folder / "environments"))


def rows_of(interpreter: str, path: str, arguments: Mapping[str, Any], folder: Path) -> list[Prompt]:
    """The rows that the example writes, as prompts."""
    file = folder / "train.jsonl"
    script = ROOT / "examples/prepare_verifiers.py"
    command = [interpreter, script, path, json.dumps(arguments), file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{file}: 2 rows\n")
    prompts = []
    for number, line in enumerate(file.read_text().splitlines()):
        row: Any = parse_row(number, json.loads(line))
        told = {"messages": row.messages, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
        prompts.append(Prompt(0, number, np.array([1, 2, 3], np.int32), 1, TURNS, **told))
    return prompts


def play(model: Path, prompt: Prompt, sampler: Sampler | None = None, **config: Any) -> Trajectory:
    """One episode; without another sampler, its tokens are those of the model."""

    async def main() -> Trajectory:
        settings = EnvironmentConfig(max_attempts=1, step_seconds=90.0, max_turn_tokens=100, **config)
        engine = RolloutConfig(engine="transformers", kv_cache_bytes=16 << 20)
        arguments = SamplerArguments(engine, str(model), "float32", 1024, seed=1)
        used = sampler or await find_engine("transformers").start(arguments)
        pool = EnvironmentPool(settings)
        try:
            await pool.start()
            assert pool.is_agent
            agents = AgentSampler(used, pool, EpisodeEncoder(ChatEncoder(str(model))), settings, seed=5)
            async with OpenAIProxy(agents.sessions).serving() as agents.address:
                return await agents.sample(prompt, TURNS, 0)
        finally:
            await pool.close()
            used.close()

    return asyncio.run(main())


def parts_of(segment: Segment, model: Path) -> list[str]:
    """The texts of the given and the sampled tokens, in turn."""
    edges = [0, *(edge for part in sampled_parts(segment) for edge in part)]
    decode = load_tokenizer(str(model)).decode
    return [decode(segment.ids[start:end].tolist()) for start, end in pairwise(edges)]


def test_an_environment_of_03_plays_in_a_process_with_packages_of_its_own(legacy: str, tmp_path: Path) -> None:
    path = f"{copied('verifiers_legacy', tmp_path)}:hints"
    model = build_tiny_model(tmp_path / "model", hidden=64)
    _, prompt = rows_of(legacy, path, {"turns": 2}, tmp_path)
    assert [one["content"] for one in prompt.messages] == ["Add.", "2 and 1"]
    row = play(model, prompt, path=path, arguments={"turns": 2}, interpreter=legacy)
    first, one, reply, two = parts_of(row.segments[0], model)
    encoded = ChatEncoder(str(model)).encode(prompt.messages)
    assert row.segments[0].ids[: len(encoded)].tolist() == encoded.tolist()
    assert first.endswith("2 and 1<|im_end|>\n<|im_start|>assistant\n") and "hint 2<|im_end|>" in reply
    assert one and two
    assert row.earned_reward == 3.5, "two turns, and the row's answer"
    assert row.metadata["info"]["metrics"]["quarters"] == 3.5


def test_tools_of_03_are_called(legacy: str, tmp_path: Path) -> None:
    path = f"{copied('verifiers_legacy', tmp_path)}:tools"
    model = build_tiny_model(tmp_path / "model", chat_template=TOOL_TEMPLATE)
    prompt, _ = rows_of(legacy, path, {}, tmp_path)
    said = ['<tool_call>{"name": "look_up", "arguments": {"word": "sum"}}</tool_call>', "It is 2."]
    row = play(model, prompt, ScriptedSampler(lambda _: said), path=path, interpreter=legacy)
    assert texts_of(row) == [[f"{one}<|im_end|>" for one in said]]
    assert "<|im_start|>tool\nsum!<|im_end|>" in tokenizer().decode(row.segments[0].ids.tolist())
    assert row.earned_reward == 2.5


def test_what_an_environment_of_03_cannot_use_is_one_line(legacy: str, tmp_path: Path) -> None:
    place = copied("verifiers_legacy", tmp_path)
    model = build_tiny_model(tmp_path / "model")
    prompt, _ = rows_of(legacy, f"{place}:hints", {}, tmp_path)
    poor = replace(prompt, extra_info={"question": "1 and 1"})
    with pytest.raises(EpisodeError, match="the row has no info, which the environment's data set has; write the data"):
        play(model, poor, ScriptedSampler(lambda _: ["2"]), path=f"{place}:hints", interpreter=legacy)
    check = partial(EnvironmentConfig, interpreter=legacy)
    with pytest.raises(ConfigError, match="of_groups: its rubric scores the episodes of a group together"):
        asyncio.run(check_class(check(path=f"{place}:of_groups")))
    with pytest.raises(ConfigError, match="Could not import 'no-such-environment' environment"):
        unknown = {"env_id": "no-such-environment"}
        asyncio.run(check_class(check(path="verifiers:load_environment", arguments=unknown)))


def test_a_task_of_04_is_done_with_token_ids(tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(copied("verifiers_tasks", tmp_path).parent))  # as if it were installed
    model = build_tiny_model(tmp_path / "model", hidden=64, words=WORDS)
    prompt, _ = rows_of(tasks, LOADER, SUMS, tmp_path)
    play_it = partial(play, model, prompt, path=LOADER, arguments=SUMS, interpreter=tasks)
    row = play_it(ScriptedSampler(lambda _: ["1", "2"]))
    head, start = "<|im_start|>{}\n{}<|im_end|>\n", "<|im_start|>assistant\n"
    asked = head.format("system", "Add.") + head.format("user", "1 and 1") + start
    sure = "\n" + head.format("user", "Sure?") + start
    assert parts_of(row.segments[0], model) == [asked, "1<|im_end|>", sure, "2<|im_end|>"]
    assert row.earned_reward == 1.5, "two turns, and the right answer"
    row = play_it(rewritten_history="fork")  # what a random model says may look like thoughts or calls
    assert parts_of(row.segments[0], model)[0] == asked and row.earned_reward == 0.5
    assert sum(one.num_loss_tokens for one in row.segments) == row.metadata["info"]["metrics"]["sampled"]


def test_what_an_environment_of_04_cannot_use_is_one_line(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(copied("verifiers_tasks", tmp_path).parent))
    model, said = build_tiny_model(tmp_path / "model", words=WORDS), ScriptedSampler(lambda _: ["1", "2"])
    with pytest.raises(EpisodeError, match=r"none of the environment's tasks: extra_info\.answer: Field required"):
        play(model, prompt_of(), said, path=LOADER, arguments=SUMS, interpreter=tasks)
    settings = EnvironmentConfig(path=LOADER, arguments={"taskset": {"id": "no-such"}}, interpreter=tasks)
    with pytest.raises(ConfigError, match="taskset 'no-such' not found"):
        asyncio.run(check_class(settings))
