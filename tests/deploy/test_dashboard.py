"""The dashboard of a live run in a real browser: it shows the run, steers it, and asks for nothing it may not have."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tandem.protos.codec import encode_group
from tandem.services.dashboard.run_source import RunSource
from tandem.services.rpc.tokens import Role, run_token
from tandem.trainer.batch.rejected import write_rejected
from tests.support.dashboard import serving
from tests.support.made_up_run import ANSWER, answered, make_run
from tests.support.paths import ROOT
from tests.support.programs import needed
from tests.support.redis_ring import new_run
from tests.support.training_groups import make_group
from tests.support.waiting import eventually
from tests.support.whole_run import UNHURRIED, WholeRun, kill_tree

_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_PHONE = {"width": 390, "height": 844}
_DESKTOP = {"width": 1280, "height": 900}
_PATIENCE_MS = 60_000.0


@dataclass
class Visit:
    """A page with all that it was sent and complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    received: int = 0

    def log_in(self, address: str, token: str) -> None:
        self.page.goto(address)
        self.page.fill("#token", token)
        self.page.keyboard.press("Enter")
        expect(self.page.locator("#connection")).to_have_text("live")


@contextmanager
def browsing(size: dict[str, int], scheme: str = "light") -> Iterator[Visit]:
    (chromium,) = needed("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS))
        page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(_PATIENCE_MS)
        expect.set_options(timeout=_PATIENCE_MS)
        visit = Visit(page)
        page.on(
            "console", lambda said: visit.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("request", lambda request: visit.addresses.append(request.url))
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")

        def count(event: dict[str, float]) -> None:
            visit.received += int(event["encodedDataLength"])

        session.on("Network.loadingFinished", count)
        yield visit
        browser.close()


@dataclass
class Server:
    """`tandem dashboard` on a port of its own, which it keeps when it is started again."""

    run: WholeRun
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        command = [sys.executable, "-m", "tandem.services.cli", "dashboard", str(self.run.folder)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith(self.address[:-1]) and "tandem token" in said

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    needed("chromium")
    rollout = {"engine": "transformers", "max_response_tokens": 64}
    run = WholeRun(tmp_path_factory.mktemp("shown"), run={"total_batches": 100_000}, rollout=rollout, reward=UNHURRIED)
    supervisor = run.start("run", str(run.recipe))
    try:
        run.wait_for(lambda: len(run.metrics()) >= 2, supervisor)
        yield run
    finally:
        if supervisor.poll() is None:
            kill_tree(supervisor)


@pytest.fixture(scope="module")
def server(run: WholeRun) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(run, port)
    server.start()
    yield server
    server.stop()


def token(run: WholeRun, role: str) -> str:
    return run.tandem("token", str(run.folder), "--role", role).stdout.strip()


@pytest.mark.timeout(400)
def test_a_live_run_is_shown_and_a_click_adds_a_sampler(run: WholeRun, server: Server) -> None:
    with browsing(_DESKTOP) as visit:
        page = visit.page
        visit.log_in(server.address, token(run, "operate"))
        batches = page.locator("#tiles [data-key=Batches] dd")
        first = batches.inner_text()
        expect(batches).not_to_have_text(first)  # it is live
        expect(page.locator("svg.ring")).to_have_attribute("aria-label", _says("Samplers: 1 of 1 running"))
        rows = page.locator("table tbody tr")
        expect(rows).to_have_count(4)
        page.click("#more")
        expect(page.locator("tr", has_text="rollout-1").locator(".state")).to_have_text("running")
        expect(page.locator("tr", has_text="rollout-1")).to_contain_text("live")
        expect(page.locator("#replicas")).to_have_text("2")
        page.get_by_label("Drain rollout-1").click()
        expect(page.locator("#confirm-text")).to_have_text("Let rollout-1 finish its groups and leave?")
        page.click("#confirm [value=yes]")
        expect(page.locator("tr", has_text="rollout-1")).to_have_count(0)
        expect(page.locator("#replicas")).to_have_text("1")

        page.click("#pause")
        expect(page.locator("tr", has_text="rollout-0").locator(".state")).to_have_text("paused")
        page.click("#resume")
        expect(page.locator("tr", has_text="rollout-0").locator(".state")).to_have_text("running")

        page.click("#tab-Curves")
        expect(page.locator(".charts canvas").first).to_be_visible()
        page.keyboard.press("/")
        page.locator(".samples button").first.click()
        expect(page.locator("article .token").first).to_be_visible()
        page.select_option("#colour", "logprob")
        expect(page.locator("pre.answer .token[title^='p = ']").first).to_be_visible()
        expect(page.locator("article dd").nth(2)).not_to_have_text("–")  # the advantage
        page.click("#tab-Events")
        expect(page.locator("td", has_text="rollout-1 joins the run").first).to_be_visible()
        page.click("#tab-Jobs")
        expect(page.locator("text=There are none.")).to_be_visible()
        assert visit.complaints == []
        assert {address.split("/")[2] for address in visit.addresses if not address.startswith("data:")} == {
            server.address.split("/")[2]
        }, "the page asks nobody else"
        assert visit.received <= 1_000_000, f"{visit.received:,} bytes"


@pytest.mark.timeout(200)
def test_the_page_survives_a_restart_of_its_server(run: WholeRun, server: Server) -> None:
    with browsing(_DESKTOP) as visit:
        visit.log_in(server.address, token(run, "read"))
        expect(visit.page.locator("text=This session may only look.")).to_be_visible()
        assert not visit.page.locator("#more").is_visible()
        server.stop()
        expect(visit.page.locator("#connection")).to_have_text(_says("trying again"))
        server.start()
        expect(visit.page.locator("#connection")).to_have_text("live")
        batches = visit.page.locator("#tiles [data-key=Batches] dd")
        expect(batches).not_to_have_text(batches.inner_text())
        refused = "net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION_RESET"
        assert all(any(words in text for words in refused) for text in visit.complaints), visit.complaints


@pytest.mark.timeout(200)
def test_a_phone_and_the_keyboard_reach_everything_in_the_dark(run: WholeRun, server: Server) -> None:
    with browsing(_PHONE, "dark") as visit:
        page = visit.page
        visit.log_in(server.address, token(run, "operate"))
        for place, name in enumerate(page.locator("#tabs button").all_inner_texts()):
            page.keyboard.press(str(place + 1))
            expect(page.locator(f"#tab-{name}")).to_have_attribute("aria-selected", "true")
            eventually(lambda: page.evaluate("document.documentElement.scrollWidth") <= _PHONE["width"])
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(24, 24, 27)"
        page.keyboard.press("t")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(247, 247, 248)"
        page.keyboard.press("1")
        reached = _tabbed_through(page)
        shown = page.evaluate(
            "[...document.querySelectorAll('button, select, input, summary, a[href]')].filter(e => e.offsetParent &&"
            " e.tabIndex >= 0 && !e.disabled).map(e => e.id || e.textContent)"
        )
        assert set(shown) <= reached, "every control is reached by the tabulator"
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#keys")).not_to_be_visible()
        assert visit.complaints == []


@pytest.mark.timeout(200)
def test_a_click_stops_the_run_once_it_is_confirmed(run: WholeRun, server: Server) -> None:
    with browsing(_DESKTOP) as visit:
        page = visit.page
        visit.log_in(server.address, token(run, "operate"))
        page.click("#stop")
        page.click("#confirm [value=no]")
        assert page.locator("#stop").is_enabled()
        page.click("#stop")
        page.click("#confirm [value=yes]")
        expect(page.locator("text=Nothing runs: there are no services to show.")).to_be_visible()
        expect(page.locator("#tiles")).to_contain_text("not running")
        assert visit.complaints == []


@pytest.mark.timeout(200)
def test_what_answers_and_events_hold_is_text(tmp_path: Path, redis_url: str) -> None:
    folders = [make_run(tmp_path / name, name, redis_url=redis_url) for name in ("hostile", "other")]
    for folder in folders:
        dull = answered(make_group(90, num_samples=1, rewards=[0.5]), ANSWER)
        write_rejected(folder, 1, dull.group_id, "zero_variance", encode_group(dull))
        (folder / "events.jsonl").write_text(json.dumps({"time": 1.0, "text": f"died: {ANSWER}"}) + "\n")
    with ExitStack() as stack:
        buffers = [stack.enter_context(closing(new_run(redis_url, run_id=folder.name))) for folder in folders]
        address = stack.enter_context(serving([RunSource(folder, lambda _: "") for folder in folders]))
        visit = stack.enter_context(browsing(_DESKTOP))
        page = visit.page
        for buffer in buffers:
            visit.page.goto(address)
            expect(page.locator("#app:visible, #login:visible")).to_have_count(1)  # once the page knows the runs
            page.click("#add-token") if page.locator("#app").is_visible() else None
            page.fill("#token", run_token(buffer.secret(), Role.read))
            page.keyboard.press("Enter")
            expect(page.locator("#login")).to_be_hidden()
        expect(page.locator("#run option")).to_have_count(2)
        page.click("#tab-Overview")
        page.keyboard.press("/")
        page.fill("#words", "script alert")
        page.keyboard.press("Enter")
        page.locator(".samples button").first.click()
        page.select_option("#colour", "none")
        expect(page.locator("pre.answer")).to_contain_text("<script>alert('answer')</script>")
        page.fill("#words", "")
        page.select_option("#fate", "zero variance")
        expect(page.locator(".samples button")).to_have_count(1)
        page.locator(".samples button").click()
        expect(page.locator("article")).to_contain_text("group dropped: all its rewards are equal")
        page.click("#tab-Events")
        expect(page.locator("td", has_text="died: <script>")).to_be_visible()
        page.click("#compare summary")
        page.check("#others input")  # both runs in the charts
        expect(page.locator(".charts canvas").first).to_be_visible()
        expect(page.locator(".swatch")).to_have_count(2)
        assert page.locator("main script, main b").count() == 0
        assert visit.complaints == []


def _tabbed_through(page: Page) -> set[str]:
    """What gets the focus, each with a visible outline."""
    reached: set[str] = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(60):
        page.keyboard.press("Tab")
        name, style = page.evaluate(
            "(() => { const e = document.activeElement;"
            " return [e.id || e.textContent, getComputedStyle(e).outlineStyle] })()"
        )
        if name in reached:
            break
        assert style != "none" or page.evaluate("document.activeElement === document.body"), name
        reached.add(name)
    return reached


def _says(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text))
