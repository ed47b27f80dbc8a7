// The page: login, choice of the run, its live state, and the parts between which one switches.

import { Curves } from "./curves.js";
import { byId, el, say } from "./dom.js";
import { Events, Jobs } from "./lists.js";
import { Overview } from "./overview.js";
import { Samples } from "./samples.js";
import { LoggedOut, get, post } from "./server.js";

const THEMES = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" };
const systemDark = matchMedia("(prefers-color-scheme: dark)");

class Page {
  constructor() {
    this.runs = [];
    this.state = null;
    this.compared = new Set();
    this.overview = new Overview((...order) => this.order(...order));
    this.curves = new Curves();
    this.samples = new Samples();
    this.jobs = new Jobs();
    this.events = new Events();
    this.parts = [
      ["Overview", this.overview.element],
      ["Curves", this.curves.element],
      ["Samples", this.samples.element],
      ["Jobs", this.jobs.element],
      ["Events", this.events.element],
    ];
    this.theme = localStorage.getItem("theme") in THEMES ? localStorage.getItem("theme") : "auto";
  }

  // ---- session ----

  async begin() {
    this.applyTheme();
    this.listen();
    await this.enter();
  }

  async enter() {
    const { runs } = await get("/api/session");
    this.runs = runs;
    byId("login").hidden = runs.length > 0;
    byId("app").hidden = runs.length === 0;
    if (!runs.length) {
      this.stream?.close();
      byId("token").focus();
      return;
    }
    byId("run").replaceChildren(...runs.map((run) => el("option", { value: run.key }, run.name)));
    const chosen = new URLSearchParams(location.hash.slice(1)).get("run");
    this.open(runs.some((run) => run.key === chosen) ? chosen : runs[0].key);
  }

  async login(event) {
    event.preventDefault();
    byId("login-error").textContent = "";
    try {
      await post("/api/login", { token: byId("token").value });
      byId("token").value = "";
      await this.enter();
    } catch (error) {
      byId("login-error").textContent = error.message;
    }
  }

  async logout() {
    await post("/api/logout");
    this.stream?.close();
    location.reload();
  }

  // ---- the run that is shown ----

  open(key) {
    this.run = this.runs.find((run) => run.key === key);
    byId("run").value = key;
    this.compared.delete(key);
    this.state = null;
    this.showOthers();
    const part = new URLSearchParams(location.hash.slice(1)).get("part");
    this.select(this.part ?? Math.max(0, this.parts.findIndex(([name]) => name === part)));
    this.stream?.close();
    this.connect();
  }

  connect() {
    this.connection("connecting …");
    this.stream = new EventSource(`/api/runs/${this.run.key}/stream`);
    this.stream.onmessage = (message) => {
      this.connection("live");
      this.state = { ...JSON.parse(message.data), role: this.run.role };
      this.show();
    };
    this.stream.onerror = async () => {
      this.connection("connection lost; trying again …");
      const closed = this.stream.readyState === EventSource.CLOSED;
      if (closed) setTimeout(() => this.reconnect(), 1000);
    };
  }

  // The server refused the stream: the session has ended, or the server is just starting again.
  async reconnect() {
    if (this.stream.readyState !== EventSource.CLOSED) return;
    try {
      const { runs } = await get("/api/session");
      if (runs.some((run) => run.key === this.run.key)) this.connect();
      else await this.enter();
    } catch {
      setTimeout(() => this.reconnect(), 1000);
    }
  }

  connection(text) {
    say(byId("connection"), text);
    byId("connection").className = `state ${text === "live" ? "good" : "warn"}`;
  }

  show() {
    if (!this.state) return;
    document.title = `${this.run.name}: ${this.state.progress.step}/${this.state.progress.total} · Tandem`;
    this.notices();
    const part = this.parts[this.part][0];
    if (part === "Overview") this.overview.show(this.state);
    if (part === "Curves") this.showCurves();
    const attempt = (call) => this.attempt(call);
    if (part === "Samples") this.samples.show(this.run, this.state, attempt);
    if (part === "Jobs" && this.state.phase !== "running") this.jobs.away();
    else if (part === "Jobs") this.jobs.show(this.run, attempt, Math.floor(this.state.time / 2));
    if (part === "Events") this.events.show(this.run, attempt, this.state.read.event);
  }

  showCurves() {
    const runs = [this.run, ...this.runs.filter((run) => this.compared.has(run.key))];
    // Runs that are compared may go on while this one does not.
    const reading = JSON.stringify([this.state.read, runs.length > 1 ? Math.floor(this.state.time / 5) : 0]);
    this.attempt(() => this.curves.show(runs, this.shade(), reading));
  }

