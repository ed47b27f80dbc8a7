"""docs/algorithms.md names every algorithm and paper in the code, and its links and figures are correct."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from typing import get_args

import pytest

from tandem.trainer.algorithm import Aggregation, KlEstimator, OverlongPenalty, PolicyFiltration, SelectionOptions
from tandem.trainer.config import TrainerConfig
from tandem.trainer.estimators.options import NAMES_ELSEWHERE as ESTIMATORS_ELSEWHERE
from tandem.trainer.estimators.options import estimator_models
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.off_policy.presets import PRESETS
from tandem.trainer.policy_losses.options import NAMES_ELSEWHERE as LOSSES_ELSEWHERE
from tandem.trainer.policy_losses.options import loss_models
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "algorithms.md").read_text()
MEASURED = "## What is proven, and what is measured"
PAPER = re.compile(r"arXiv[: ]*(\d{4}\.\d{5})")
EVALUATION = ROOT / "trainer" / "sample_metrics.py"  # its papers are on a page of their own

Row = list[str]


def section(heading: str) -> str:
    """The text below a heading, up to the next heading of its level."""
    level = heading.split()[0]
    return re.split(rf"^{level} ", PAGE.split(f"\n{heading}\n")[1], flags=re.M)[0]


def rows(heading: str) -> list[Row]:
    """The rows of the table below a heading, without the head and the rule."""
    found = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in section(heading).splitlines()
        if line.startswith("|")
    ]
    assert len({len(row) for row in found}) == 1, f"{heading}: a table with a cell too many"
    return found[2:]


def names(cells: Iterable[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def entries(heading: str) -> dict[str, dict[str, str]]:
    """The list below a heading by bold name: the text after the name as `""`, and each `- Key: text` below it."""
    found: dict[str, dict[str, str]] = {}
    for item in re.split(r"^- ", section(heading), flags=re.M)[1:]:
        if match := re.match(r"\*\*`(\w+)`\*\*(.*)", item):
            fields = {"": match[2]}
            for line in re.split(r"^  - ", item.partition("\n\n")[0], flags=re.M)[1:]:
                key, _, text = " ".join(line.split()).partition(": ")
                fields[key] = text
            found[match[1]] = fields
    return found


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("## Aggregation", list(get_args(Aggregation))),
        ("### Presets", list(PRESETS)),
        ("## KL and entropy", list(get_args(KlEstimator))),
    ],
)
def test_a_table_has_one_row_per_name(heading: str, known: list[str]) -> None:
    assert sorted(names(row[0] for row in rows(heading))) == sorted(known)


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("## Advantages", list(estimator_models())),
        ("## Policy losses", list(loss_models())),
        ("## Selection", list(SelectionOptions.model_fields)),
    ],
)
def test_a_list_has_one_entry_for_each_name(heading: str, known: list[str]) -> None:
    assert sorted(entries(heading)) == sorted(known)


def test_every_preset_names_its_origin() -> None:
    _, _, origins = section("### Presets").partition("Origin and use")
    assert sorted(names(re.findall(r"^- ((?:`\w+`(?:, )?)+):", origins, flags=re.M))) == sorted(PRESETS)


@pytest.mark.parametrize(
    ("heading", "folder", "keys"),
    [
        ("## Advantages", "trainer/estimators/", {"", "Formula", "Group of one", "Paper", "Use"}),
        ("## Policy losses", "trainer/policy_losses/", {"", "Formula", "Paper", "Use"}),
    ],
)
def test_an_entry_names_formula_paper_file_and_use(heading: str, folder: str, keys: set[str]) -> None:
    for name, entry in entries(heading).items():
        assert entry.keys() == keys and all(entry.values()), name
        (file,) = names([entry[""]])
        text = (ROOT / file).read_text("utf-8")
        assert file.startswith(folder) and f"def {name}(" in text, f"{name} is not in {file}"
        papers = set(re.findall(r"\[(\d{4}\.\d{5})\]", entry["Paper"]))
        assert papers and papers <= set(PAPER.findall(text)), f"{name}: {file} does not name the paper"


def test_a_selection_names_effect_paper_and_use() -> None:
    assert all(entry.keys() == {"", "Effect", "Paper", "Use"} for entry in entries("## Selection").values())


def test_the_selection_section_names_every_key_and_method() -> None:
    said = set(names([section("## Selection")]))
    methods = get_args(PolicyFiltration.model_fields["method"].annotation)
    assert {*OverlongPenalty.model_fields, *methods, "resample"} - {"beyond"} <= said
    assert 'beyond = "ramp"' in said


def test_the_table_of_presets_agrees_with_their_options() -> None:
    for row in rows("### Presets"):
        (name,) = names(row[:1])
        options = CorrectionOptions(preset=name)
        assert row[1] == options.proximal, name
        assert row[4] == ("no" if options.needs_whole_batch else "yes"), name
        assert (row[2] == "1") == (options.weights.level == "none"), name
        assert (row[3] == "–") == (not options.tests), name
        assert row[5] == ("yes" if options.needs_ratio_free_loss else ""), name


def test_the_page_links_every_paper_that_the_code_names() -> None:
    files = (file for file in (ROOT / "trainer").rglob("*.py") if file != EVALUATION)
    papers = {paper for file in files for paper in PAPER.findall(file.read_text("utf-8"))}
    links = dict(re.findall(r"^\[(\d{4}\.\d{5})\]: (\S+)$", PAGE, flags=re.M))
    assert papers == set(links) == set(re.findall(r"\[(\d{4}\.\d{5})\](?!:)", PAGE))
    assert all(link == f"https://arxiv.org/abs/{paper}" for paper, link in links.items())
    page = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    assert set(PAPER.findall(EVALUATION.read_text("utf-8"))) == set(re.findall(r"arxiv.org/abs/(\d{4}\.\d{5})", page))


def test_the_accepted_names_of_other_trainers_are_listed() -> None:
    text, *trainers = re.split(r"^### From .*$", section("## Names elsewhere"), flags=re.M)
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    aliases = {(names([ours])[0], alias) for ours, others in cells for alias in names([others])}
    elsewhere = {(ours, alias) for known in (ESTIMATORS_ELSEWHERE, LOSSES_ELSEWHERE) for alias, ours in known.items()}
    assert aliases == elsewhere
    assert len(trainers) == 4


def test_the_examples_are_valid_trainer_tables() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    assert len(examples) >= 3
    for example in examples:
        assert TrainerConfig(**tomllib.loads(example)["trainer"]) != TrainerConfig()


def test_links_within_the_page_lead_to_headings() -> None:
    headings = {
        re.sub(r"[^a-z -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings


def test_figures_match_the_records_and_the_records_cover_every_model() -> None:
    said = {names(row[2:])[0].removeprefix("benchmarks/records/"): row[1] for row in rows(MEASURED)}
    records = {name: json.loads((ROOT / "benchmarks" / "records" / name).read_text()) for name in said}
    assert set(records["estimator_cost.json"]["equal"]) == set(estimator_models())
    assert set(records["loss_cost.json"]["losses"]) == set(loss_models())
    (sizes,) = (row[0] for row in rows(MEASURED) if "chunked_logprobs.json" in row[2])
    assert [f"{one['hidden']}" for one in records["chunked_logprobs.json"]["rows"]] == re.findall(
        r"\d+", sizes.partition("hidden")[2]
    )
    estimators = records["estimator_cost.json"]["equal"].values()
    learner = f"float32 stage {records['learner.json']['auto']['float32']}"
    assert said == {
        "estimator_cost.json": f"{max(one['ratio'] for one in estimators):.2f}",
        "loss_cost.json": f"{records['loss_cost.json']['worst_ratio']:.2f}",
        "chunked_logprobs.json": f"{records['chunked_logprobs.json']['memory_ratio']:.2f}",
        "learner.json": f"{records['learner.json']['ratio_to_torch'][learner]:.2f}",
        "packing.json": f"{records['packing.json']['efficiency_min']:.2f}",
        "shared_prompts.json": f"{records['shared_prompts.json']['workloads']['prompts']['saved_over_ideal']:.2f}",
    }
