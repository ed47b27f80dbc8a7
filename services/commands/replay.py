"""`tandem replay`: retrains a run's recorded batches and compares the weights bit for bit. It begins with the initial
model, or, if the first batches are no longer kept (run.keep_batches), with the oldest checkpoint. With `--generation`,
it compares what was sampled, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tandem.protos.codec import decode_group
from tandem.protos.errors import ConfigError, DataError, ModelError
from tandem.protos.manifest import algorithm_of_digest
from tandem.services.command_line import print_text, run_service
from tandem.services.commands.replay_generation import Generation, State, check_comparable, repeat_episodes
from tandem.services.config import Recipe, load_resolved
from tandem.services.process import starting
from tandem.services.run.folder import CONFIG_FILE, HF_FOLDER
from tandem.services.run.inputs import check_replayed_model
from tandem.services.run.json_files import METRICS_FILE, JsonLines
from tandem.services.run.preflight import check_models
from tandem.services.trainer.batch_source import groups_of_rank
from tandem.services.trainer.ranks import run_local_ranks
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER, check_world_size
from tandem.services.trainer.service import make_learner
from tandem.trainer.batch.record import BATCHES_FOLDER, read_record, recorded_versions
from tandem.trainer.checkpoints.export import collect_weights
from tandem.trainer.checkpoints.state import list_checkpoints

EQUAL, DIFFERENT = 0, 1
GENERATION = "--generation"
_INCARNATION = 1  # of the weights that a sampler gets here; the run's do not matter


def main(folder: Path, *, generation: bool = False) -> int:
    """Replays a run on all its ranks, with `generation` also what was sampled. Returns 0 if nothing differs, else 1.
    Raises UserError for unusable files.
    """
    recipe = load_resolved(folder / CONFIG_FILE)
    check_models(recipe)
    check_replayed_model(recipe, folder)
    _check_export(folder / HF_FOLDER)
    is_rank = "RANK" in os.environ
    if generation and not is_rank:
        check_comparable(recipe)
        if recipe.environment.path:
            equal, line = repeat_episodes(folder, recipe, find_start(folder)[2])
            print_text(line)
            if not equal:
                return DIFFERENT
    num_ranks = recipe.trainer.num_ranks * recipe.trainer.num_nodes
    if num_ranks > 1 and not is_rank:  # all on this machine, even if the run used several
        command = [sys.executable, "-m", "tandem.services.commands.replay", str(folder)]
        return run_local_ranks([*command, GENERATION] if generation else command, num_ranks)
    with ExitStack() as stack:
        sampler = None
        if generation and int(os.environ.get("RANK", 0)) == 0:
            sampler = stack.enter_context(closing(Generation(folder, recipe, *find_start(folder)[::2])))
        return Replay(folder, recipe, sampler, samples=generation).run()


def _check_export(folder: Path) -> None:
    """Checks that the run's export can be read, before any rank starts."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the run's export {file} cannot be read ({error}); copy it again") from None


