"""docs/algorithms.md has a row for every name, every paper that the code names, only files that exist, and figures that
were measured.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from typing import get_args

import pytest

from tandem.trainer.aggregation_options import Aggregation
from tandem.trainer.config import TrainerConfig
from tandem.trainer.estimators.options import NAMES_ELSEWHERE as ESTIMATORS_ELSEWHERE
from tandem.trainer.estimators.options import estimator_models
from tandem.trainer.kl_options import KlEstimator
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.off_policy.presets import PRESETS
from tandem.trainer.policy_losses.options import NAMES_ELSEWHERE as LOSSES_ELSEWHERE
from tandem.trainer.policy_losses.options import loss_models
from tandem.trainer.selection_options import OverlongPenalty, PolicyFiltration, SelectionOptions
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "algorithms.md").read_text()
MEASURED = "## What is proven, and what is measured"
PAPER = re.compile(r"arXiv[: ]*(\d{4}\.\d{5})")

Row = list[str]


def section(heading: str) -> str:
    """The text below a heading, up to the next one of its kind."""
    level = heading.split()[0]
    return re.split(rf"^{level} ", PAGE.split(f"\n{heading}\n")[1], flags=re.M)[0]


def rows(heading: str) -> list[Row]:
    """The cells of the table below a heading, head and rule left out."""
    found = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in section(heading).splitlines()
        if line.startswith("|")
    ]
    assert len({len(row) for row in found}) == 1, f"{heading}: a table with a cell too many"
    return found[2:]


def names(cells: Iterable[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("## Advantages", list(estimator_models())),
        ("## Policy losses", list(loss_models())),
        ("## Aggregation", list(get_args(Aggregation))),
        ("### Presets", list(PRESETS)),
        ("## KL and entropy", list(get_args(KlEstimator))),
        ("## Selection", list(SelectionOptions.model_fields)),
    ],
)
def test_every_name_has_a_row_and_every_row_a_name(heading: str, known: list[str]) -> None:
    assert sorted(names(row[0] for row in rows(heading))) == sorted(known)


@pytest.mark.parametrize("heading", ["## Advantages", "## Policy losses"])
def test_every_row_says_formula_paper_file_and_use(heading: str) -> None:
    folder = "trainer/estimators/" if heading == "## Advantages" else "trainer/policy_losses/"
    for row in rows(heading):
        (name,) = names(row[:1])
        file, papers = names([row[-2]])[0], set(re.findall(r"\[(\d{4}\.\d{5})\]", row[-3]))
        assert all(row), name
        assert file.startswith(folder) and f"def {name}(" in (ROOT / file).read_text(), f"{name} is not in {file}"
        assert papers <= set(PAPER.findall((ROOT / file).read_text())), f"{name}: a paper that its file does not name"
        assert papers, name


def test_every_key_of_a_selection_and_every_method_is_said() -> None:
    said = set(names([section("## Selection")]))
    methods = get_args(PolicyFiltration.model_fields["method"].annotation)
    assert {*OverlongPenalty.model_fields, *methods, "resample"} - {"beyond"} <= said
    assert 'beyond = "ramp"' in said


def test_what_the_table_of_presets_says_is_what_they_are() -> None:
    for row in rows("### Presets"):
        (name,) = names(row[:1])
        options = CorrectionOptions(preset=name)
        assert row[1] == options.proximal, name
        assert row[4] == ("no" if options.needs_whole_batch else "yes"), name
        assert (row[2] == "1") == (options.weights.level == "none"), name
        assert (row[3] == "–") == (not options.tests), name
        assert row[6].startswith("ratio-free") == options.needs_ratio_free_loss, name


def test_every_paper_that_the_code_names_is_in_the_page_and_every_link_is_what_it_says() -> None:
    papers = {paper for file in (ROOT / "trainer").rglob("*.py") for paper in PAPER.findall(file.read_text())}
    links = dict(re.findall(r"\[(\d{4}\.\d{5})\]\(([^)]+)\)", PAGE))
    assert papers == set(links)
    assert all(link == f"https://arxiv.org/abs/{paper}" for paper, link in links.items())


def test_names_of_other_trainers_stand_in_the_row_of_ours() -> None:
    table = {name: row[0] for row in rows("## Names elsewhere") for name in names(row[:1])}
    ours = [re.findall(r"`([^`]+)`(?: \(([^)]*)\))?", row[0]) for row in rows("## Names elsewhere")]
    aliases = {(name, alias) for row in ours for name, others in row for alias in names([others])}
    elsewhere = {(ours, alias) for known in (ESTIMATORS_ELSEWHERE, LOSSES_ELSEWHERE) for alias, ours in known.items()}
    assert aliases == elsewhere
    assert set(estimator_models()) | set(loss_models()) <= set(table)


def test_the_examples_are_what_a_recipe_takes() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    assert len(examples) >= 3
    for example in examples:
        assert TrainerConfig(**tomllib.loads(example)["trainer"]) != TrainerConfig()


def test_links_within_the_page_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings


def test_figures_are_those_of_the_records_and_of_all_that_is_measured() -> None:
    said = {names(row[2:])[0].removeprefix("benchmarks/records/"): row[1] for row in rows(MEASURED)}
    records = {name: json.loads((ROOT / "benchmarks" / "records" / name).read_text()) for name in said}
    assert set(records["estimator_cost.json"]["equal"]) == set(estimator_models())
    assert set(records["loss_cost.json"]["losses"]) == set(loss_models())
    (sizes,) = (row[0] for row in rows(MEASURED) if "chunked_logprobs.json" in row[2])
    assert [f"{one['hidden']}" for one in records["chunked_logprobs.json"]["rows"]] == re.findall(
        r"\d+", sizes.partition("hidden")[2]
    )
    estimators = records["estimator_cost.json"]["equal"].values()
    assert said == {
        "estimator_cost.json": f"{max(one['ratio'] for one in estimators):.2f}",
        "loss_cost.json": f"{records['loss_cost.json']['worst_ratio']:.2f}",
        "chunked_logprobs.json": f"{records['chunked_logprobs.json']['memory_ratio']:.2f}",
        "packing.json": f"{records['packing.json']['efficiency_min']:.2f}",
    }
