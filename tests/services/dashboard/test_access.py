"""Who sees and steers a run by the dashboard: tokens, sessions, orders from elsewhere, other names, headers."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.commands.certs import write_certificates
from tandem.services.dashboard import access, server
from tandem.services.dashboard.run_source import RunSource
from tandem.services.dashboard.server import check_access
from tandem.services.rpc.tokens import Role
from tests.services.dashboard.conftest import Site, no_secret
from tests.support.dashboard import Browser, serving
from tests.support.made_up_run import make_run
from tests.support.redis_ring import new_run

SCALE = {"name": "rollout", "replicas": 2}


def paths(key: str) -> list[str]:
    return [f"/api/runs/{key}/stream", f"/api/charts?run={key}", f"/api/curves?run={key}"]


def test_a_stranger_gets_the_page_and_nothing_of_the_run(site: Site) -> None:
    browser = site.browser()
    for path in paths(site.source.key):
        assert browser.http.get(path).status_code == 401
    assert browser.post(f"/api/runs/{site.source.key}/orders/scale", SCALE).status_code == 401
    assert browser.http.get("/api/session").json() == {"runs": []}
    page = browser.http.get("/")
    assert page.status_code == 200 and site.source.name not in page.text and "{{" not in page.text
    assert browser.http.get("/static/app.js").status_code == 200
    assert browser.http.get("/static/../app.py").status_code == 404
    assert site.controller.orders == []


def test_a_session_is_a_cookie_that_scripts_and_other_sites_do_not_get(site: Site) -> None:
    browser = site.browser()
    reply = browser.login(site.secret)
    (cookie,) = reply.headers.get_list("set-cookie")
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Max-Age=43200" in cookie
    assert [(run["name"], run["role"]) for run in browser.http.get("/api/session").json()["runs"]] == [
        (site.source.name, "read")
    ]
    assert browser.http.get(paths(site.source.key)[2]).status_code == 200
    assert browser.post("/api/logout").status_code == 200
    assert browser.http.get(paths(site.source.key)[2]).status_code == 401


def test_a_session_survives_the_server_and_ends_after_half_a_day(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = site.browser()
    browser.login(site.secret)
    with serving([RunSource(site.source.folder, site.source._stored_secret)]) as address:
        other = Browser(address)
        other.http.cookies = browser.http.cookies
        assert other.http.get(paths(site.source.key)[2]).status_code == 200
        now = time.time()
        monkeypatch.setattr(access.time, "time", lambda: now + access.SESSION_SECONDS + 1)
        assert other.http.get(paths(site.source.key)[2]).status_code == 401


@pytest.mark.parametrize("change", ["", "operate", "later", "key"])
def test_a_session_cannot_be_made_up_or_changed(change: str) -> None:
    cookie = access.new_session("secret", "run", Role.read)
    role, ends, rest = cookie.split(".", 2)
    forged = {"operate": f"operate.{ends}.{rest}", "later": f"{role}.{int(ends) + 1}.{rest}", "key": cookie, "": ""}
    assert access.role_of_session("secret", "run", cookie) is Role.read
    assert access.role_of_session("secret", "other" if change == "key" else "run", forged[change]) is None
    assert access.role_of_session("another secret", "run", cookie) is None


def test_a_token_opens_only_its_own_run(site: Site, tmp_path: Path, redis_url: str) -> None:
    with closing(new_run(redis_url, run_id="other")) as buffer:
        secret = buffer.secret()
    other = RunSource(make_run(tmp_path / "other", "other", redis_url=redis_url), no_secret)
    mine = RunSource(site.source.folder, site.source._stored_secret)
    with serving([mine, other]) as address:
        browser = Browser(address)
        browser.login(site.secret)
        assert [run["name"] for run in browser.http.get("/api/session").json()["runs"]] == [mine.name]
        assert browser.http.get(f"/api/curves?run={mine.key}&run={other.key}").status_code == 401
        browser.login(secret)
        assert browser.http.get(f"/api/curves?run={mine.key}&run={other.key}").status_code == 200


def test_reading_does_not_steer(site: Site) -> None:
    browser, order = site.browser(), f"/api/runs/{site.source.key}/orders/scale"
    browser.login(site.secret)
    browser.states(site.source.key, lambda state: bool(state["services"]))
    refused = browser.post(order, SCALE)
    assert refused.status_code == 403 and "may only look" in refused.json()["error"]
    browser.login(site.secret, Role.operate)
    assert browser.post(order, SCALE).status_code == 200
    assert site.controller.orders == [("rollout", 2)]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "evil.example"}, 421),
    ],
)
def test_orders_come_from_the_page_itself(site: Site, headers: dict[str, str], status: int) -> None:
    browser = site.browser()
    browser.login(site.secret, Role.operate)
    browser.states(site.source.key, lambda state: bool(state["services"]))
    assert browser.post(f"/api/runs/{site.source.key}/orders/scale", SCALE, **headers).status_code == status
    assert site.controller.orders == []


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "evil@127.0.0.1x", "[::1"])
def test_a_name_of_another_site_is_refused(site: Site, host: str) -> None:
    assert site.browser().http.get("/", headers={"Host": host}).status_code in (400, 421)


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:80"])
def test_the_machines_own_names_are_known(site: Site, host: str) -> None:
    assert site.browser().http.get("/", headers={"Host": host}).status_code == 200


def test_failed_logins_are_limited(site: Site) -> None:
    browser = site.browser()
    for _ in range(10):
        assert browser.login("guessed").status_code == 401
    limited = browser.login(site.secret)
    assert limited.status_code == 429 and int(limited.headers["Retry-After"]) > 0
    assert browser.http.get("/api/session").json() == {"runs": []}


def test_every_reply_forbids_what_the_page_does_not_need(site: Site) -> None:
    browser = site.browser()
    for path in ("/", "/static/app.js", "/api/session", "/nothing", paths(site.source.key)[0]):
        headers = browser.http.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
    nonces = {browser.http.get("/").headers["Content-Security-Policy"] for _ in range(2)}
    assert len(nonces) == 2, "each page has its own nonce"


def test_a_caller_who_sends_half_a_request_is_sent_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    host, port = site.address.removeprefix("http://").split(":")
    for words in (b"", b"GET / HTTP/1.1\r\nHost: local"):
        with socket.create_connection((host, int(port)), timeout=20.0) as slow:
            slow.sendall(words)
            assert slow.recv(1) == b"", "the server closes"


def test_a_large_or_malformed_request_is_refused(site: Site) -> None:
    browser = site.browser()
    assert browser.post("/api/login", {"token": "x" * 20_000}).status_code == 400
    assert browser.post("/api/login", ["token"]).status_code == 400


def test_a_page_on_all_addresses_needs_no_certificate_that_names_them(tmp_path: Path) -> None:
    write_certificates(tmp_path, [], 1)
    assert check_access("0.0.0.0", tmp_path, insecure=False) == ""
    with pytest.raises(ConfigError, match=r"service\.crt"):
        check_access("elsewhere.example", tmp_path, insecure=False)
    with pytest.raises(ConfigError, match="no certificates"):
        check_access("0.0.0.0", None, insecure=False)
