"""What `tandem demo` can train: data, a random model and a recipe for each task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tandem.services.data import arithmetic, guessing
from tandem.services.data.tiny_model import PLAIN_TEMPLATE

_RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"

TaskName = Literal["arithmetic", "guess_number"]


@dataclass(frozen=True, slots=True)
class DemoTask:
    """`summary` and `teacher` are words of the demo's lines. `write_data(folder, seed)` writes the files that the
    recipe names; `model`: keyword arguments of `build_tiny_model`.
    """

    name: TaskName
    summary: str
    teacher: str
    write_data: Callable[[Path, int], None]
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Path:
        return _RECIPES / f"{self.name}.toml"


ARITHMETIC = DemoTask(
    "arithmetic",
    "a model that forgets to carry learns to add",
    "a sloppy pupil",
    arithmetic.write_task,
    {"hidden": 128, "layers": 4, "initializer_range": 0.06, "chat_template": PLAIN_TEMPLATE},
)
GUESS_NUMBER = DemoTask(
    "guess_number",
    "a model that guesses at random learns to read the answers, and to search",
    "random guesses",
    guessing.write_task,
    {
        "hidden": 64,
        "layers": 2,
        "initializer_range": 0.1,
        "chat_template": guessing.CHAT_TEMPLATE,
        "words": guessing.WORDS,
    },
)
TASKS: dict[str, DemoTask] = {task.name: task for task in (ARITHMETIC, GUESS_NUMBER)}
