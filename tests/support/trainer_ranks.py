"""Runs every scenario of several trainer ranks, on both backends, in one start of the processes. Each rank writes a
report; rank 0 writes what is the same on all ranks into a folder for each backend. See `ranks` in
tests/trainer/conftest.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import distributed

from tandem.trainer.backend.deepspeed.engine import join_process_group, leave_process_group
from tests.support import engine_rank, learner_rank, token_model_rank


def run_backend(backend: str, model: Path, folder: Path) -> dict[str, Any]:
    """The scenarios of a backend; returns this rank's report."""
    folder.mkdir(exist_ok=True)
    width = distributed.get_world_size()
    report = learner_rank.run(model, backend, folder)
    report["whole_batch"] = {}
    for number, (name, case) in enumerate(learner_rank.WHOLE_BATCH.items()):
        if case.num_ranks == width:
            _, weights, report["whole_batch"][name] = learner_rank.train_whole_batch(case, backend, model)
            if distributed.get_rank() == 0:
                save_file(weights, folder / f"whole{number}.safetensors")
    if width == 2:
        report["adapters"] = engine_rank.run(model, backend, folder)
    return report


def main(model: Path, untied: Path, folder: Path) -> None:
    join_process_group(60)
    rank = distributed.get_rank()
    report: dict[str, Any] = {
        backend: run_backend(backend, model, folder / backend) for backend in ("deepspeed", "fsdp")
    }
    for name, path in (("tied", model), ("untied", untied)) if distributed.get_world_size() == 2 else ():
        weights, report[name] = token_model_rank.train(path)
        save_file(weights, folder / f"{name}{rank}.safetensors")
    leave_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
