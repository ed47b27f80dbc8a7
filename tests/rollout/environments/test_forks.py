"""Episodes whose chat template leaves out thoughts of earlier turns: they go on in a new segment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import ModelError
from tandem.protos.types import SamplingParameters, Trajectory, TrajectoryGroup
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tandem.services.rollout.server import _sample_message
from tests.support.episodes import PROMPT, SAMPLING, ScriptedSampler, prompt_of, sampled_parts, tokenizer
from tests.support.tiny_model import build_tiny_model

WITHOUT_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}"
    "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_MESSAGE = "<|im_start|>user\n{{ messages[-1]['content'] }}<|im_end|>\n<|im_start|>assistant\n"
WORDS = ["one", "<think>2</think>two", "three", "end"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), chat_template=WITHOUT_THOUGHTS)


@pytest.fixture
def encoder(model: Path) -> ChatEncoder:
    return ChatEncoder(str(model))


def play(
    encoder: ChatEncoder,
    words: Sequence[str] = WORDS,
    *,
    sampler: ScriptedSampler | None = None,
    sampling: SamplingParameters = SAMPLING,
    unfinished: Trajectory | None = None,
    until: Callable[[ScriptedSampler], bool] | None = None,
    path: str = "tests.support.environments:Replayed",
    **arguments: Any,
) -> Trajectory:
    """The trajectory; once `until` is true, what another sampler would get of it."""
    config = EnvironmentConfig(path=path, arguments=arguments, rewritten_history="fork")
    chosen = sampler or ScriptedSampler(lambda _: words)

    async def main() -> Trajectory:
        pool = EnvironmentPool(config)
        await pool.start()
        episodes = EpisodeSampler(chosen, pool, EpisodeEncoder(encoder), config, seed=5)
        playing = episodes.sample(prompt_of(), sampling, 0, unfinished=unfinished, on_change=lambda: None)
        try:
            async with asyncio.timeout(60.0):
                if until is None:
                    return await playing
                task = asyncio.create_task(playing)
                while not until(chosen):
                    await asyncio.sleep(0.01)
                saved = await episodes.unfinished({"0-0"})
                task.cancel()
                return saved["0-0", 0]
        finally:
            await pool.close()

    return asyncio.run(main())


def stored(row: Trajectory) -> Trajectory:
    (known,) = decode_group(encode_group(TrajectoryGroup(prompt_of(), (row,)))).rows
    assert isinstance(known, Trajectory)
    return known


def said(row: Trajectory) -> list[list[str]]:
    """The turns of each segment."""
    return [[tokenizer().decode(one.ids[a:b].tolist()) for a, b in sampled_parts(one)] for one in row.segments]


def test_a_turn_whose_thoughts_the_template_leaves_out_is_followed_by_a_new_segment(
    encoder: ChatEncoder, tmp_path: Path
) -> None:
    row = play(encoder, marks=str(tmp_path))
    end = "<|im_end|>"
    assert said(row) == [[f"one{end}", f"<think>2</think>two{end}"], [f"three{end}", f"end{end}"]]
    second = row.segments[1]
    start = sampled_parts(second)[0][0]
    messages = row.metadata["messages"]
    assert second.ids[:start].tolist() == encoder.encode(messages[:-3]).tolist(), "the prompt is what it renders"
    assert "assistant\n<think>" not in tokenizer().decode(second.ids[:start].tolist())
    assert messages[len(PROMPT) + 3]["content"] == "<think>2</think>two", "scorers read what was sampled"
    assert row.token_rewards is not None
    for segment, rewards, expected in zip(row.segments, row.token_rewards, ([0.25, 0.25], [0.25, 1.0]), strict=True):
        ends = [last - 1 for _, last in sampled_parts(segment)]
        assert np.flatnonzero(rewards).tolist() == ends and rewards[ends].tolist() == expected
        assert segment.loss_mask[-1] == 1, "nothing follows the last turn"
    known = stored(row)
    assert known.metadata == row.metadata and known.text == row.text == "\n".join(WORDS)
    assert [one.tolist() for one in known.token_rewards or ()] == [one.tolist() for one in row.token_rewards]


def test_a_fork_that_no_turn_follows_leaves_no_segment(encoder: ChatEncoder, tmp_path: Path) -> None:
    row = play(encoder, ["<think>1</think>one"], sampling=SamplingParameters(max_tokens=24), marks=str(tmp_path))
    assert row.metadata["stop"] == "episode_tokens" and said(row) == [["<think>1</think>one<|im_end|>"]]


def test_the_limit_of_an_episode_counts_the_sampled_tokens_of_all_segments(
    encoder: ChatEncoder, tmp_path: Path
) -> None:
    words = [f"<think>{'x' * 30}</think>{number}" for number in range(8)]
    sampling = SamplingParameters(max_tokens=150)
    file = tmp_path / "brief.py"
    file.write_text(
        "from tandem import StepResult\nfrom tests.support.environments import Echo\n"
        "class Brief(Echo):\n"
        "    async def step(self, action, **more):\n"
        "        return StepResult([{'role': 'user', 'content': '?'}])\n"
    )
    row = play(encoder, words, sampling=sampling, path=f"{file}:Brief")
    assert row.metadata["stop"] == "episode_tokens" and len(row.segments) == 4
    assert sum(segment.num_loss_tokens for segment in row.segments) == 150


@pytest.mark.parametrize("stops_at", [(2, 0), (2, 3), (3, 5)], ids=["at a fork", "after it", "in the last turn"])
def test_a_forked_episode_goes_on_after_the_death_of_its_sampler(
    encoder: ChatEncoder, tmp_path: Path, stops_at: tuple[int, int]
) -> None:
    first = ScriptedSampler(lambda _: WORDS, stops_at=stops_at)
    saved = play(encoder, sampler=first, until=lambda sampler: bool(sampler.begun), marks=str(tmp_path))
    second = ScriptedSampler(lambda _: WORDS)
    row = play(encoder, sampler=second, unfinished=stored(saved), marks=str(tmp_path))
    calm = play(encoder, marks=str(tmp_path))
    assert len(second.requests) == len(WORDS) - stops_at[0], "no turn is sampled again"
    assert row.metadata["resumed_at"] == [stops_at[0]] and said(row) == said(calm)
    for one, other in zip(row.segments, calm.segments, strict=True):
        for column in ("ids", "behavior_logprobs", "loss_mask"):
            assert np.array_equal(getattr(one, column), getattr(other, column)), column
    assert [one.tolist() for one in row.token_rewards or ()] == [one.tolist() for one in calm.token_rewards or ()]


def test_an_evaluation_gets_the_sampled_tokens_of_all_segments(encoder: ChatEncoder, tmp_path: Path) -> None:
    row = play(encoder, marks=str(tmp_path))
    sample = _sample_message(row)
    assert tokenizer().decode(np.frombuffer(sample.ids, "<i4").tolist()) == "".join(f"{one}<|im_end|>" for one in WORDS)
    firsts = [(span.first_token, span.policy_version) for span in sample.spans]
    assert firsts == [(0, 0), (len(tokenizer().encode(WORDS[0] + WORDS[1])) + 2, 1)]
    assert len(sample.behavior_logprobs) == len(sample.ids)


def test_a_template_that_leaves_out_answers_is_refused_unless_episodes_may_fork(model: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(LAST_MESSAGE)
    encoder = ChatEncoder(str(model), str(tmp_path / "template.jinja"))
    with pytest.raises(ModelError, match=r'or environment\.rewritten_history = "fork"$'):
        encoder.check_replies()
    encoder.check_replies(may_rewrite=True)
    row = play(encoder, ["one", "two"], sampling=SamplingParameters(max_tokens=8), marks=str(tmp_path))
    assert said(row) == [["one<|im_end|>"], ["two<|im_end|>"]]
    assert tokenizer().decode(row.segments[1].ids.tolist()).startswith("<|im_start|>user\none?<|im_end|>")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("<|im_start|>user\n a  b<|im_end|>", "\n<|im_start|>assistant\n"),
        ("<|im_start|>user\na b", "<|im_end|>\n<|im_start|>assistant\n"),
        ("<|im_start|>user\na b<|im_end|>\n \n", "<|im_start|>assistant\n"),
        ("<|im_start|>user\na c", None),
        ("<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\nx", None),
    ],
    ids=["white space", "without the end", "more at the end", "another text", "longer"],
)
def test_an_increment_is_what_the_rendering_has_after_a_text(
    encoder: ChatEncoder, known: str, expected: str | None
) -> None:
    ids = np.array(tokenizer().encode(known, add_special_tokens=False), np.int32)
    found = encoder.encode_increment([{"role": "user", "content": "a b"}], ids)
    assert (None if found is None else tokenizer().decode(found.tolist())) == expected
