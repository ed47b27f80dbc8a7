"""Measures the dashboard in a real browser: the time and the bytes to load it, how late it shows a change, and what its
viewers cost a run.

    python benchmarks/dashboard.py [--seconds 20] [--rounds 8] [--output benchmarks/records/dashboard.json]

Runs a tiny model on CPUs. `cost_fraction` compares windows of one run without viewers and with three, in turns: 1 − the
median of the ratios. `cpu_fraction` is the share of the machine's processors that the dashboard took while it was
watched. The exit code is 1 if a figure exceeds the project's limit; the last lines name it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
import psutil  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from tandem.services.data.arithmetic import write_task  # noqa: E402
from tandem.services.data.tiny_model import build_tiny_model  # noqa: E402

PORT = 18479
VIEWERS = 3
DEADLINE_SECONDS = 120.0
ALLOWED = {"load_seconds": 1.0, "load_bytes": 1_000_000, "shown_after_seconds_max": 2.0, "cost_fraction": 0.02}
TANDEM = (sys.executable, "-m", "tandem.services.cli")
# Notes when the number of batches on the page changes.
WATCH = """() => { window.seen = []; const shown = document.querySelector("#tiles [data-key=Batches] dd");
new MutationObserver(() => window.seen.push([Number(shown.textContent.split(" ")[0].replaceAll(",", "")), Date.now()]))
.observe(shown, {childList: true, characterData: true, subtree: true}); }"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "dashboard.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-dashboard-") as scratch, ExitStack() as stack:
        folder = start_run(Path(scratch), stack)
        token = subprocess.run(
            [*TANDEM, "token", str(folder), "--role", "read"], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
        command = [*TANDEM, "dashboard", str(folder), "--port", str(PORT)]
        server = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE))
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        stack.callback(server.terminate)
        record: dict[str, Any] = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        record |= seen_by_browser(folder, token, arguments.seconds)
        process = psutil.Process(server.pid)
        rounds: list[dict[int, float]] = []
        cpu_seconds = 0.0
        for number in range(arguments.rounds):
            rounds.append({})
            for viewers in (0, VIEWERS) if number % 2 == 0 else (VIEWERS, 0):
                before = sum(process.cpu_times()[:2])
                rounds[-1][viewers] = rate(folder, token, arguments.seconds, viewers)
                cpu_seconds += sum(process.cpu_times()[:2]) - before
        record["batches_per_second"] = [{"watched": one[VIEWERS], "not_watched": one[0]} for one in rounds]
        record["cost_fraction"] = 1 - statistics.median(one[VIEWERS] / one[0] for one in rounds)
        record["cpu_fraction"] = cpu_seconds / arguments.rounds / arguments.seconds / psutil.cpu_count()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    missed = [f"{name} is over {most}" for name, most in ALLOWED.items() if record[name] > most]
    print("\n".join(missed))
    return 1 if missed else 0


def start_run(scratch: Path, stack: ExitStack) -> Path:
    """Starts a run that goes on until the end; returns its folder once it has trained a batch."""
    build_tiny_model(scratch / "model", ends=False)
    write_task(scratch / "data", seed=1)
    folder = scratch / "run"
    recipe = {
        "run": {"run_id": "shown", "folder": str(folder), "total_batches": 100_000, "groups_per_batch": 4},
        "model": {"path": str(scratch / "model")},
        "data": {"train_file": str(scratch / "data" / "train.parquet"), "max_prompt_tokens": 64},
        "rollout": {
            "engine": "transformers",
            "samples_per_prompt": 4,
            "max_response_tokens": 64,
            "kv_cache_bytes": 1 << 26,
        },
        "trainer": {"checkpoint_every": 100},
    }
    (scratch / "recipe.json").write_text(json.dumps(recipe))
    with (scratch / "run.out").open("w") as out:
        run = subprocess.Popen([*TANDEM, "run", str(scratch / "recipe.json")], cwd=ROOT, stdout=out, stderr=out)
    stack.callback(run.wait, 30)
    stack.callback(run.send_signal, signal.SIGINT)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(steps(folder)) < 3:
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((scratch / "run.out").read_text()[-2000:])
        time.sleep(0.2)
    return folder


def steps(folder: Path) -> dict[int, float]:
    """When each batch was trained, by its number."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return {line["step"]: line["time"] for line in map(json.loads, lines)}


def seen_by_browser(folder: Path, token: str, seconds: float) -> dict[str, Any]:
    """Seconds and bytes until a logged-in page shows the run and then its charts, and how late it shows batches."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.set_default_timeout(1000 * DEADLINE_SECONDS)
        page.goto(f"http://127.0.0.1:{PORT}/")
        page.fill("#token", token)
        page.keyboard.press("Enter")
        page.wait_for_selector("#tiles dd")
        cookies = context.cookies()
        context.close()
        context = browser.new_context(viewport={"width": 1280, "height": 900})  # with an empty cache
        context.add_cookies(cookies)  # type: ignore[arg-type]
        page = context.new_page()
        figures = loaded(page)
        page.click("#tab-Overview")
        page.evaluate(WATCH)
        page.wait_for_timeout(1000 * seconds)
        seen, trained = page.evaluate("window.seen"), steps(folder)
        browser.close()
    shown = [(step, at / 1000) for step, at in seen]
    window = [step for step, when in trained.items() if shown[0][1] < when < shown[-1][1] and step <= shown[-1][0]]
    late = [next(at for number, at in shown if number >= step) - trained[step] for step in window]
    return figures | {"shown_after_seconds_median": statistics.median(late), "shown_after_seconds_max": max(late)}


def loaded(page: Page) -> dict[str, Any]:
    received = []
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    began = time.monotonic()
    page.goto(f"http://127.0.0.1:{PORT}/")
    page.wait_for_selector("#tiles dd")
    shown = time.monotonic() - began
    page.click("#tab-Curves")
    page.wait_for_selector(".charts canvas")
    charts = time.monotonic() - began
    return {"load_seconds": shown, "load_with_charts_seconds": charts, "load_bytes": sum(received)}


def rate(folder: Path, token: str, seconds: float, viewers: int) -> float:
    """Batches a second while so many viewers watch."""
    ended = threading.Event()
    threads = [threading.Thread(target=view, args=(token, ended), daemon=True) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    begin = len(steps(folder))
    time.sleep(seconds)
    trained = len(steps(folder)) - begin
    ended.set()
    for thread in threads:
        thread.join(10)
    return trained / seconds


def view(token: str, ended: threading.Event) -> None:
    """A viewer of the overview, without a browser's own cost."""
    address = f"http://127.0.0.1:{PORT}"
    with httpx.Client(base_url=address, timeout=20.0) as client:
        client.post("/api/login", json={"token": token}, headers={"Origin": address}).raise_for_status()
        key = client.get("/api/session").json()["runs"][0]["key"]
        with client.stream("GET", f"/api/runs/{key}/stream") as stream:
            for _ in stream.iter_lines():
                if ended.is_set():
                    return


if __name__ == "__main__":
    sys.exit(main())
