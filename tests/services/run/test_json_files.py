"""Files of JSON lines: what a reader sees while they grow, and after a line was torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.services.run.json_files import JsonLines, JsonTail


def test_a_tail_gives_whole_lines_once_and_starts_over_with_a_new_file(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    tail = JsonTail(file)
    assert tail.read() == ([], False)
    file.write_text('{"a": 1}\n{"a": 2')
    assert tail.read() == ([{"a": 1}], True)
    with open(file, "a") as out:
        out.write("}\n")
    assert tail.read() == ([{"a": 2}], False)
    assert tail.read() == ([], False)
    other = tmp_path / "other"
    other.write_text('{"a": 9}\n')
    other.replace(file)
    assert tail.read() == ([{"a": 9}], True)


@pytest.mark.parametrize("before", ["", '{"a":1}\n'])
def test_a_torn_line_is_cut_off_before_the_next_one(tmp_path: Path, before: str) -> None:
    file = tmp_path / "lines.jsonl"
    lines, tail = JsonLines(file), JsonTail(file)
    file.write_text(before + '{"a": "torn by a full di')
    whole = [{"a": 1}] if before else []
    assert lines.read() == whole and tail.read()[0] == whole
    lines.append({"a": 2})
    assert lines.read() == [*whole, {"a": 2}]
    assert tail.read() == ([{"a": 2}], False)
    lines.append({"a": 3})
    assert file.read_text() == before + '{"a":2}\n{"a":3}\n'