class Replay:
    """One rank of a replay. Rank 0 prints, and has the sampler if every rank `samples`."""

    def __init__(
        self, folder: Path, recipe: Recipe, generation: Generation | None = None, *, samples: bool = False
    ) -> None:
        self._folder = folder
        self._start, self._checkpoint, self._versions = find_start(folder)
        self._deadline_seconds = recipe.weights.deadline_seconds
        lines = JsonLines(folder / METRICS_FILE).read()
        digests = {line["step"]: line["weights_digest"] for line in lines if line.get("weights_digest")}
        self._digests = {step: digest for step, digest in digests.items() if algorithm_of_digest(digest)}
        others = [version for version in self._versions if version in digests.keys() - self._digests.keys()]
        self._num_others = len(others)
        if others and self._digests.keys().isdisjoint(self._versions):
            raise DataError(
                f"another release computed the digests of versions {others[0]} to {others[-1]} in another way, and "
                f"this one computed none: replay {folder} with that release"
            )
        self._generation = generation
        self._samples = samples
        with starting():
            self._learner, self._sender = make_learner(recipe)
        if self._learner.world_size != recipe.trainer.num_ranks * recipe.trainer.num_nodes:
            raise ConfigError(
                f"{folder} was trained by another number of ranks than WORLD_SIZE={self._learner.world_size}"
            )

    def run(self) -> int:
        """Trains every batch, compares the weights and what they sampled, and returns the exit code."""
        began = time.monotonic()
        compared = 0
        if self._checkpoint is not None:
            self._learner.load(self._checkpoint)
        if not self._sampled_alike(self._start):
            return DIFFERENT
        for version in self._versions:
            digest = self._train(version)
            expected = self._digests.get(version)
            if not self._learner.broadcast_object(expected in (None, digest)):
                self._say(f"version {version} differs: its weights have digest {digest}, the run's had {expected}")
                return DIFFERENT
            compared += expected is not None
            if not self._sampled_alike(version):
                return DIFFERENT
        differing = self._compare_export()
        self._learner.close()
        if differing:
            self._say(f"the final weights differ from {self._folder / HF_FOLDER}: {', '.join(differing[:5])}")
            return DIFFERENT
        trained = f"{len(self._versions)} batches trained again in {time.monotonic() - began:.1f} s"
        if self._checkpoint is not None:
            trained += f" from the checkpoint of version {self._start}, because earlier batches are no longer kept"
        others = ""
        if self._num_others:
            others = f"; {self._num_others} have the digest of another release and were not compared"
        self._say(f"{trained}; {compared} versions compared: equal bit for bit{others}")
        if self._generation:
            self._say(self._generation.summary())
        return EQUAL

    def _sampled_alike(self, version: int) -> bool:
        """With the weights of this version, samples what it sampled. Returns False on every rank if that differs."""
        generation = self._generation
        needed = self._samples and self._learner.broadcast_object(generation and generation.needs(version))
        if not needed:
            return True
        self._sender.broadcast(self._sender.manifest(_INCARNATION, version, "gloo"), self._deadline_seconds)
        if generation:
            generation.begin(self._sender)
        state: State = "samples"
        while state == "samples":
            state = self._learner.broadcast_object(generation.state() if generation else None)
        if generation and generation.difference:
            self._say(generation.difference)
        return state == "equal"

    def _train(self, version: int) -> str:
        """Trains one recorded batch. Returns the digest of the weights on rank 0."""
        batch, payloads = read_record(self._folder, version)
        check_world_size(batch, self._learner.world_size)
        own = groups_of_rank(batch, self._learner.rank)
        groups = {group_id: decode_group(payloads[group_id]) for group_id in own}
        self._learner.train(self._learner.prepare(batch, groups))
        return self._sender.digest(algorithm_of_digest(self._digests.get(version, "")) or "xxh3")

    def _compare_export(self) -> list[str]:
        """Names of the parameters that differ from the run's export; none if the run has no export."""
        weights = collect_weights(self._learner.parameter_specs(), self._learner.gather, keep=self._learner.rank == 0)
        differing = differing_tensors(self._folder / HF_FOLDER, weights) if self._learner.rank == 0 else []
        return list(self._learner.broadcast_object(differing))

    def _say(self, line: str) -> None:
        if self._learner.rank == 0:
            print_text(line)


def find_start(folder: Path) -> tuple[int, Path | None, list[int]]:
    """The version that a replay begins with, its checkpoint (None for the initial model), and the versions to train.
    Raises DataError, with the versions that are there, if no recorded batch can be trained.
    """
    recorded, checkpoints = recorded_versions(folder), list_checkpoints(folder / CHECKPOINTS_FOLDER)
    starts = [(0, None), *((version, checkpoint) for version, _, checkpoint in checkpoints)]
    for start, checkpoint in starts:
        versions = [version for version in recorded if version > start]
        if versions and versions == list(range(start + 1, start + 1 + len(versions))):
            return start, checkpoint, versions
    held = f"{recorded[0]} to {recorded[-1]}, {len(recorded)} in number" if recorded else "none"
    held_starts = ", ".join(str(version) for version, _, _ in checkpoints) or "none"
    raise DataError(
        f"{folder / BATCHES_FOLDER} does not hold every batch from 1 or from a checkpoint on (batches: {held}; "
        f"checkpoints: {held_starts}): restore what is missing, and set run.keep_batches=0 to keep all batches of a run"
    )


def differing_tensors(folder: Path, weights: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that differ between the folder's safetensors files and `weights`; [] without the folder."""
    if not folder.exists():
        return []
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    missing = [f"{name} (missing)" for name in stored.keys() ^ weights.keys()]
    return missing + [name for name in stored.keys() & weights.keys() if not _same_bytes(stored[name], weights[name])]


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


if __name__ == "__main__":
    run_service(lambda: sys.exit(main(Path(sys.argv[1]), generation=GENERATION in sys.argv[2:])))
