"""Arguments that a scorer refuses, and scorers that clients cannot name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import ScorerError
from tandem.reward.registry import SCORERS, make_spec
from tandem.reward.rubric.rubric import Catalogue

CHAT = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
GIVEN = {"judge": CHAT, "pairwise": CHAT, "remote": {"url": "http://127.0.0.1:1/"}}

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "judge": [
        ({"base_url": "127.0.0.1:8000"}, "base_url '127.0.0.1:8000' is no http:// or https:// URL"),
        ({"base_url": "file:///etc/passwd"}, "is no http://"),
        ({"base_url": "http://[::1"}, "is no http://"),
        ({"base_url": "http://me:pw@host/v1"}, "holds credentials"),
        ({"model": ""}, "arguments.model"),
        ({"api_key_env": "SURELY_NOT_SET"}, "environment variable SURELY_NOT_SET is not set"),
        ({"votes": 3}, "votes at temperature 0"),
        ({"votes": 17, "temperature": 1.0}, "votes must be at most max_concurrent"),
        ({"temperature": 3.0}, "temperature must be"),
        ({"temperature": "hot"}, "arguments.temperature: should be a number (got 'hot')"),
        ({"combine": "mode"}, "arguments.combine: there is no 'mode'"),
        ({"max_attempts": 0}, "arguments.max_attempts"),
        ({"deadline_seconds": 0.0}, "arguments.deadline_seconds"),
        ({"requests_per_minute": 1, "deadline_seconds": 30.0}, "wait longer than deadline_seconds"),
        ({"requests_per_minute": -1}, "arguments.requests_per_minute"),
        ({"max_spend": 1.0}, "max_spend needs prompt_price"),
        ({"extra_body": {"stream": True}}, "extra_body must not hold stream"),
        ({"template": "{question}"}, "template: it lacks {answer}"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"lowest": 1.0, "highest": 1.0}, "lowest 1 must be below highest 1"),
        ({"score_key": ""}, "set pattern or score_key"),
        ({"base_ur": "x"}, "did you mean reward.arguments.base_url?"),
    ],
    "pairwise": [
        ({"template": "{answer_a}"}, "template: it lacks {answer_b}"),
        ({"template": "{answer_a} {answer_b} {qestion}"}, "did you mean {question}"),
        ({"tie": "a"}, "a_wins, b_wins and tie must differ"),
        ({"opponents": -1}, "arguments.opponents"),
    ],
    "remote": [
        ({"url": "unix:/x"}, "url 'unix:/x' is no http:// or https:// URL"),
        ({"batch_size": 0}, "arguments.batch_size"),
        ({"batch_size": 2, "items_key": ""}, "batch_size above 1 needs items_key"),
        ({"fields": {"code": "answer"}}, "fields.code: 'answer' is none of data_source, solution"),
        ({"fields": {"code": "solution.x"}}, "fields.code"),
        ({"constants": {"group": 1}}, "constants.group is also a field of the item"),
        ({"labels": {"a": "b"}}, "arguments.labels"),
        ({"score_path": ""}, "arguments.score_path"),
        ({"deadline_seconds": 0}, "arguments.deadline_seconds"),
        ({"api_key_env": "SURELY_NOT_SET"}, "SURELY_NOT_SET is not set"),
    ],
    "group_rank": [
        ({"scorer": "numerc"}, "scorer 'numerc' is unknown"),
        ({"scorer": "regex", "arguments": {"pattern": "x"}}, "scorer 'regex' needs a worker process"),
        ({"scorer": "pairwise"}, "scorer 'pairwise' compares groups itself"),
        ({"scorer": "numeric", "arguments": {"tolerance": -1}}, "tolerance"),
    ],
    "reward_model": [
        ({"path": "/nowhere"}, "path /nowhere is not a folder with a config.json"),
        ({"path": "org/model"}, "path org/model is not a folder"),
        ({"label": -1}, "arguments.label"),
        ({"max_batch_tokens": 0}, "arguments.max_batch_tokens"),
        ({"timeout_seconds": 0}, "arguments.timeout_seconds"),
        ({"dtype": "int8"}, "arguments.dtype"),
    ],
    "code": [
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": math.inf}, "tolerance"),
        ({"max_tests": -1}, "max_tests"),
        ({"seconds_per_test": 0.0}, "seconds_per_test"),
        ({"seconds_per_test": 61.0}, "seconds_per_test"),
        ({"seconds_per_answer": math.inf}, "seconds_per_answer"),
        ({"memory_bytes": 1 << 20}, "memory_bytes"),
    ],
    "gsm8k": [({"last_characters": -1}, "last_characters")],
    "math_verify": [({"float_rounding": 16}, "float_rounding")],
    "tags": [
        ({"order": []}, "must name a tag"),
        ({"order": ["a", "a"]}, "named twice"),
        ({"order": ["<a>"]}, "is not the name of a tag"),
        ({"counts": {"search": [3, 2]}}, "fewest, most"),
    ],
    "format": [
        ({"order": []}, "must be given"),
        ({"parts": {"a": "."}}, "parts.a: order has no a, but think, answer"),
        ({"parts": {"answer": "("}}, "arguments.parts.answer: is not a regular expression"),
        ({"pattern": "["}, "arguments.pattern: is not a regular expression"),
    ],
    "multiple_choice": [
        ({"choices": "A"}, "two different letters"),
        ({"choices": "Aa"}, "two different letters"),
        ({"choices": "A]"}, "ASCII letters or digits"),
    ],
    "short_answer": [({"tag": "<answer>"}, "is not the name of a tag"), ({"max_tags": -1}, "max_tags")],
    "overlong": [
        ({"max_length": 5, "buffer": 6}, "buffer"),
        ({"max_length": 5, "buffer": 5, "factor": math.inf}, "factor"),
    ],
    "target_length": [({"target": -1}, "target"), ({"slope": 0.0}, "slope")],
    "repetition": [({"n": 0}, "arguments.n"), ({"penalty": -1.0}, "penalty")],
    "language": [({"language": "tlh"}, "'tlh' is unknown"), ({"scripts": ["Klingon"]}, "'Klingon' is unknown")],
    "json_schema": [
        ({"schema": "{"}, "schema is no JSON"),
        ({"schema": '{"type": "sandwich"}'}, "schema is no valid schema"),
    ],
}


@pytest.mark.parametrize(
    ("scorer", "wrong", "told"), [(scorer, *case) for scorer, cases in REFUSED.items() for case in cases]
)
def test_invalid_arguments_are_refused_in_one_line(
    tmp_path: Path, scorer: str, wrong: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {"path": str(tmp_path)} if scorer == "reward_model" else GIVEN.get(scorer, {})
    with pytest.raises(ScorerError) as caught:
        make_spec(scorer, {**given, **wrong})
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["judge", "pairwise", "group_rank", "remote", "reward_model"])
def test_a_client_cannot_name_addresses_and_folders(name: str) -> None:
    assert SCORERS[name].ISOLATION == "remote"
    with pytest.raises(ScorerError, match="a client cannot"):
        Catalogue(for_clients=True).spec(name, CHAT, "components[0]")
