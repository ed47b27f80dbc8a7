"""`tandem ledger` and `tandem repair` on a run in Redis with a run folder, as a trainer that was killed leaves them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.protos.errors import RunFolderError
from tandem.services.buffer.history import group_notes
from tandem.services.buffer.orders import Orders
from tandem.services.cli import app
from tandem.services.commands import ledger_views
from tandem.services.config import Recipe
from tandem.services.run.inputs import record_inputs
from tandem.services.trainer import repair
from tandem.services.trainer.notes import NOTES_FILE, read_notes, write_notes
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER, trainer_lock
from tandem.services.trainer.takeover import Takeover
from tandem.trainer.batch.record import GROUPS_FILE, PLAN_FILE, record_folder
from tandem.trainer.checkpoints.state import FORMAT, STATE_FILE, CheckpointState, checkpoint_folder
from tests.support import redis_ring as ring
from tests.support.dataset_files import verl_row, write_lines
from tests.support.trainer_ring import P, Predecessor, make_recipe
from tests.support.waiting import eventually, looping


class Killed(Predecessor):
    """Version 1 is in a checkpoint and committed, version 2 is recorded and published, two groups are scored."""

    def __init__(self, recipe: Recipe, url: str) -> None:
        super().__init__(recipe, url)
        self.folder = recipe.folder
        self.write_checkpoint(1)
        group_ids = [group.group_id for group in self.groups[:P]]
        write_notes(self.buffer, self.folder, 1, group_ids)
        assert read_notes(self.folder, 1) == group_notes(self.buffer.connection, group_ids) != {}
        self.buffer.commit(self.incarnation, 1)
        self.train(2)

    def write_checkpoint(self, version: int) -> Path:
        folder = checkpoint_folder(self.folder / CHECKPOINTS_FOLDER, version, self.incarnation)
        folder.mkdir(parents=True)
        state = CheckpointState(version, version, "deepspeed", 1, 0, "float32", {}, {}, {}, self.incarnation)
        (folder / STATE_FILE).write_text(json.dumps({"format": FORMAT, **asdict(state)}))
        return folder

    def tandem(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of `tandem COMMAND RUN …`."""
        done = CliRunner().invoke(app, [arguments[0], str(self.folder), *arguments[1:]])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    def verify(self) -> tuple[list[str], list[str]]:
        """The violations and the notes of `tandem ledger RUN --verify`."""
        code, said = self.tandem("ledger", "--verify", "--json")
        told = json.loads(said)
        assert code == bool(told["violations"])
        return told["violations"], told["notes"]


