"""Answers of a run, trained or rejected: a full-text index of its newest batches in memory, single answers by token."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tandem.protos.codec import decode_group
from tandem.protos.errors import DataError
from tandem.protos.types import Prompt, ScoredTrajectory, Segment, TrajectoryGroup
from tandem.trainer.batch.record import read_advantages, read_record, recorded_versions
from tandem.trainer.batch.rejected import read_rejected

MOST_BATCHES = 500
"""The newest so many batches can be searched: the index is in memory."""
PAGE = 25
_BUDGET_SECONDS = 0.5  # for reading batches, in each search
_MOST_TOKENS = 20_000  # of an answer that is shown
_COLUMNS = "version, group_id, number, reward, fate, tokens, staleness, dropped, prompt, answer"
_MARKS = ", ".join("?" * len(_COLUMNS.split(", ")))


class Samples:
    """The recorded answers of one run. Thread-safe."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        unindexed = ", ".join(f"{name} UNINDEXED" for name in _COLUMNS.split(", ")[:-2])
        self._index.execute(f"CREATE VIRTUAL TABLE answers USING fts5({unindexed}, prompt, answer)")

    def search(self, words: str, fate: str, version: int | None, offset: int) -> dict[str, object]:
        """A page of answers that hold all the words, the newest batches first, and how much of the run is indexed."""
        with self._lock:
            versions = recorded_versions(self._folder)
            self._read(versions)
            self._read_rejected((versions[-1] if versions else 0) + 1)
            conditions, values = ["1"], list[object]()
            if words.strip(" \t\r\n\0"):
                conditions.append("answers MATCH ?")
                values.append(_match(words))
            for name, value in (("fate", fate), ("version", version)):
                if value not in ("", None):
                    conditions.append(f"{name} = ?")
                    values.append(value)
            where = " AND ".join(conditions)
            (found,) = self._index.execute(f"SELECT count(*) FROM answers WHERE {where}", values).fetchone()
            order = "ORDER BY version DESC, group_id, number LIMIT ? OFFSET ?"
            rows = self._index.execute(f"SELECT {_COLUMNS} FROM answers WHERE {where} {order}", [*values, PAGE, offset])
            names = _COLUMNS.split(", ")
            listed = [
                {**dict(zip(names, row, strict=True)), "prompt": _start(row[8]), "answer": _start(row[9])}
                for row in rows
            ]
            return {"found": found, "rows": listed, "indexed": len(self._seen), "batches": len(versions)}

    def _read(self, versions: Sequence[int]) -> None:
        """Indexes batches, the newest first, for a short time. Forgets those that a resumed run has yet to train."""
        newest = versions[-MOST_BATCHES:]
        for version in self._seen - set(newest):
            self._index.execute("DELETE FROM answers WHERE version = ?", [version])
            self._seen.discard(version)
        ends = time.monotonic() + _BUDGET_SECONDS
        for version in reversed(newest):
            if version not in self._seen:
                self._add(version, ((group, "") for group in self._groups(version)))
                self._read_rejected(version)
                self._seen.add(version)
            if time.monotonic() > ends:
                return

    def _read_rejected(self, version: int) -> None:
        """Indexes what was rejected for a batch, again if it was done before: the batch may still be filled."""
        self._index.execute("DELETE FROM answers WHERE version = ? AND dropped <> ''", [version])
        self._add(version, self._rejected(version))

    def _add(self, version: int, groups: Iterable[tuple[TrajectoryGroup, str]]) -> None:
        rows = [row for group, dropped in groups for row in _rows(version, group, dropped)]
        self._index.executemany(f"INSERT INTO answers({_COLUMNS}) VALUES ({_MARKS})", rows)

    def _rejected(self, version: int) -> Iterator[tuple[TrajectoryGroup, str]]:
        """Each group that was rejected while this batch was filled, and why."""
        for reason, payload in read_rejected(self._folder, version):
            with suppress(DataError):  # a damaged file: the others can be searched
                yield decode_group(payload), reason.replace("_", " ")

    def _groups(self, version: int) -> Iterator[TrajectoryGroup]:
        try:
            payloads = read_record(self._folder, version)[1]
        except DataError:
            return  # it is damaged, or was removed just now: the others can be searched
        yield from map(decode_group, payloads.values())

    def answer(self, version: int, group_id: str, number: int) -> dict[str, object]:
        """One answer with its tokens. Raises DataError if there is none."""
        payloads = read_record(self._folder, version)[1] if version in recorded_versions(self._folder) else {}
        own = [(decode_group(payloads[group_id]), "")] if group_id in payloads else self._rejected(version)
        group, dropped = next((found for found in own if found[0].group_id == group_id), (None, ""))
        row = (
            next((row for row in group.scored_rows if row.trajectory.trajectory_id == number), None) if group else None
        )
        if group is None or row is None:
            raise DataError(f"batch {version} holds no answer {group_id}/{number}")
        trajectory = row.trajectory
        return {
            "version": version,
            "group_id": group_id,
            "number": number,
            "fate": _fate(group, row, dropped),
            "dropped": dropped,
            "reward": row.reward,
            "breakdown": dict(row.breakdown),
            "unscored": [row.unscored_reason, row.unscored_detail] if row.unscored_reason else None,
            "advantage": read_advantages(self._folder, version).get((group_id, number)),
            "finish_reason": trajectory.finish_reason,
            "data_source": group.prompt.data_source,
            "ground_truth": json.dumps(group.prompt.ground_truth, ensure_ascii=False),
            "prompt": _text_of(group.prompt),
            "answer": trajectory.text,
            "segments": [self._tokens(segment) for segment in trajectory.segments],
            "others": [other.reward for other in group.scored_rows if other.trajectory.role == "policy"],
        }

    def _tokens(self, segment: Segment) -> list[list[object]]:
        """Text, version and log-prob of each sampled token of a segment; nothing without the model's tokenizer. Tokens
        that are no whole character are shown with the next one; tokens that the policy did not sample have no version.
        """
        if self._tokenizer is None:
            return []
        stream = DecodeStream(skip_special_tokens=False)
        begins = [(span.first_token, span.policy_version) for span in segment.spans]
        sampled = segment.loss_mask.nonzero()[0]
        first = int(sampled[0]) if len(sampled) else len(segment.ids)
        found: list[list[object]] = []
        for place in range(first, min(len(segment.ids), first + _MOST_TOKENS)):
            text = stream.step(self._tokenizer, int(segment.ids[place]))
            if text is None:
                continue
            version = next((version for begin, version in reversed(begins) if begin <= place), None)
            own = bool(segment.loss_mask[place])
            found.append([text, version if own else None, float(segment.behavior_logprobs[place]) if own else None])
        return found

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        file = self._model / "tokenizer.json"
        return Tokenizer.from_file(str(file)) if file.is_file() else None

    def close(self) -> None:
        self._index.close()


