"""Dataset files, alone, as a mixture, and checked by `tandem data check`: unusable rows are named and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import ConfigError, DataError, ModelError
from tandem.protos.types import Prompt, SamplingParameters, TrajectoryGroup
from tandem.services.commands.data_check import check_file, show
from tandem.services.config import parse_recipe
from tandem.services.config.recipe import TrainFile
from tandem.services.data.chat import ChatEncoder
from tandem.services.data.dataset import Dataset, Mixture, PromptBuilder, Row, RowFault, load_prompts, parse_row
from tests.support.dataset_files import BAD_ROWS, chat_folder, verl_row, write_lines, write_parquet
from tests.support.processes import run_python
from tests.support.run_inputs import recipe_of, small_values
from tests.support.tiny_model import CHAT_TEMPLATE, VOCABULARY

SAMPLING = SamplingParameters(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"))


def load(
    file: Path, model: Path, *, chat_template: str = "", limit: int | None = None
) -> tuple[list[Prompt], Counter[str]]:
    values = {
        "run": {"run_id": "any"},
        "model": {"path": str(model), "chat_template": chat_template},
        "data": {"train_file": str(file), "max_prompt_tokens": 200},
        "rollout": {"max_response_tokens": 8},
    }
    return load_prompts(str(file), parse_recipe(values), limit)


def decoded(ids: Any) -> str:
    return "".join(VOCABULARY[token] for token in ids)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_verls_files_load_unchanged(tmp_path: Path, model: Path, suffix: str) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2=?"}]
    rows = [verl_row("1+1=?", "2"), verl_row("2+2=?", "4", prompt=chat)]
    file = tmp_path / f"train.{suffix}"
    write_parquet(file, rows) if suffix == "parquet" else write_lines(file, rows)
    prompts, faults = load(file, model)
    assert not faults and [prompt.group_id for prompt in prompts] == ["0-0", "0-1"]
    first, second = prompts
    assert decoded(first.token_ids) == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    assert first.token_ids.dtype == np.int32
    assert (first.data_source, first.ability, first.ground_truth, first.num_samples) == ("arithmetic", "math", "2", 1)
    assert first.extra_info == {"split": "train", "index": 0} and first.sampling == SAMPLING
    assert [message["role"] for message in second.messages] == ["system", "user"]
    assert decode_group(encode_group(TrajectoryGroup(second))).prompt.messages == second.messages


def test_verls_parquet_structs_lose_their_absent_fields(tmp_path: Path, model: Path) -> None:
    """Structs hold the union of all fields; absent fields are None in the file and absent from the messages."""
    rows = [
        verl_row("a", {"target": ["x"]}, prompt=[{"role": "user", "content": "a"}]),
        verl_row("b", {"target": ["y", "z"]}, prompt=[{"role": "user", "content": "b", "name": "me"}]),
    ]
    (first, second), _ = load(write_parquet(tmp_path / "f.parquet", rows), model)
    assert first.messages == ({"role": "user", "content": "a"},)
    assert second.messages == ({"role": "user", "content": "b", "name": "me"},)
    assert second.ground_truth == {"target": ["y", "z"]}


def test_random_and_ordered_reading_agree(tmp_path: Path) -> None:
    rows = [verl_row(f"q{n}", str(n)) for n in range(3000)]
    dataset = Dataset(write_parquet(tmp_path / "f.parquet", rows))
    in_order = [row.ground_truth for row in dataset if isinstance(row, Row)]
    assert in_order == [str(n) for n in range(3000)]
    order = np.random.default_rng(0).permutation(3000)
    assert [dataset.row(int(n)).ground_truth for n in order[:500]] == [str(n) for n in order[:500]]


def test_every_bad_row_is_counted_by_reason(tmp_path: Path, model: Path) -> None:
    file = write_lines(
        tmp_path / "f.jsonl", [verl_row("1+1=?", 2), *(row for _, row in BAD_ROWS), verl_row("1+2=?", 0)]
    )
    prompts, faults = load(file, model)
    assert [(prompt.index, prompt.ground_truth) for prompt in prompts] == [(0, 2), (len(BAD_ROWS) + 1, 0)]
    assert faults == Counter(reason for reason, _ in BAD_ROWS)
    dataset = Dataset(file)
    for place, (reason, _) in enumerate(BAD_ROWS, 1):
        fault = dataset.row(place)
        if reason != "too_long":
            assert isinstance(fault, RowFault) and fault.reason == reason and fault.index == place and fault.detail


def test_a_row_may_lower_its_own_max_response_tokens(tmp_path: Path, model: Path) -> None:
    rows = [verl_row("a", "1"), *(verl_row("a", "1", extra_info={"max_response_tokens": limit}) for limit in (3, 99))]
    prompts, _ = load(write_lines(tmp_path / "rows.jsonl", rows), model)
    assert [prompt.sampling.max_tokens for prompt in prompts] == [8, 3, 8]


def test_training_prompts_are_sampled_as_the_recipe_says_and_evaluated_greedily(tmp_path: Path, model: Path) -> None:
    rollout = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "max_response_tokens": 8, "stop": ["x"]}
    file = write_lines(tmp_path / "rows.jsonl", [verl_row("a", "1")])
    recipe = recipe_of(small_values(tmp_path), model={"path": str(model)}, rollout=rollout)
    row = Dataset(str(file)).row(0)
    assert isinstance(row, Row)
    sampled = PromptBuilder(recipe, num_samples=2).build(row, 0)
    assert isinstance(sampled, Prompt)
    assert sampled.sampling == SamplingParameters(0.7, 0.9, 50, max_tokens=8, stop=("x",), min_p=0.1)
    (greedy,), _ = load_prompts(str(file), recipe)
    assert greedy.sampling == replace(SAMPLING, stop=("x",))


def test_a_limit_counts_usable_rows(tmp_path: Path, model: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", ["broken", *(verl_row(f"{n}", "1") for n in range(5)), "broken"])
    prompts, faults = load(file, model, limit=2)
    assert [prompt.index for prompt in prompts] == [1, 2] and faults.total() == 1


def test_rows_with_values_that_json_cannot_hold_are_faults() -> None:
    fault = parse_row(3, verl_row("a", b"bytes"))
    assert isinstance(fault, RowFault) and fault.reason == "malformed" and "JSON" in fault.detail


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("absent.parquet", None, "no such file"),
        ("text.parquet", b"hello", "is not a Parquet file"),
        ("cut.parquet", b"PAR1 and then nothing", "cannot be read"),
        ("empty.jsonl", b"", "holds no rows"),
        ("empty.parquet", b"", "is not a Parquet file"),
        ("text.jsonl", b"hello\nworld\n", "neither Parquet nor JSON lines (line 1 is not JSON"),
        ("binary.jsonl", bytes(range(256)), "neither Parquet nor JSON lines"),
        ("array.json", b'[{"prompt": []}]', "is one JSON array; write one object a line"),
        ("folder", "folder", "cannot be read (Is a directory)"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: bytes | str | None, told: str) -> None:
    file = tmp_path / name
    if content == "folder":
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        Dataset(file).row(0)
    assert told in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_or_damaged_columns_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.parquet"
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), file)
    with pytest.raises(
        DataError, match=r"has no column prompt \(it has question, answer\); write it in verl's columns"
    ):
        Dataset(file).row(0)
    write_parquet(file, [verl_row(f"q{n}" * 50, "1") for n in range(2000)])
    content = bytearray(file.read_bytes())
    content[10:2000] = b"\xff" * 1990
    file.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        Dataset(file).row(0)
    pq.write_table(pa.Table.from_pylist([verl_row("a", "1")]).slice(0, 0), file)
    with pytest.raises(DataError, match="holds no rows"):
        Dataset(file).row(0)


def test_no_usable_row_is_an_error(tmp_path: Path, model: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [verl_row("a" * 300, "1"), verl_row("b" * 300, "1"), verl_row("c", None)])
    with pytest.raises(DataError, match=r"no usable row \(2 too_long, 1 no_ground_truth; row 0: 319 tokens"):
        load(file, model)


def test_broken_chat_templates_are_refused(tmp_path: Path, model: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [verl_row("a", "1")])
    for template, told in (
        ("line one\n{% for m in messages %}{{ m.content }", ", line 2: unexpected '}'"),
        ("{% if %}", "line 1"),
        ("{{ messages | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ absent.field }}", "refuses every row"),
        ("{{ raise_exception('not for us') }}", "refuses every row of"),
    ):
        (tmp_path / "chat.jinja").write_text(template)
        with pytest.raises(ModelError) as caught:
            load(file, model, chat_template=str(tmp_path / "chat.jinja"))
        assert told in str(caught.value) and "chat.jinja" in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_that_the_template_refuses_is_a_fault(tmp_path: Path, model: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHAT_TEMPLATE
    )
    rows = [
        verl_row("a", "1"),
        verl_row("b", "1", prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]),
    ]
    prompts, faults = load(write_lines(tmp_path / "f.jsonl", rows), model, chat_template=str(template))
    assert len(prompts) == 1 and faults == {"refused_by_template": 1}


def test_model_folders_without_chat_files_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        ChatEncoder(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match="cannot be read"):
        ChatEncoder(str(model), str(tmp_path / "absent.jinja"))
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
        ChatEncoder(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"has no chat template; set model\.chat_template"):
        ChatEncoder(str(tmp_path))


def test_the_tokenizer_equals_autotokenizers_and_needs_no_torch(model: Path) -> None:
    chat = [{"role": "user", "content": "12 + 3"}]
    code = (
        "import sys, tandem.services.feed_service\n"
        "from tandem.services.data.chat import ChatEncoder\n"
        f"print(type((encoder := ChatEncoder({str(model)!r}))._tokenizer).__name__, *encoder.encode({chat!r}))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    other = AutoTokenizer.from_pretrained(model)
    text = other.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = other.encode(text, add_special_tokens=False)
    assert done.stdout.split() == [type(other).__name__, *map(str, ids)]


@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth"])
@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=["text", "messages"])
@pytest.mark.parametrize("parquet", [True, False])
def test_columns_of_trl_datasets_load(tmp_path: Path, column: str, prompt: Any, parquet: bool) -> None:
    write, name = (write_parquet, "d.parquet") if parquet else (write_lines, "d.jsonl")
    (row,) = Dataset(write(tmp_path / name, [{"prompt": prompt, column: "2"}]))
    assert isinstance(row, Row)
    assert (row.messages, row.ground_truth, row.extra_info) == (({"role": "user", "content": "1+1="},), "2", {})


def test_the_ground_truth_of_verls_column_wins_over_plain_columns() -> None:
    row = parse_row(0, {**verl_row("1+1=", "2"), "answer": "two, because ..."})
    assert isinstance(row, Row) and row.ground_truth == "2"


def questions(mixture: Mixture, epoch: int) -> list[str]:
    rows = [mixture.row(index, epoch) for index in range(len(mixture))]
    assert [row.index for row in rows] == list(range(len(mixture))), "every place of an epoch is another group"
    return [row.messages[0]["content"] for row in rows if isinstance(row, Row)]


def files(folder: Path, *weights: float) -> list[TrainFile]:
    """A file of four rows for each weight: a0 … a3, b0 … b3."""
    made = []
    for name, weight in zip("abc", weights, strict=False):
        file = write_lines(folder / f"{name}.jsonl", [verl_row(f"{name}{number}", "1") for number in range(4)])
        made.append(TrainFile(path=str(file), weight=weight))
    return made


def test_one_file_keeps_its_order_in_every_epoch(tmp_path: Path) -> None:
    mixture = Mixture(files(tmp_path, 1.0))
    assert questions(mixture, 0) == questions(mixture, 5) == ["a0", "a1", "a2", "a3"]


def test_an_epoch_repeats_each_file_by_its_weight(tmp_path: Path) -> None:
    mixture = Mixture(files(tmp_path, 2.0, 0.5))
    assert (len(mixture), mixture.num_rows) == (10, 8)
    assert Counter(questions(mixture, 0)) == {"a0": 2, "a1": 2, "a2": 2, "a3": 2, "b0": 1, "b1": 1}
    assert Counter(questions(mixture, 1))["b2"] == 1, "the next epoch goes on where this one stopped"
    used = Counter(question for epoch in range(4) for question in questions(mixture, epoch))
    assert set(used.values()) == {8, 2}


def test_a_fault_has_the_same_row_number_in_all_epochs(tmp_path: Path) -> None:
    (first,) = files(tmp_path, 1.0)
    bad = TrainFile(
        path=str(write_lines(tmp_path / "bad.jsonl", [verl_row("x", None), verl_row("y", "1")])), weight=2.0
    )
    mixture = Mixture([first, bad])
    fault = mixture.row(4, 0)
    assert isinstance(fault, RowFault) and fault.index == 0, "a fault names the row of its file"
    assert mixture.locate(4, 0) == mixture.locate(6, 0) == mixture.locate(4, 3) == 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"train_file": ""}, "data.train_file is missing"),
        ({"train": [{"path": "b.jsonl"}]}, "exclude each other"),
        ({"train_file": "", "train": [{"path": "b.jsonl", "weight": 0}]}, r"data\.train\[0\]\.weight"),
        ({"train_file": "", "train": [{"file": "b.jsonl"}]}, r"unknown key data\.train\[0\]\.file"),
    ],
)
def test_wrongly_configured_train_files_are_refused(tmp_path: Path, data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe_of(small_values(tmp_path), data=data)


# ---- tandem data check ----


def test_a_file_without_a_fault_exits_with_0(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_parquet(tmp_path / "good.parquet", [verl_row(f"{n}+1=?", str(n + 1), split="x") for n in range(30)])
    report = check_file(file, model_path=str(model), max_prompt_tokens=60)
    assert (report.num_rows, report.num_usable, report.faults) == (30, 30, [])
    assert (
        report.roles == {"user": 30} and report.data_sources == {"arithmetic": 30} and len(report.prompt_lengths) == 30
    )
    assert show(report, Console()) == 0
    told = capsys.readouterr().out
    assert "30 of 30 rows can be used; every row is fine" in told and "split (not read)" in told and "user 30" in told


def test_every_fault_is_found(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [verl_row("1+1=?", "2"), *(row for _, row in BAD_ROWS), verl_row("1+1=?", "2"), verl_row("1+1=?", "3")]
    file = write_lines(tmp_path / "bad.jsonl", rows)
    report = check_file(file, model_path=str(model), max_prompt_tokens=200)
    reasons = [*(reason for reason, _ in BAD_ROWS), "duplicate", "contradiction"]
    assert [(fault.index, fault.reason) for fault in report.faults] == list(enumerate(reasons, 1))
    assert report.num_usable == 3
    assert show(report, Console()) == 1
    told = capsys.readouterr().out
    assert f"3 of {len(rows)} rows can be used; {len(report.faults)} faults" in told
    assert "unknown_role" in told and "reward_model.ground_truth" in told


def test_lengths_are_checked_only_with_a_model(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [verl_row("a" * 5000, "1")])
    assert check_file(file).faults == []
    with pytest.raises(DataError, match="needs a model to count them"):
        check_file(file, max_prompt_tokens=10)


def test_a_long_list_of_faults_is_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(check_file(write_lines(tmp_path / "f.jsonl", [verl_row("[bold]a", "1")] * 50)), Console()) == 1
    told = capsys.readouterr().out
    assert "and 29 more" in told and "duplicate" in told and "98.0%" in told
