"""The RayJob of KubeRay. Its pods and its network policy are checked against the schemas of Kubernetes; KubeRay's own
fields against the names in KubeRay 1.6, because its schema is not among the installed packages.
"""

from __future__ import annotations

import copy
import importlib.metadata
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from tandem.services.cli import app
from tests.support.paths import ROOT

VERSION = "1.37"
FIELDS = {
    "spec": {
        *("entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "submissionMode", "rayClusterSpec", "suspend"),
        *("ttlSecondsAfterFinished", "activeDeadlineSeconds", "submitterPodTemplate", "runtimeEnvYAML", "metadata"),
    },
    "rayClusterSpec": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"},
    "headGroupSpec": {"rayStartParams", "template", "serviceType", "resources", "labels"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}
Manifest = dict[str, Any]


@pytest.fixture
def manifests() -> dict[str, Manifest]:
    text = (ROOT / "deploy" / "ray" / "rayjob.yaml").read_text()
    return {one["kind"]: copy.deepcopy(one) for one in yaml.safe_load_all(text)}


def groups(job: Manifest) -> Iterator[tuple[str, Manifest]]:
    cluster = job["spec"]["rayClusterSpec"]
    yield "headGroupSpec", cluster["headGroupSpec"]
    yield from (("workerGroupSpecs", group) for group in cluster["workerGroupSpecs"])


def check_fields(job: Manifest) -> None:
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"} and job["apiVersion"] == "ray.io/v1"
    parts: list[tuple[str, Mapping[str, Any]]] = [
        ("spec", job["spec"]),
        ("rayClusterSpec", job["spec"]["rayClusterSpec"]),
    ]
    for name, part in (*parts, *groups(job)):
        unknown = set(part) - FIELDS[name]
        assert not unknown, f"{name}: {unknown}"
    for name, group in groups(job):
        params = group["rayStartParams"]
        assert all(isinstance(value, str) for value in params.values()), "KubeRay takes only text here"
        template = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name.lower(), **group["template"]["metadata"]},
        }
        kubernetes_validate.validate({**template, "spec": group["template"]["spec"]}, VERSION, strict=True)


def test_every_field_is_known_and_every_pod_is_valid(manifests: dict[str, Manifest]) -> None:
    check_fields(manifests["RayJob"])
    kubernetes_validate.validate(manifests["NetworkPolicy"], VERSION, strict=True)


@pytest.mark.parametrize("place", ["job", "group", "pod"])
def test_the_check_finds_a_misspelt_field(manifests: dict[str, Manifest], place: str) -> None:
    job = manifests["RayJob"]
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    {"job": job["spec"], "group": group, "pod": group["template"]["spec"]}[place]["replica"] = 1
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError), match="replica"):
        check_fields(job)


def test_pods_have_no_rights_and_strangers_no_way_in(manifests: dict[str, Manifest]) -> None:
    job, policy = manifests["RayJob"], manifests["NetworkPolicy"]["spec"]
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for _, group in groups(job):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert [one["securityContext"]["capabilities"] for one in pod["containers"]] == [{"drop": ["ALL"]}]
        assert group["template"]["metadata"]["labels"].items() >= policy["podSelector"]["matchLabels"].items()
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_entrypoint_is_a_command_and_the_version_the_one_that_is_tested(manifests: dict[str, Manifest]) -> None:
    spec = manifests["RayJob"]["spec"]
    program, *arguments = shlex.split(spec["entrypoint"])
    assert program == "tandem"
    result = CliRunner().invoke(app, [*arguments, "run.run_id=x"])
    assert result.exit_code == 2 and "/runs/recipe.toml: no such file" in result.output
    assert spec["rayClusterSpec"]["rayVersion"] == importlib.metadata.version("ray")
