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
        (line,) = [line for line in said.splitlines() if line.startswith(f"| {part.title} |")]
        assert "skipped: needs" in line and "CUDA device" in line
