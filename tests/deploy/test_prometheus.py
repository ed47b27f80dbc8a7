"""A real Prometheus scrapes a real run with the shipped rules; rules and dashboard use only documented metrics."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from string import ascii_letters
from typing import Any

import httpx
import pytest
import yaml

from tandem.rollout.environments.tools.outcomes import BOUNDS_SECONDS
from tandem.services.commands.certs import write_certificates
from tandem.services.metrics.names import METRICS
from tandem.services.process import dying_with_parent
from tests.support.paths import ROOT
from tests.support.programs import needed
from tests.support.whole_run import UNHURRIED, WholeRun

FOLDER = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "tandem.json"
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
FIRST_PORT, OWN_PORT = 21900, 21950
SERVICES = {"controller": 0, "feed": 1, "reward": 2, "trainer": 3, "rollout": 10, "environments": 700}
PLAIN, COMPOSE = FOLDER / "prometheus.yml", ROOT / "deploy" / "compose" / "prometheus.yml"
OURS = re.compile(r"\btandem_\w+")
KNOWN = {metric.name for metric in METRICS} | {
    f"{metric.name}_{part}" for metric in METRICS if metric.kind == "histogram" for part in ("bucket", "sum", "count")
}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """Those of the rules and, with the run filled in, of the dashboard."""
    shown = [target["expr"].replace("$run", ".*") for panel in panels() for target in panel["targets"]]
    return [*(rule["expr"] for rule in alerts()), *shown]


def test_rules_and_dashboard_use_only_documented_metrics() -> None:
    used = {name for expression in expressions() for name in OURS.findall(expression)}
    assert used and used <= KNOWN, used - KNOWN


def test_the_dashboard_is_provisioned() -> None:
    """Grafana is not available here: this compares the names that its files use for one another."""
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["uid"]}
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)
    assert yaml.safe_load((PROVISIONING / "dashboards" / "tandem.yml").read_text())["providers"]


def test_every_alert_fires_on_its_fault_and_none_on_a_healthy_run() -> None:
    (promtool,) = needed("promtool")
    checks = (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"])
    configurations = [["check", "config", "--syntax-only", str(file)] for file in (PLAIN, COMPOSE)]
    for arguments in (*checks, *configurations):
        done = subprocess.run([promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_in_the_document() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert re.findall(r"^\| (Tandem\w+) \|", page, re.M) == [rule["alert"] for rule in alerts()]


@contextmanager
def running_prometheus(folder: Path, token: Path, certificates: Path) -> Iterator[httpx.Client]:
    """The configuration of compose, but with addresses of this machine and a short interval."""
    (prometheus,) = needed("prometheus")
    values = yaml.safe_load(COMPOSE.read_text().replace("/run/tandem/certs", str(certificates)))
    (job,) = values["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{FIRST_PORT + offset}" for offset in SERVICES.values()]}]
    job["authorization"]["credentials_file"] = str(token)
    values["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    values["rule_files"] = [str(FOLDER / "alerts.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(values))
    command = [prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with open(folder / "prometheus.log", "w") as log:
        process = subprocess.Popen(
            dying_with_parent([*command, f"--web.listen-address=127.0.0.1:{OWN_PORT}"]), stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{OWN_PORT}/api/v1", timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def asked(client: httpx.Client, path: str, **parameters: str) -> Any:
    reply = client.get(path, params=parameters)
    assert reply.status_code == 200, (parameters, reply.text)
    return reply.json()["data"]


def is_scraped(client: httpx.Client) -> bool:
    """Whether Prometheus is ready, and has the figures of all services and of two batches."""
    try:
        if client.get("/status/runtimeinfo").status_code == 503:
            return False
        found = asked(client, "/query", query="tandem_batch_step and on () (count(up == 1) == 6)")["result"]
    except httpx.TransportError:
        return False
    return bool(found) and float(found[0]["value"][1]) >= 2


def _client(certificates: Path) -> ssl.SSLContext:
    """What a client with the deployment's certificate trusts and shows."""
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    context.load_cert_chain(certificates / "client.crt", certificates / "client.key")
    return context


@pytest.mark.system
@pytest.mark.timeout(300)
def test_prometheus_scrapes_a_run_and_every_expression_can_be_evaluated(tmp_path: Path) -> None:
    needed("prometheus")
    certificates = tmp_path / "certificates"
    write_certificates(certificates, [], 30)
    options = {"total_batches": 100_000, "metrics_port": FIRST_PORT, "certificates": str(certificates)}
    run = WholeRun(
        tmp_path,
        run=options,
        rollout={"engine": "transformers", "stop": tuple(ascii_letters)},
        environment={"path": "tests.support.environments:Echo", "max_turns": 2, "service": True},
        reward=UNHURRIED,
    )
    supervisor = run.start("run", str(run.recipe))
    try:
        run.wait_for(lambda: len(run.metrics()) >= 1, supervisor)
        for offset in SERVICES.values():
            page = f"https://127.0.0.1:{FIRST_PORT + offset}/metrics"
            assert httpx.get(page, verify=_client(certificates)).status_code == 401
        token = tmp_path / "token"
        token.write_text(run.tandem("token", str(run.folder), "--role", "read").stdout)
        with running_prometheus(tmp_path, token, certificates) as client:
            run.wait_for(lambda: is_scraped(client), supervisor)
            services = asked(client, "/query", query="count by (service, run) (tandem_start_time_seconds)")["result"]
            assert {one["metric"]["service"] for one in services} == SERVICES.keys()
            assert {one["metric"]["run"] for one in services} == {"whole"}
            for expression in expressions():
                assert asked(client, "/query", query=expression)["resultType"] == "vector", expression
            buckets = asked(client, "/query", query="tandem_tool_call_seconds_bucket > 0")["result"]
            assert {(one["metric"]["service"], one["metric"]["tool"]) for one in buckets} == {("rollout", "other")}
            bounds = {float(one["metric"]["le"]) for one in buckets}
            assert bounds == {inf, *(bound for bound in BOUNDS_SECONDS if bound >= 0.5)}, "each call took 0.5 s"
            loaded = [rule for group in asked(client, "/rules")["groups"] for rule in group["rules"]]
            assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in alerts()]
            assert {rule["health"] for rule in loaded} == {"ok"}, loaded
            names = {name for name in asked(client, "/label/__name__/values") if name.startswith("tandem_")}
            assert names <= KNOWN
            filled = [one for one in expressions() if asked(client, "/query", query=one)["result"]]
            assert len(filled) >= len(panels()) / 2, "most panels show something"
    finally:
        supervisor.terminate()
        assert supervisor.wait(30) == 130, run.logs()