@pytest.fixture
def run(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Killed]:
    monkeypatch.setattr(repair, "_HEARTBEAT_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(repair, "_LOCK_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    data = write_lines(tmp_path / "train.jsonl", [verl_row(f"{n}", str(n)) for n in range(8)])
    recipe = make_recipe(tmp_path, run={"redis_url": redis_url}, data={"train_file": str(data)})
    killed = Killed(recipe, redis_url)
    yield killed
    killed.buffer.close()


# ---- verify ----


def test_a_sound_run_is_called_sound(run: Killed) -> None:
    assert run.verify() == ([], [])
    code, said = run.tandem("ledger", "--verify")
    assert code == 0 and "sound: admitted = the sum over all states, and the folder holds the same" in said
    assert run.tandem("repair") == (0, "nothing to repair\n")


def _lose_a_record_but_not_its_version(run: Killed) -> None:
    with ring.losing_writes(run.buffer):
        run.train(3)
    run.buffer.connection.redis.hset(run.buffer.connection.key("meta"), "recorded_version", 3)


def _train_elsewhere(run: Killed) -> None:
    run.train(3)
    shutil.rmtree(record_folder(run.folder, 3))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


VIOLATIONS: dict[str, tuple[Callable[[Killed], object], str]] = {
    "a ledger that lost a record": (
        _lose_a_record_but_not_its_version,
        "2 groups (the first is 0-4) are recorded in version 3, and the ledger has them neither as trained in it nor",
    ),
    "a batch that is not in the folder": (_train_elsewhere, "the run folder ends with version 2, but the run's ledger"),
    "a plan that cannot be read": (
        lambda run: _cut(record_folder(run.folder, 2) / PLAN_FILE),
        f"000002/{PLAN_FILE} cannot be read",
    ),
    "payloads that cannot be read": (
        lambda run: _cut(record_folder(run.folder, 2) / GROUPS_FILE),
        f"000002/{GROUPS_FILE} cannot be read",
    ),
    "a record of the checkpoint's that is gone": (
        lambda run: shutil.copytree(record_folder(run.folder, 1), record_folder(run.folder, 9)),
        "batches/000003 is missing, but a later batch is recorded",
    ),
    "a group in two records": (
        lambda run: run.write_record(3, run.groups[:P]),
        "group 0-0 is recorded in versions 1 and 3",
    ),
    "a record under the number of another": (
        lambda run: shutil.copytree(record_folder(run.folder, 1), record_folder(run.folder, 3)),
        f"000003/{PLAN_FILE} is the plan of version 1",
    ),
    "a checkpoint that is gone": (
        lambda run: shutil.rmtree(run.folder / CHECKPOINTS_FOLDER),
        "the ledger has version 1 as committed, and the last checkpoint holds version 0",
    ),
    "a checkpoint whose state is torn": (
        lambda run: (run.write_checkpoint(2) / STATE_FILE).write_text("{}"),
        "copy it again, or remove it to go on from an earlier one",
    ),
    "a record of other groups": (
        lambda run: run.buffer.connection.redis.zadd(run.buffer.connection.key("trained"), {"0-4": 2}),
        "version 2 trained group 0-4, but no record of that version holds it",
    ),
    "a committed group without a record": (
        lambda run: shutil.copy(record_folder(run.folder, 2) / PLAN_FILE, record_folder(run.folder, 1) / PLAN_FILE),
        "2 groups (the first is 0-0) are committed, and no record in batches/ holds them",
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_what_ledger_and_folder_disagree_about_is_one_line(run: Killed, case: str) -> None:
    damage, says = VIOLATIONS[case]
    damage(run)
    violations, _ = run.verify()
    assert any(says in line for line in violations), violations
    assert len(violations) == len(set(violations)) and not any("\n" in line for line in violations)


def test_a_batch_that_is_on_disk_first_is_no_violation(run: Killed) -> None:
    with ring.losing_writes(run.buffer):
        run.train(3)
    assert run.verify() == ([], ["batches/000003 is not in the ledger yet: the trainer enters it"])


def test_a_checkpoint_without_its_state_is_refused_unless_a_later_one_is_complete(run: Killed) -> None:
    (run.write_checkpoint(2) / STATE_FILE).unlink()
    incomplete = f"000002-{run.incarnation} has no {STATE_FILE}, so it is not complete"
    remedy = f"{incomplete}: copy it again, or remove it to go on from version 1"
    (violation,), notes = run.verify()
    assert remedy in violation and notes == []
    with pytest.raises(RunFolderError, match=remedy):
        Takeover(run.recipe, run.buffer, 1, hands_over=True).prepare()
    code, said = run.tandem("repair")
    assert code == 1 and len(said.splitlines()) == 1 and "cannot be repaired: " in said and remedy in said
    run.train(3)
    run.write_checkpoint(3)
    violations, (note,) = run.verify()
    assert violations == [] and f"{incomplete} and no trainer reads it" in note


def test_records_that_were_removed_are_not_compared(run: Killed) -> None:
    shutil.rmtree(record_folder(run.folder, 1))
    assert run.verify() == ([], ["the records before version 2 were removed: their groups are not compared"])


@pytest.mark.parametrize("command", ["ledger", "repair"])
def test_a_ledger_of_another_run_or_schema_is_one_line(run: Killed, command: str) -> None:
    redis, key = run.buffer.connection.redis, run.buffer.connection.key("meta")
    redis.hset(key, "schema", 1)
    code, said = run.tandem(command)
    assert code == 2 and "has a ledger of schema 1" in said and "or start a new run" in said
    redis.rename(key, key + "-of-another")
    code, said = run.tandem(command)
    assert code == 2 and f"knows no run {run.buffer.run_id}; set TANDEM_REDIS_URL to the one it used" in said
    assert len(said.splitlines()) == 1


# ---- repair ----


def test_a_repair_says_each_step_and_leaves_a_sound_run(run: Killed) -> None:
    with ring.losing_writes(run.buffer):
        run.train(3)
    left = [run.folder / "hf.partial", run.folder / CHECKPOINTS_FOLDER / "000003-1.partial"]
    for folder in left:
        (folder / "engine").mkdir(parents=True)
    (only := run.folder / "exports" / "000001.retired").mkdir(parents=True)
    (torn := record_folder(run.folder, 2) / ".advantages.json.1f.tmp").write_text("{")
    run.buffer.admit([("0-6", b"prompt")], 7)
    ring.claim(run.buffer, "prompts")
    steps = [
        f"remove {left[0]}, which a writer that was killed has left",
        f"remove {left[1]}, which a writer that was killed has left",
        f"remove {torn}, which a writer that was killed has left",
        "return 1 lease of rollout-0, which is gone, to the queue",
        "set the ledger to the checkpoint of version 1, and enter versions 2 to 3, as a trainer that starts",
    ]
    before = run.buffer.counts()
    assert run.tandem("repair", "--dry-run") == (0, "".join(f"would {step}\n" for step in steps))
    assert all(path.exists() for path in (*left, torn)) and run.buffer.counts() == before
    assert run.tandem("repair") == (0, "".join(f"{step}\n" for step in steps))
    assert not any(path.exists() for path in (*left, torn)) and only.exists(), "it is the only copy"
    counts = run.buffer.counts()
    assert (counts["committed"], counts["trained"], counts["prompts_waiting"]) == (P, 2 * P, 1)
    assert run.verify() == ([], []) and run.tandem("repair") == (0, "nothing to repair\n")


@pytest.mark.parametrize("case", ["a ledger that lost a record", "a checkpoint that is gone"])
def test_what_a_rollback_sets_right_is_repaired(run: Killed, case: str) -> None:
    VIOLATIONS[case][0](run)
    assert run.verify()[0]
    code, said = run.tandem("repair")
    assert code == 0 and "set the ledger to the checkpoint of version" in said
    assert run.verify() == ([], [])


@pytest.mark.parametrize(
    "case",
    [
        "a batch that is not in the folder",
        "payloads that cannot be read",
        "a group in two records",
        "a record under the number of another",
    ],
)
def test_what_cannot_be_repaired_is_named_and_nothing_is_changed(run: Killed, case: str) -> None:
    damage, says = VIOLATIONS[case]
    damage(run)
    before = run.buffer.counts(), run.buffer.connection.hash("states")
    code, said = run.tandem("repair")
    assert code == 1 and "cannot be repaired: " in said and says in said
    assert (run.buffer.counts(), run.buffer.connection.hash("states")) == before


@pytest.mark.parametrize("arguments", [("--dry-run",), ()], ids=["dry run", "repair"])
def test_what_a_rollback_leaves_is_named_before_and_after_it(run: Killed, arguments: Sequence[str]) -> None:
    _lose_a_record_but_not_its_version(run)
    run.buffer.connection.redis.setbit(run.buffer.connection.key("bits:0:committed"), 0, 0)  # 0-0, of version 1
    code, said = run.tandem("repair", *arguments)
    step, *beyond = said.splitlines()
    assert code == 1 and "set the ledger to the checkpoint of version 1, and enter versions 2 to 3" in step
    assert "cannot be repaired: group 0-0 is recorded in version 1, and the ledger has it neither as" in beyond[0]
    assert not any("version 3" in line for line in beyond), "the rollback enters it"


def test_a_ledger_that_contradicts_itself_is_built_anew_from_the_records(run: Killed) -> None:
    run.buffer.connection.redis.delete(run.buffer.connection.key("payload:0-4"))
    code, said = run.tandem("repair")
    assert code == 1 and "group 0-4 (scored_waiting) has no payload" in said
    assert f"remove the keys tandem:{{{run.buffer.run_id}}}:* from Redis and go on by `tandem run" in said
    run.buffer.delete()
    run.buffer.create(
        groups_per_batch=P,
        staleness_budget=9,
        target_groups=4 * P,
        failure_budget={"infrastructure": 1, "data": 1},
        resume=True,
    )
    assert "as a trainer that starts" in run.tandem("repair")[1]
    counts = run.buffer.counts()
    assert (counts["committed"], counts["trained"]) == (P, P) and run.verify() == ([], [])
    offered = [(f"0-{index}", b"prompt") for index in range(6)]
    assert run.buffer.admit(offered, 6) == 6 and run.buffer.counts()["prompts_waiting"] == 2, "only the others are new"


def test_a_run_that_runs_is_not_repaired(run: Killed, monkeypatch: pytest.MonkeyPatch) -> None:
    (left := run.folder / "hf.partial").mkdir()
    with trainer_lock(run.folder):
        code, said = run.tandem("repair")
    assert code == 2 and "a run is not repaired while it runs; stop it by `tandem stop" in said
    monkeypatch.setattr(repair, "_HEARTBEAT_WAIT_SECONDS", 10.0)
    with looping(lambda stop: [run.buffer.heartbeat("feed", {}) for _ in iter(lambda: stop.wait(0.05), True)]):
        code, said = run.tandem("repair")
    assert code == 2 and "stop it by" in said and left.exists()


# ---- one group, dropped groups, watch ----


def test_the_life_of_a_group_is_told_from_admission_to_checkpoint(run: Killed) -> None:
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "optimizer_step": 7}\n')
    code, said = run.tandem("ledger", "--group", "0-1")
    assert code == 0
    for line in (
        "0-1: committed",
        f"epoch 0, row 1 of {run.folder.parent / 'train.jsonl'}",
        "0, 1, 1, 0 (4 of 4 answers are scored)",
        "version 1 (batches/000001), recorded by incarnation 1, trained by optimizer step 7",
        f"checkpoints/000001-{run.incarnation} is the first that contains it",
    ):
        assert line in said, (line, said)
    assert "4 answers sampled by version 0" in said
    topics = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines()}
    assert topics["admitted"].startswith("20") and topics["sampled"].startswith("by rollout-0, which claimed it 20")
    assert topics["scored"].startswith("by reward, which claimed it 20") and "leases" not in topics
    (record_folder(run.folder, 1) / NOTES_FILE).unlink()
    assert "leases      the record does not say" in run.tandem("ledger", "--group", "0-1")[1]
    trained = run.tandem("ledger", "--group", "0-2")[1]
    assert "0-2: trained in version 2, not committed" in trained and "by reward, which claimed it 20" in trained
    assert "none yet" in trained and "not trained yet" in trained
    told = json.loads(run.tandem("ledger", "--group", "0-4", "--json")[1])
    assert told["group"] == ["0-4: scored, waiting"] and told["sampled"][0].startswith("by rollout-0, ")


def test_the_retries_of_a_group_in_progress_are_told(run: Killed) -> None:
    run.buffer.admit([("0-6", b"prompt")], 7)
    (claim,) = ring.claim(run.buffer, "prompts")
    run.buffer.release(claim, "unsampleable", "data", "the prompt is [too] long")
    ring.claim(run.buffer, "prompts")
    said = run.tandem("ledger", "--group", "0-6")[1]
    assert "now by rollout-0" in said and "by rollout-0 (prompts): unsampleable: the prompt is [too] long" in said


def test_a_row_is_not_named_from_other_data_than_the_runs(run: Killed) -> None:
    record_inputs(run.recipe, run.buffer)
    data = run.folder.parent / "train.jsonl"
    data.write_text(data.read_text().splitlines(keepends=True)[0])
    code, said = run.tandem("ledger", "--group", "0-1", "--json")
    (prompt,) = json.loads(said)["prompt"]
    assert code == 0 and prompt.startswith(f"epoch 0, place 1 of the epoch (data.train_file: {data} was ")
    assert "put back what the run began with" in prompt


@pytest.mark.parametrize("group_id", ["0-99", "nonsense", "0-1;2"])
def test_a_group_that_never_was_is_one_line(run: Killed, group_id: str) -> None:
    code, said = run.tandem("ledger", "--group", group_id)
    assert code == 2 and len(said.splitlines()) == 1


def test_dropped_groups_are_listed_with_reason_row_and_error(run: Killed) -> None:
    assert run.tandem("ledger", "--dropped") == (0, "no group was dropped\n")
    run.buffer.admit([("0-6", b"prompt"), ("0-7", b"prompt")], 8)
    for _ in range(2):
        failing, other = sorted(ring.claim(run.buffer, "prompts", 2), key=lambda claim: claim.group_id)
        run.buffer.release(failing, "crashed", "data", "ValueError: [bad] row")
        run.buffer.release(other, "shutdown", "voluntary")
    assert "[bad] row; set aside once another group is scored" in run.tandem("ledger", "--group", "0-6")[1]
    ring.move(run.buffer, "prompts")
    ring.move(run.buffer, "generated")
    why = "crashed: ValueError: [bad] row"
    row = f"row 6 of {run.folder.parent / 'train.jsonl'}"
    code, said = run.tandem("ledger", "--dropped")
    assert code == 0 and f"set aside: group 0-6, {row}: {why}\n" in said
    assert ["crashed", "1", "0-6", "ValueError: [bad] row"] == said.splitlines()[1].split(maxsplit=3)
    told = json.loads(run.tandem("ledger", "--dropped", "--json")[1])
    assert told == {"dropped": {"crashed": ["0-6"]}, "set_aside": [{"group": "0-6", "row": row, "why": why}]}
    assert f"{why}; set aside, so no later epoch admits its row" in run.tandem("ledger", "--group", "0-6")[1]
    assert "prompts set aside: 1, see `tandem ledger " in run.tandem("ledger")[1]


def test_the_ledger_is_watched_until_the_run_ends(run: Killed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_views, "_WATCH_SECONDS", 0.05)
    said = io.StringIO()
    with looping(lambda _: ledger_views.watch_ledger(run.folder, Console(file=said, width=200))):
        eventually(lambda: said.getvalue().count("prompts_waiting") >= 2)
        assert "VIOLATION" not in said.getvalue()
        run.buffer.connection.redis.delete(run.buffer.connection.key("payload:0-4"))
        eventually(lambda: "VIOLATION: group 0-4" in said.getvalue())
        Orders(run.buffer.connection).end_run("finished")
    code, text = run.tandem("ledger", "--watch", "--dropped")
    assert code == 2 and "at a time" in text
