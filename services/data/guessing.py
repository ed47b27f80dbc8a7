"""The task of the agent's demo: games in which the policy guesses a number (examples/environments/guess_number.py).

The demonstrated games are played at random, so a model that imitates them does not read the environment's answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LARGEST = 15
MAX_GUESSES = 4
WORDS = ("guess", "higher", "lower", *map(str, range(10, LARGEST + 1)))
"""What is one token besides the characters, so that a guess is one token and its end."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)
_GAMES = {"train": 200, "eval": 20}
"""Games with each number."""
_DEMONSTRATED_GAMES = 2000


def write_task(folder: Path, seed: int) -> None:
    """Writes train, eval and demonstrations (.parquet). A demonstration is one turn after what was said before."""
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, games in _GAMES.items():
        numbers = [number for number in range(1, LARGEST + 1) for _ in range(games)]
        dice.shuffle(numbers)
        rows = [_row(index, [_said("user", "guess")], number) for index, number in enumerate(numbers)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    turns = [turn for _ in range(_DEMONSTRATED_GAMES) for turn in _random_game(dice)]
    rows = [_row(index, messages, guess) for index, (messages, guess) in enumerate(turns)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "demonstrations.parquet")


def _random_game(dice: random.Random) -> Iterator[tuple[list[dict[str, str]], int]]:
    """Conversations, each with the guess that follows: different numbers in random order, whatever is answered."""
    number, messages = dice.randint(1, LARGEST), [_said("user", "guess")]
    for guess in dice.sample(range(1, LARGEST + 1), MAX_GUESSES):
        yield messages, guess
        if guess == number:
            return
        told = "higher" if number > guess else "lower"
        messages = [*messages, _said("assistant", str(guess)), _said("user", told)]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _row(index: int, messages: list[dict[str, str]], truth: int) -> dict[str, object]:
    return {
        "data_source": "tandem/guess_number",
        "prompt": messages,
        "ability": "game",
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": {"index": index},
    }
