"""The compose file: what it publishes, what it needs, and that its example names every variable."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tandem.services.environments.service import DRAIN_SECONDS
from tests.support.locked_redis import ACL_FILE
from tests.support.paths import ROOT

FOLDER = ROOT / "deploy" / "compose"
TEXT = (FOLDER / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OURS = sorted(set(SERVICES) - {"init", "prometheus", "grafana"})


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published), published


def test_the_example_names_every_variable_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+)(?::-([^}]*))?\}", TEXT))
    example = dict(re.findall(r"^(\w+)=(.*)$", (FOLDER / ".env.example").read_text(), re.M))
    assert set(example) - {"COMPOSE_PROFILES"} == set(used)
    without_default = {"TANDEM_WORKSPACE": "."}
    assert {name: used[name] for name in used if name not in without_default} == {
        name: example[name] for name in used if name not in without_default
    }


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_no_privileges_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "on-failure"
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges"]
    assert service["user"] == "${TANDEM_USER:-1000:1000}"
    assert "privileged" not in service and service.get("network_mode") is None
    assert service["healthcheck"]["test"][0] == "CMD"


def test_secrets_are_in_no_environment_and_no_command() -> None:
    for name, service in SERVICES.items():
        shown = str(service.get("environment", "")) + str(service.get("command", ""))
        assert not re.search(r"(?i)password|token=|secret=|redis://|rediss://", shown), name


def test_environment_services_are_a_profile_and_have_the_time_to_drain() -> None:
    service = SERVICES["environments"]
    assert service["profiles"] == ["environments"] and "tandem serve environments " in service["command"]
    assert service["networks"] == ["ring"], "environments run code of others; they reach nothing outside"
    assert float(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS
    for name in ("healthcheck", "environment", "volumes"):
        assert service[name] == SERVICES["rollout"][name]


def test_both_profiles_have_samplers_and_a_trainer() -> None:
    for profile, suffix in (("cpu", ""), ("gpu", "-gpu")):
        members = {name for name, service in SERVICES.items() if profile in service.get("profiles", ())}
        assert members == {f"rollout{suffix}", f"trainer{suffix}"}


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_prometheus_asks_every_service_of_a_profile_by_a_name_that_it_has(profile: str) -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (asked,) = job["dns_sd_configs"]
    found = {}
    for name, service in SERVICES.items():
        if "tandem serve" in str(service.get("command")) and {profile, "environments"} & {
            *service.get("profiles", [profile])
        }:
            networks = service["networks"]
            aliases = networks["ring"]["aliases"] if isinstance(networks, dict) else []
            found[name] = {name, *aliases} & set(asked["names"])
    assert len(found) == 6 and all(found.values()), found
    assert set().union(*found.values()) == set(asked["names"])


def test_init_keeps_the_password_and_renews_the_rights_of_its_user(tmp_path: Path) -> None:
    """The script runs here, with folders of the test where compose mounts volumes."""
    for name in ("authority", "run/tandem", "data", "prometheus"):
        (tmp_path / name).mkdir(parents=True)
    script = (FOLDER / "init.sh").read_text()
    for mounted in ("authority", "run/tandem", "users.acl", "data", "prometheus"):
        script = re.sub(rf"(?<![\w/])/{mounted}\b", f"{tmp_path}/{mounted}", script)
    urls = []
    for rights in (ACL_FILE.read_text(), ACL_FILE.read_text().replace("+select", "+select +ping")):
        (tmp_path / "users.acl").write_text(rights)
        command = ["sh", "-c", script, "init", f"{os.getuid()}:{os.getgid()}"]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        urls.append((tmp_path / "run" / "tandem" / "redis_url").read_text().strip())
        password = urlsplit(urls[-1]).password or ""
        digest = hashlib.sha256(password.encode()).hexdigest()
        assert (tmp_path / "run/tandem/users.acl").read_text() == rights.replace("PASSWORD_SHA256", digest)
    assert urls[0] == urls[1] and len(password) == 64
