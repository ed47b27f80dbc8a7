"""Random episodes of a random policy and a random environment, over any chat template: what has to hold of each of
them is asserted as it is played.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tandem.protos.contracts import Message, Observation, StepResult
from tandem.protos.types import FinishReason, Prompt, SamplingParameters, Trajectory, VersionSpan
from tandem.rollout.environments.chat_messages import for_template
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.sampler import Completion, SamplingRequest
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.chat_templates import CALL, END_CALL, END_THINK, THINK, ChatTemplate
from tests.support.episodes import ScriptedSampler

TEXTS = ["higher", " lower ", "café 🙂", "cafe\u0301", "a\n\nb", '{"a": 1}', "the answer is the 数字", "", "\t"]
CALLS = [
    '{"name": "add", "arguments": {"a": 1, "b": 23}}',
    '\n{"name": "add", "arguments": {"a": 1}}\n',
    '{ "arguments": {}, "name":"add" }',
    "{broken",
]
FOREIGN = [f"{THINK}not the policy's{END_THINK}\n\n7", f"I call. {CALL}{CALLS[0]}{END_CALL}"]
"""What only an answer that the policy has not given says."""
MOST_TURNS = 5

Turn = tuple[list[int], list[int]]
"""What the sampler was given, and what it sampled."""


class RandomPolicy(ScriptedSampler):
    """Samples random tokens; a call or thoughts now and then. No two tokens have the same log-prob."""

    def __init__(self, tokenizer: Any, end_token: str) -> None:
        super().__init__(lambda _: (), own_tokenizer=tokenizer)
        self._end = tokenizer.convert_tokens_to_ids(end_token)
        self._vocabulary = len(self.tokenizer)
        self._num_sampled = 0
        self.turns: list[Turn] = []

    def begin(self, random: np.random.Generator) -> None:
        self._random = random
        self.turns = []

    async def _generate(self, request: SamplingRequest) -> Completion:
        ids = self._turn()[: request.sampling.max_tokens]
        self.turns.append((request.prompt_ids.tolist(), ids))
        logprobs = -np.arange(self._num_sampled + 1, self._num_sampled + 1 + len(ids), dtype=np.float32)
        self._num_sampled = (self._num_sampled + len(ids)) % (1 << 20)
        finish: FinishReason = "length" if len(ids) == request.sampling.max_tokens else "stop"
        return Completion(ids, logprobs.tolist(), [VersionSpan(0, 1, len(self.turns))], finish)

    def _turn(self) -> list[int]:
        """Ends with the template's token, or without it, as after a stop string."""
        kind = self._random.random()
        ids = self._tokens(8) or self._encode_all("7")
        if kind < 0.3:
            ids = [*self._encode_all(THINK), *ids, *self._encode_all(END_THINK + "\n\n"), *self._tokens(4)]
        if 0.2 < kind < 0.5:
            ids += self._encode_all(CALL + str(self._random.choice(CALLS)) + END_CALL)
        return [*ids, self._end] if self._random.random() < 0.8 else ids

    def _tokens(self, most: int) -> list[int]:
        """A text as it is encoded, in two of three cases; else it goes on with any tokens."""
        text = self._encode_all(str(self._random.choice(TEXTS)))
        if self._random.random() < 0.67:
            return text
        known = 256 if self._random.random() < 0.3 else self._vocabulary if self._random.random() < 0.1 else 400
        return [*text, *self._random.integers(0, known, self._random.integers(1, most + 1)).tolist()]

    def _encode_all(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class RandomEnvironment:
    """Says random things, as a user or as a tool, also with answers that the policy has not given; if it `alternates`,
    one message of a user. Each turn earns a reward of its own.
    """

    def __init__(self, random: np.random.Generator, alternates: bool) -> None:
        self._random = random
        self._alternates = alternates
        self._num_steps = 0
        self.given: list[list[Message]] = []
        """What `reset` and each step answered."""

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        return Observation(self._given(not self._alternates and self._random.random() < 0.5))

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        self._num_steps += 1
        ended = bool(self._random.random() < 0.15)
        return StepResult(self._given(not ended), reward=self._num_steps / 8, terminated=ended)

    def _given(self, speaks: bool) -> list[Message]:
        self.given.append(self._messages() if speaks else [])
        return self.given[-1]

    def _messages(self) -> list[Message]:
        if self._alternates:
            return [{"role": "user", "content": str(self._random.choice(TEXTS))}]
        role = self._random.choice(["user", "tool"])
        texts = self._random.choice(TEXTS, self._random.integers(1, 3))
        messages = [{"role": str(role), "content": str(text)} for text in texts]
        if self._random.random() < 0.3:
            foreign = {"role": "assistant", "content": str(self._random.choice([*TEXTS, *FOREIGN]))}
            messages.insert(int(self._random.integers(0, len(messages) + 1)), foreign)
        return messages

    def spoken(self, num_turns: int) -> list[int]:
        """Places of the policy's turns in a conversation whose prompt is one message."""
        ends = np.cumsum([1 + len(messages) for messages in self.given])
        return [int(end) for end in ends[:num_turns]]

    async def final_reward(self) -> float:
        return 0.0

    async def close(self) -> None: ...


class OneEnvironment:
    """In place of the environments' processes."""

    resume = "restart"
    tools: tuple[str, ...] = ()
    unsafe_tools: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.environment: RandomEnvironment | None = None

    async def open(self, episode_id: str) -> RandomEnvironment:
        assert self.environment is not None
        return self.environment


@dataclass
class Counts:
    episodes: int = 0
    turns: int = 0
    """That follow another one of their episode."""
    forks: int = 0
    breaks: int = 0
    """Turns whose conversation, encoded again, does not begin with the tokens of the turns before, or only by
    accident, because these end within a character.
    """
    compared: int = 0
    """Turns whose conversation, encoded again, does."""
    foreign: int = 0
    """Answers of other policies that the environment put into the conversations."""


@dataclass
class Play:
    """Episodes of one template. All that has to hold is asserted of each of them."""

    encoder: ChatEncoder
    template: ChatTemplate
    seed: int
    rewritten_history: Literal["keep", "fork"]
    counts: Counts = field(default_factory=Counts)

    async def episodes(self, num_episodes: int) -> Counts:
        settings = EnvironmentConfig(path="-", max_turns=MOST_TURNS, rewritten_history=self.rewritten_history)
        policy, pool = RandomPolicy(self.encoder.tokenizer, self.template.end), OneEnvironment()
        turns = EpisodeEncoder(self.encoder, "hermes")
        sampler = EpisodeSampler(policy, pool, turns, settings, seed=1)  # type: ignore[arg-type]
        for number in range(num_episodes):
            random = np.random.default_rng([number, self.seed])
            policy.begin(random)
            pool.environment = RandomEnvironment(random, self.template.alternates)
            messages = ({"role": "user", "content": str(random.choice(TEXTS))},)
            sampling = SamplingParameters(max_tokens=int(random.integers(40, 400)))
            prompt = Prompt(0, number, self.encoder.encode(messages), 1, sampling, messages=messages)
            row = await sampler.sample(prompt, sampling, 0)
            self.check(row, policy.turns, pool.environment.spoken(len(policy.turns)))
        return self.counts

    def check(self, row: Trajectory, turns: list[Turn], spoken: list[int]) -> None:
        """`spoken`: places of the turns in the conversation."""
        self.counts.episodes += 1
        segments = iter(row.segments)
        conversation = for_template(row.metadata["messages"])
        answers = [place for place, one in enumerate(conversation) if one["role"] == "assistant"]
        assert {*spoken} <= {*answers}
        self.counts.foreign += len(answers) - len(spoken)
        known: list[int] = []
        for number, ((prompt, sampled), place) in enumerate(zip(turns, spoken, strict=True)):
            again = self.encoder.encode(conversation[:place]).tolist()
            if number:
                self.counts.turns += 1
                stays = again[: len(known)] == known and "\ufffd" not in self.decoded(known)
                self.counts.breaks += not stays
                self.counts.compared += stays
                assert not stays or prompt == again, "the template's own tokens"
            if number and prompt[: len(known)] != known:
                assert self.rewritten_history == "fork" and prompt == again, "a new segment begins as rendered"
                self.counts.forks += 1
                check_segment(next(segments).ids.tolist(), known)
            if self.rewritten_history == "fork":
                assert self.same_text(prompt, again), "the policy reads what the template renders"
            known = [*prompt, *sampled]
        check_segment(next(segments).ids.tolist(), known)
        assert next(segments, None) is None
        check_trained_once(row, [sampled for _, sampled in turns])

    def same_text(self, one: list[int], other: list[int]) -> bool:
        texts = (unicodedata.normalize("NFC", self.decoded(ids)) for ids in (one, other))
        return len({"".join(text.split()) for text in texts}) == 1

    def decoded(self, ids: list[int]) -> str:
        return str(self.encoder.tokenizer.decode(ids))


def check_segment(ids: list[int], known: list[int]) -> None:
    assert ids == known, "all tokens that the last turn of the segment was sampled after, and its own"


def check_trained_once(row: Trajectory, sampled: list[list[int]]) -> None:
    """Each sampled token is in one segment, with its log-prob and the reward of its turn; no other is trained."""
    mask = np.concatenate([segment.loss_mask for segment in row.segments]).astype(bool)
    ids = np.concatenate([segment.ids for segment in row.segments])
    logprobs = np.concatenate([segment.behavior_logprobs for segment in row.segments])
    assert ids[mask].tolist() == [token for turn in sampled for token in turn]
    assert (np.diff(logprobs[mask]) == -1).sum() >= mask.sum() - 2 and not logprobs[~mask].any()
    versions = [span.policy_version for segment in row.segments for span in segment.spans]
    assert versions == [*range(1, len(sampled) + 1)]
    rewards = np.concatenate(row.token_rewards) if row.token_rewards else np.zeros(len(ids), np.float32)
    ends = np.cumsum([len(turn) for turn in sampled]) - 1
    answered = int(row.earned_reward > 0) and np.count_nonzero(rewards)
    assert not rewards[~mask].any() and np.flatnonzero(rewards[mask]).tolist() == ends[:answered].tolist()
    assert rewards[mask][ends[:answered]].tolist() == [(turn + 1) / 8 for turn in range(answered)]
    assert len(ends) - answered == (row.finish_reason == "length" and row.metadata["num_turns"] > answered)
