"""A name from a caller, a row or a command line never becomes a path outside its folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from tandem.protos import reward_pb2, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import ConfigError, DataError, ScorerError
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import WeightManifest
from tandem.services.cli import app
from tandem.services.config import load_recipe
from tandem.services.data.dataset import load_prompts
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role, run_token
from tandem.trainer.weight_sender import WeightSender
from tests.support.dataset_files import verl_row, write_lines
from tests.support.redis_ring import new_run
from tests.support.reward_server import Request, Service, answers, code_of, serving
from tests.support.run_inputs import recipe_of, small_values, write_chat_model
from tests.support.sampler_server import serving_sampler
from tests.support.tiny_model import build_tiny_model
from tests.support.weight_ring import Policy

SEPARATED = ("../x", "..", "/etc/passwd", "a/b", "a\\b", "a\x00b", "a\nb", "a:b", "．．／x", "%2e%2e%2fx", "~", "é")
NAMES = (*SEPARATED, ".", "-x", " ", "x" * 5000)
SECONDS = 20.0


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


# ---- names in a recipe and on the command line ----


@pytest.mark.parametrize("name", [*NAMES, "x" * 65, "run\n"], ids=repr)
def test_a_run_id_is_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        recipe_of(small_values(tmp_path), run={"run_id": name})


@pytest.mark.parametrize("name", SEPARATED, ids=repr)
def test_a_namespace_of_jobs_is_a_plain_name(tmp_path: Path, name: str) -> None:
    if name != "..":  # a part of a key, not of a path
        with pytest.raises(ConfigError, match="namespace"):
            recipe_of(small_values(tmp_path), jobs={"namespace": name})


@pytest.mark.parametrize("command", ["status", "ledger", "token", "replay", "config", "run"])
@pytest.mark.parametrize(
    "name", [*(name for name in NAMES if "\x00" not in name), "x" * 300], ids=lambda name: repr(name)[:20]
)
def test_a_command_for_a_run_that_is_none_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command, "--", name])
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: ") and line.isprintable()
    assert tree(tmp_path) == set()


def test_a_recipe_whose_base_has_no_proper_name_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    for name in NAMES:
        recipe.write_text(f"base = {_toml(name)}\n")
        with pytest.raises(ConfigError):
            load_recipe(recipe)


def test_names_in_rows_become_no_paths(tmp_path: Path) -> None:
    rows = [
        {**verl_row("1 + 1 =", "2"), "data_source": name, "uid": name, "extra_info": {"index": name, "split": name}}
        for name in SEPARATED
    ]
    values = small_values(tmp_path)
    values["model"]["path"] = str(write_chat_model(tmp_path / "chat"))
    recipe = recipe_of(values, data={"train_file": str(write_lines(tmp_path / "rows.jsonl", rows))})
    before = tree(tmp_path)
    prompts, skipped = load_prompts(recipe.data.train_file, recipe)
    assert not skipped
    assert [prompt.group_id for prompt in prompts] == [f"0-{index}" for index in range(len(rows))]
    assert tree(tmp_path) == before


# ---- names in calls to the reward service ----


@pytest.fixture(scope="module")
def reward(redis_url: str) -> Iterator[Service]:
    with serving(redis_url, with_jobs=False) as one:
        yield one


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_a_job_id_is_32_digits_and_nothing_else(reward: Service, name: str) -> None:
    for call in (
        lambda: reward.job(name),
        lambda: reward.watch(name),
        lambda: reward.cancel(name),
        lambda: reward.stub.DeleteJob(reward_pb2.DeleteJobRequest(job_id=name), timeout=SECONDS),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert code_of(refused.value) == "NOT_FOUND"


def test_a_job_key_is_only_a_key(reward: Service) -> None:
    names = [name for name in NAMES if len(name.encode()) <= 200]
    jobs = {name: reward.open(name).job.job_id for name in names}
    assert len({*jobs.values()}) == len(names), "none stands for another"
    assert {name: reward.open(name).job.job_id for name in names} == jobs
    with pytest.raises(grpc.RpcError) as refused:
        reward.send([Request(header=Request.Header(idempotency_key="x" * 5000))])
    assert code_of(refused.value) == "INVALID_ARGUMENT"


def test_a_scorer_of_a_caller_is_no_file_and_no_module(reward: Service, tmp_path: Path) -> None:
    trace = tmp_path / "imported"
    file = tmp_path / "planted.py"
    file.write_text(f"open({str(trace)!r}, 'w')\ndef compute_score(*_): return 1.0\n")
    for name in (*NAMES, f"{file}:compute_score", "../planted.py:compute_score", "os:system", "planted:compute_score"):
        rubric = f"[[components]]\nscorer = {_toml(name)}\n"
        with pytest.raises(ScorerError), translated():
            reward.stub.Score(reward_pb2.ScoreRequest(items=answers("1"), rubric=rubric), timeout=SECONDS)
    assert not trace.exists()


def _toml(text: str) -> str:
    return '"' + "".join(f"\\u{ord(one):04x}" for one in text) + '"'


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_health_and_reflection_look_up_names_only(reward: Service, name: str) -> None:
    with grpc.insecure_channel(reward.server.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS)
        assert code_of(refused.value) == "NOT_FOUND"
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(file_by_filename=name)
        (reply,) = ask(iter([asked]), timeout=SECONDS)
        assert reply.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


# ---- folders in calls to a sampler ----


class Weights:
    """A sampler, and versions written to folders by a sender."""

    def __init__(self, address: str, token: str, sender: WeightSender, folder: Path) -> None:
        self.folder = folder
        self._address, self._token, self._sender = address, token, sender
        self.version = 0

    def written(self, folder: Path) -> WeightManifest:
        self.version += 1
        return self._sender.broadcast(self._sender.manifest(1, self.version, "disk", location=str(folder)), SECONDS)

    def update(self, manifest: WeightManifest) -> int:
        request = rollout_pb2.UpdateWeightsRequest(manifest=encode_manifest(manifest), timeout_seconds=SECONDS)
        with connect(self._address, self._token) as channel, translated():
            return rollout_pb2_grpc.RolloutServiceStub(channel).UpdateWeights(request, timeout=60).policy_version


@pytest.fixture(scope="module")
def weights(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weights]:
    place = tmp_path_factory.mktemp("weights")
    model = place / "model"
    build_tiny_model(model)
    buffer = new_run(redis_url)
    recipe = recipe_of(small_values(place / "recipe"))
    recipe.weights_folder.mkdir(parents=True)
    with serving_sampler(buffer, recipe, model) as address:
        token = run_token(buffer.secret(), Role.internal)
        yield Weights(address, token, WeightSender(Policy(model), bucket_bytes=1 << 20), recipe.weights_folder)


def test_a_sampler_reads_the_folder_of_its_run(weights: Weights) -> None:
    manifest = weights.written(weights.folder / "000001")
    assert weights.update(manifest) == weights.version


def test_a_sampler_reads_no_other_folder(weights: Weights) -> None:
    elsewhere = weights.folder.parent / "elsewhere"
    (weights.folder / "link").symlink_to(elsewhere)
    manifest = weights.written(elsewhere)
    for location in (
        str(elsewhere),
        str(weights.folder / "link"),
        str(weights.folder / ".." / "elsewhere"),
        str(weights.folder),
        "",
        *NAMES,
    ):
        with pytest.raises(DataError, match="weights folder"):
            weights.update(replace(manifest, location=location))


@pytest.mark.parametrize(
    "changes",
    [
        {"first_rank": 0},
        {"first_rank": 2},
        {"world_size": 2**31 - 1},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": float("inf")},
        {"timeout_seconds": -1.0},
    ],
    ids=str,
)
def test_a_sampler_joins_only_a_group_that_can_be(weights: Weights, changes: dict[str, float]) -> None:
    request = rollout_pb2.JoinWeightGroupRequest(host="127.0.0.1", first_rank=1, world_size=2, backend="gloo")
    request.timeout_seconds = 1.0
    for name, value in changes.items():
        setattr(request, name, value)
    with connect(weights._address, weights._token) as channel, pytest.raises(DataError), translated():
        rollout_pb2_grpc.RolloutServiceStub(channel).JoinWeightGroup(request, timeout=SECONDS)
