"""Makes the random model of a demo's task and warms it up, in a process of its own: torch would stay in the
supervisor's memory for the whole run.

    python -m tandem.services.commands.demo_model FOLDER SEED [TASK [KEY=VALUE ...]]

With overrides of the task's recipe, of which `model.path` names FOLDER, the model is then fine-tuned as the section
[sft] says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.services.command_line import run_service
from tandem.services.commands.demo_tasks import ARITHMETIC, TASKS, DemoTask
from tandem.services.config import load_recipe
from tandem.services.data.tiny_model import build_tiny_model
from tandem.services.process import starting
from tandem.trainer.checkpoints.durable import atomic_folder


def main(folder: str, seed: str, name: str = ARITHMETIC.name, *overrides: str) -> int:
    """Returns the exit code."""
    task = TASKS[name]
    with starting():  # imports torch and transformers
        make_model(Path(folder), int(seed), task)
        from tandem.services.commands.sft import main as fine_tune

    return fine_tune(load_recipe(task.recipe, overrides)) if overrides else 0


def make_model(folder: Path, seed: int, task: DemoTask = ARITHMETIC) -> None:
    """Writes the random model that the warm-up starts from. Raises EnvironmentLackError if the disk is full."""
    with atomic_folder(folder) as begun:
        build_tiny_model(begun, seed=seed, **task.model)


if __name__ == "__main__":
    run_service(lambda: main(*sys.argv[1:]))
