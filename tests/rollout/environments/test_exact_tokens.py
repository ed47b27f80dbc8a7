"""Random episodes over the chat templates of several model families: the tokens of every turn stay as they were
sampled, and each is trained once.

`pytest -s -m slow` on this file plays 10,000 of them, and prints what would come of encoding each conversation again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

import pytest

from tandem.services.data.chat import ChatEncoder
from tests.support.chat_templates import TEMPLATES, template_encoder
from tests.support.random_episodes import Counts, Play


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatEncoder]:
    return {name: template_encoder(tmp_path_factory.mktemp("model"), one) for name, one in TEMPLATES.items()}


def played(encoders: Mapping[str, ChatEncoder], mode: Literal["keep", "fork"], num_episodes: int) -> dict[str, Counts]:
    return {
        name: asyncio.run(Play(one, TEMPLATES[name], seed, mode).episodes(num_episodes))
        for seed, (name, one) in enumerate(encoders.items())
    }


def check_counts(kept: Mapping[str, Counts], forked: Mapping[str, Counts]) -> None:
    for name in TEMPLATES:
        assert min(kept[name].breaks, kept[name].compared if name != "Mistral" else 1) > 0, name
        assert kept[name].foreign > 10 < forked[name].foreign, name
        thoughts_stay = name not in ("Qwen3", "DeepSeek-R1")
        assert kept[name].forks == 0 and (forked[name].forks < forked[name].turns / 4) == thoughts_stay, name


def test_no_turn_changes_the_tokens_before_it_and_each_sampled_token_is_trained_once(
    encoders: dict[str, ChatEncoder],
) -> None:
    check_counts(played(encoders, "keep", 60), played(encoders, "fork", 60))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ten_thousand_episodes_change_no_token(encoders: dict[str, ChatEncoder]) -> None:
    kept, forked = played(encoders, "keep", 625), played(encoders, "fork", 625)
    check_counts(kept, forked)
    print("\ntemplate       later turns   breaks   breaks if encoded again   forks")
    for name, one in kept.items():
        print(f"{name:<14}{one.turns:>12}{0:>9}{one.breaks:>26}{forked[name].forks:>8}")
    both = [*kept.values(), *forked.values()]
    print(f"{sum(one.episodes for one in both):,} episodes, {sum(one.turns for one in both):,} later turns, ", end="")
    print(f"0 breaks; encoded again {sum(one.breaks for one in kept.values()):,} of ", end="")
    print(f"{sum(one.turns for one in kept.values()):,} turns")