  notices() {
    const { phase, fault, warnings, progress } = this.state;
    const lines = [...(fault ? [["fault", fault]] : []), ...warnings.map((text) => ["", text])];
    for (const name of progress.hung) lines.push(["", `${name} has sent no heartbeat for 30 s`]);
    if (phase === "running" && progress.equal_rewards !== null) lines.push(["", `no gradient: every reward is ${progress.equal_rewards}`]);
    const text = JSON.stringify(lines);
    if (text === this.noticed) return;
    this.noticed = text;
    byId("notices").replaceChildren(...lines.map(([kind, said]) => el("p", { class: kind }, said)), ...(this.refusal ? [this.refusal] : []));
  }

  showOthers() {
    const others = this.runs.filter((run) => run.key !== this.run.key);
    byId("compare").hidden = others.length === 0;
    byId("others").replaceChildren(...others.map((run) => el("label", {}, el("input", {
      type: "checkbox", checked: this.compared.has(run.key), onchange: (event) => {
        if (event.target.checked) this.compared.add(run.key);
        else this.compared.delete(run.key);
        this.select(1);
      },
    }), ` ${run.name}`)));
  }

  // ---- orders ----

  async order(order, body, question) {
    if (question && !(await this.confirmed(question))) return;
    this.refusal?.remove();
    this.refusal = null;
    await this.attempt(() => post(`/api/runs/${this.run.key}/orders/${order}`, body));
  }

  confirmed(question) {
    const dialog = byId("confirm");
    byId("confirm-text").textContent = question;
    dialog.returnValue = "no";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    });
  }

  async attempt(call) {
    try {
      await call();
    } catch (error) {
      if (error instanceof LoggedOut) await this.enter();
      else {
        this.refusal?.remove();
        this.refusal = el("p", { class: "fault", role: "alert" }, error.message);
        byId("notices").append(this.refusal);
      }
    }
  }

  // ---- parts, colours, keys ----

  select(place) {
    this.part = place;
    location.hash = new URLSearchParams({ run: this.run.key, part: this.parts[place][0] });
    byId("tabs").replaceChildren(...this.parts.map(([name], other) => el("button", {
      type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(other === place), "aria-controls": "main",
      tabindex: other === place ? 0 : -1, "aria-keyshortcuts": String(other + 1), onclick: () => this.select(other),
    }, name)));
    byId("main").replaceChildren(this.parts[place][1]);
    byId("main").setAttribute("aria-label", this.parts[place][0]);
    this.show();
  }

  shade() {
    return this.theme === "auto" ? (systemDark.matches ? "dark" : "light") : this.theme;
  }

  applyTheme() {
    document.documentElement.dataset.theme = this.shade();
    say(byId("theme"), THEMES[this.theme]);
    this.show();
  }

  nextTheme() {
    const names = Object.keys(THEMES);
    this.theme = names[(names.indexOf(this.theme) + 1) % names.length];
    localStorage.setItem("theme", this.theme);
    this.applyTheme();
  }

  keys() {
    return [
      ...this.parts.map(([name], place) => [String(place + 1), name, () => this.select(place)]),
      ["+", "One sampler more", () => this.press("more")],
      ["-", "One sampler less", () => this.press("fewer")],
      ["/", "Search the samples", () => this.findSamples()],
      ["t", "Theme: as the system, light, dark", () => this.nextTheme()],
      ["?", "This list", () => byId("keys").showModal()],
    ];
  }

  findSamples() {
    this.select(this.parts.findIndex(([name]) => name === "Samples"));
    byId("words").focus();
  }

  press(id) {
    const button = byId(id);
    if (button?.offsetParent) button.click();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("app").hidden) return;
    if (document.querySelector("dialog[open]") || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.target.role === "tab" && /^Arrow(Left|Right)$/.test(event.key)) {
      const step = event.key === "ArrowRight" ? 1 : this.parts.length - 1;
      this.select((this.part + step) % this.parts.length);
      byId("tabs").children[this.part].focus();
      return;
    }
    const found = this.keys().find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2]();
  }

  listen() {
    byId("login-form").addEventListener("submit", (event) => this.login(event));
    byId("run").addEventListener("change", (event) => this.open(event.target.value));
    byId("theme").addEventListener("click", () => this.nextTheme());
    byId("logout").addEventListener("click", () => this.logout());
    byId("add-token").addEventListener("click", () => {
      byId("login").hidden = false;
      byId("token").focus();
    });
    byId("help").addEventListener("click", () => byId("keys").showModal());
    byId("key-list").append(...this.keys().flatMap(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)]));
    systemDark.addEventListener("change", () => this.applyTheme());
    document.addEventListener("keydown", (event) => this.onKey(event));
  }
}

new Page().begin();
