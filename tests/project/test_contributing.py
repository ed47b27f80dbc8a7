"""The diffs in CONTRIBUTING.md apply to the sources, touch no more files than it says, and the code they add works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python

FOLDERS = ("deploy", "protos", "reward", "rollout", "services", "tandem", "trainer")
SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.M)
DIFFS = {
    head.group(1): diff.group(1)
    for section in SECTIONS
    if (head := re.match(r"Add an? ([\w ]+): ", section))
    and (diff := re.search(r"```diff\n(.*?)^```", section, re.M | re.S))
}

USES = {
    "scorer": """
from tandem.protos.contracts import Scored, ScoreItem
from tandem.reward.registry import SCORERS, make_judge
assert "ends_with" in list(SCORERS)
judge = make_judge("ends_with", {"ignore_dot": True})
assert judge.judge(ScoreItem("", "It is 42.", "42")) == Scored(1.0)
""",
    "loss": """
import torch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.policy_losses.inputs import LossTokens
from tandem.trainer.policy_losses.registry import policy_loss
options = TrainerConfig(loss={"name": "unclipped", "cap": 2.0}).loss
current_N = torch.tensor([-1.0, -1.0], requires_grad=True)
proximal_N, ones_N = torch.tensor([-1.0, -3.0]), torch.ones(2)
tokens = LossTokens(current_N, proximal_N, proximal_N, 3.0 * ones_N, ones_N, torch.tensor([2]))
assert policy_loss(tokens, options).losses_N.tolist() == [-3.0, -6.0]
""",
    "advantage estimator": """
import torch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.estimators.inputs import EstimatorBatch
from tandem.trainer.estimators.registry import estimate
options = TrainerConfig(advantage="worst_baseline").advantage
rewards_N = torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64)
batch = EstimatorBatch(rewards_N, torch.tensor([1, 1, 1]), torch.tensor([7, 7, 8]))
assert estimate(batch, options).advantages_N.tolist() == [0.0, 3.0, 0.0]
""",
    "sampling engine": """
import asyncio, sys
from tandem.protos.types import SamplingParameters, WeightManifest
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine
from tandem.services.data.tiny_model import build_tiny_model
build_tiny_model(sys.argv[1])

async def sample():
    config = RolloutConfig(engine="echo")
    engine = find_engine(config.engine)
    sampler = await engine.start(SamplerArguments(config, sys.argv[1], "float32", 64, 0))
    (trajectory,) = await sampler.sample([5, 6, 7], 1, SamplingParameters(max_tokens=2))
    await sampler.update_weights(WeightManifest(0, 0, "disk", ()), "none", 20.0)
    assert sampler.policy_version == 0
    sampler.close()
    assert trajectory.segments[0].ids.tolist() == [5, 6, 7, 5, 6] and sampler.is_dead

asyncio.run(sample())
""",
    "trainer backend": """
import torch
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.config import TrainerConfig
config = TrainerConfig(backend="replicated", gradient_clip=0.0)
backend = load_backend(config)
backend.join_process_group(20.0)
engine = backend.build_engine(config, torch.nn.Linear(2, 1, bias=False))
with engine.gather(["weight"]) as before:
    before = before["weight"].clone()
engine.backward(engine(input=torch.tensor([[3.0, 4.0]])).sum())
assert engine.step(0.1) == 5.0
with engine.gather(["weight"]) as after:
    assert not torch.equal(before, after["weight"])
backend.leave_process_group()
""",
}
"""For each diff, a program that uses the code it adds; its argument is a folder."""


@pytest.fixture(scope="module")
def copied_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product's folders with every diff applied."""
    root = tmp_path_factory.mktemp("sources")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in DIFFS.values():
        # GIT_DIR: `git apply` would otherwise look for a repository around the copy.
        environment = {**os.environ, "GIT_DIR": str(root / "none"), "GIT_CEILING_DIRECTORIES": str(root.parent)}
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=root, env=environment, timeout=60, check=True)
    subprocess.run([root / "deploy" / "source_links.sh"], timeout=60, check=True)
    return root


def test_every_diff_is_used_and_touches_few_files_in_one_folder() -> None:
    most = {"scorer": 1, "loss": 2, "advantage estimator": 2, "sampling engine": 9, "trainer backend": 9}
    assert DIFFS.keys() == USES.keys() == most.keys()
    for thing, diff in DIFFS.items():
        files = re.findall(r"^diff --git a/(\S+) b/\1$", diff, re.M)
        assert 1 <= len(files) <= most[thing]
        assert len({str(Path(file).parent) for file in files}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("thing", USES)
def test_the_code_that_a_diff_adds_works(thing: str, copied_sources: Path, tmp_path: Path) -> None:
    links = copied_sources / "build" / "links"
    done = run_python("-c", USES[thing], tmp_path / "model", cwd=tmp_path, PYTHONPATH=str(links))
    assert done.returncode == 0, done.stderr