def _match(words: str) -> str:
    """A query of SQLite for rows with all these words; the last may be the beginning of one."""
    quoted = ['"' + word.replace('"', '""') + '"' for word in words.replace("\0", " ").split()]
    return " ".join(quoted) + "*"


def _rows(version: int, group: TrajectoryGroup, dropped: str) -> Iterator[tuple[object, ...]]:
    prompt = _text_of(group.prompt)
    for row in group.scored_rows:
        trajectory = row.trajectory
        tokens = sum(segment.num_loss_tokens for segment in trajectory.segments)
        oldest = min(
            (span.policy_version for segment in trajectory.segments for span in segment.spans), default=version
        )
        fixed = (version, group.group_id, trajectory.trajectory_id, row.reward)
        fate = _fate(group, row, dropped)
        yield (*fixed, fate, tokens, version - 1 - oldest, dropped, prompt, trajectory.text)


def _fate(group: TrajectoryGroup, row: ScoredTrajectory, dropped: str) -> str:
    """What became of an answer: `trained`; `equal rewards`, which is trained, too; `unscored`; `baseline`; or why its
    whole group was dropped. samples.js lists them.
    """
    if row.trajectory.role == "baseline":
        return "baseline"
    if row.reward is None:
        return "unscored"
    if dropped:
        return dropped
    rewards = {other.reward for other in group.scored_rows if other.trajectory.role == "policy"} - {None}
    return "equal rewards" if len(rewards) == 1 else "trained"


def _text_of(prompt: Prompt) -> str:
    if not prompt.messages:
        return f"({len(prompt.token_ids)} tokens)"
    return "\n\n".join(f"{_part(message, 'role')}: {_part(message, 'content')}" for message in prompt.messages)


def _part(message: Mapping[str, object], name: str) -> str:
    value = message.get(name, "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _start(text: str) -> str:
    return text if len(text) <= 160 else text[:160] + " …"
