"""Writes an encyclopedia of an invented country, and questions: `python examples/prepare_search.py OUTPUT_FOLDER`.

`corpus.jsonl` has a passage for each person, town and province. `train.parquet` and `test.parquet` have questions in
verl's schema, with ground truths as in Search-R1's data. Half of them need one passage. The others need two, since the
first one names what to look for next. No model knows these names, so the answers must be searched.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = (
    "Answer the question. You may search as often as you need to, one fact at a time. Then give the answer alone, "
    "between <answer> and </answer>."
)
STARTS = ("Ba", "Ce", "Do", "Fa", "Gri", "Ho", "Ka", "Lu", "Mi", "No", "Pra", "Ru", "Sta", "To", "Ve", "Zi")
MIDDLES = ("lan", "mor", "nis", "rel", "ska", "tan", "vek", "zor", "dri", "fen", "gul", "kar")
ENDS = ("da", "en", "ik", "ov", "sta", "um", "il", "ar")
TRADES = ("baker", "carpenter", "clockmaker", "fisher", "gardener", "miller", "painter", "surveyor", "tailor", "weaver")
NUM_PROVINCES, NUM_TOWNS, NUM_PERSONS, NUM_TEST = 12, 200, 1500, 200

Question = tuple[str, str]
"""A question and its answer."""


def main(output: Path, seed: int = 0) -> int:
    """Writes the three files into `output`; returns the exit code."""
    dice = random.Random(seed)
    names = invented_names(dice)
    provinces = [next(names) for _ in range(NUM_PROVINCES)]
    towns = {next(names): (dice.choice(provinces), dice.randrange(1100, 1900)) for _ in range(NUM_TOWNS)}
    persons = {f"{next(names)} {next(names)}": (dice.choice([*towns]), dice.choice(TRADES)) for _ in range(NUM_PERSONS)}
    output.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(passage) for passage in passages(provinces, towns, persons)]
    (output / "corpus.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    asked = list(questions(towns, persons))
    dice.shuffle(asked)
    for split, some in (("test", asked[:NUM_TEST]), ("train", asked[NUM_TEST:])):
        rows = [row(split, index, *question) for index, question in enumerate(some)]
        pq.write_table(pa.Table.from_pylist(rows), output / f"{split}.parquet")
        print(f"{output / split}.parquet: {len(rows)} questions")
    print(f"{output / 'corpus.jsonl'}: {len(lines)} passages")
    return 0


def invented_names(dice: random.Random) -> Iterator[str]:
    """Different names, in random order."""
    names = [start + middle + end for start in STARTS for middle in ("", *MIDDLES) for end in ENDS]
    names += [start + one + two + end for start in STARTS for one in MIDDLES for two in MIDDLES for end in ENDS]
    names = [*dict.fromkeys(names)]
    dice.shuffle(names)
    yield from names


def passages(
    provinces: list[str], towns: dict[str, tuple[str, int]], persons: dict[str, tuple[str, str]]
) -> Iterator[dict[str, str]]:
    for name in provinces:
        number = sum(province == name for province, _ in towns.values())
        yield {"title": name, "text": f"{name} is a province with {number} towns."}
    for name, (province, year) in towns.items():
        yield {"title": name, "text": f"{name} is a town in the province of {province}. It was founded in {year}."}
    for name, (town, trade) in persons.items():
        yield {"title": name, "text": f"{name} was a {trade}, born in the town of {town}."}


def questions(towns: dict[str, tuple[str, int]], persons: dict[str, tuple[str, str]]) -> Iterator[Question]:
    for number, (name, (town, trade)) in enumerate(persons.items()):
        province, year = towns[town]
        yield (f"In which town was {name} born?", town) if number % 2 else (f"What was the trade of {name}?", trade)
        if number % 2:
            yield f"In which province is the birthplace of {name}?", province
        else:
            yield f"In which year was the birthplace of {name} founded?", str(year)


def row(split: str, index: int, question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "tandem/search",
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n{question}"}],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": {"target": [answer]}},
        "extra_info": {"split": split, "index": index, "question": question},
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
