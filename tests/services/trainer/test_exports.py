"""Exports of weights that would have to be gathered: they are written from the copy of their published version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.trainer import learner as learner_module
from tandem.trainer.weight_sender import WeightSender
from tests.support.trainer_ring import P, different_rewards, make_recipe, make_run, put_scored, train


def exports(folder: Path, url: str, **weights: Any) -> dict[str, bytes]:
    """The files with weights that a run with ZeRO stage 3 exports."""
    folder.mkdir()
    trainer = {"zero_stage": 3, "export_every": 2, "checkpoint_every": 3}
    recipe = make_recipe(folder, weights=weights, trainer=trainer)
    put_scored(make_run(url, recipe), different_rewards(4 * P))
    assert train(recipe, url)
    files = recipe.folder.glob("**/model.safetensors")
    return {str(file.relative_to(recipe.folder)): file.read_bytes() for file in files if "checkpoints" not in str(file)}


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_partitioned_weights_are_gathered_for_their_publication_and_not_once_more_for_an_export(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    gathered: list[dict[str, Any]] = []
    collect = learner_module.collect_weights

    def observed(*arguments: Any, **options: Any) -> Any:
        gathered.append(options)
        return collect(*arguments, **options)

    monkeypatch.setattr(learner_module, "collect_weights", observed)
    with monkeypatch.context() as patched:
        patched.setattr(WeightSender, "keeps_whole_weights", False)
        expected = exports(tmp_path / f"gathered-{encoding}", redis_url, encoding=encoding)
    assert len(gathered) == len(expected) == 3
    assert exports(tmp_path / f"copied-{encoding}", redis_url, encoding=encoding) == expected
    assert len(gathered) == 3
