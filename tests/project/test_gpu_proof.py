"""`make gpu-proof` runs to its end on a CPU, where each part names what it lacks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_proof import PARTS
from tests.support.processes import run_python


def test_without_a_gpu_each_part_names_what_it_lacks(tmp_path: Path) -> None:
    output = tmp_path / "gpu.md"
    done = run_python("benchmarks/gpu_proof.py", "--output", str(output), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    said = output.read_text()
    for part in PARTS:
        assert f"| {part.title} | skipped | 0 |" in said
        reason = said.partition(f"## {part.title}\n\n")[2].partition("\n")[0]
        assert reason.startswith("skipped: needs") and "CUDA device" in reason
