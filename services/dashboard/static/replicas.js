// Services and replicas with their health, and the orders that an operator may give.

import { el, keep, percent, say, whole } from "./dom.js";

const COLUMNS = ["service", "state", "doing", "weights", "busy", "tokens/s", "restarts", "heartbeat", ""];
const GOOD = new Set(["running"]);
const BAD = new Set(["failed", "silent"]);

function standing(one) {
  const silent = one.heartbeat_age > 30 && one.state === "running";
  const state = silent ? "silent" : one.paused ? "paused" : one.state;
  return [state, GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "warn"];
}

function cells(one) {
  const version = one.version >= 0 ? `version ${one.version}` : "";
  const weights = one.weights ? `${version} ${one.weights.toLowerCase()}`.trim() : "";
  const age = one.heartbeat_age;
  return [
    one.name, standing(one)[0], one.activity ?? "", weights,
    one.busy === undefined ? "" : percent(Math.min(1, one.busy)),
    one.tokens_per_second === undefined ? "" : whole(one.tokens_per_second),
    one.restarts === undefined ? "" : String(one.restarts),
    age === null || age === undefined || age < 0 ? "none yet" : age < 3 ? "now" : `${Math.round(age)} s ago`,
  ];
}

export class Replicas {
  constructor(act) {
    this.act = act;
    this.body = el("tbody");
    this.count = el("output", { id: "replicas", "aria-label": "samplers ordered" });
    const order = (change) => () => act("scale", { name: "rollout", replicas: Math.max(0, this.wanted + change) });
    this.controls = el(
      "div", { class: "row", role: "group", "aria-label": "Samplers" },
      el("span", {}, "Samplers"),
      el("button", { type: "button", id: "fewer", "aria-label": "One sampler less", "aria-keyshortcuts": "-", onclick: order(-1) }, "−"),
      this.count,
      el("button", { type: "button", id: "more", "aria-label": "One sampler more", "aria-keyshortcuts": "+", onclick: order(1) }, "+"),
      el("button", { type: "button", id: "pause", onclick: () => act("pause", {}) }, "Pause all"),
      el("button", { type: "button", id: "resume", onclick: () => act("resume", {}) }, "Resume all"),
      el("button", { type: "button", id: "stop", class: "danger", onclick: () => act("stop", {}, "Stop the run? `tandem run … --resume` goes on with it.") }, "Stop the run"),
    );
    this.note = el("p", { class: "note" });
    this.table = el("table", { class: "stack" },
      el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))), this.body);
    this.element = el(
      "section", { class: "card", "aria-labelledby": "replicas-title" },
      el("h2", { id: "replicas-title" }, "Services and replicas"),
      this.controls, this.note,
      this.table,
    );
  }

  // A row with the orders for one sampler.
  row(one) {
    const row = el("tr", {}, COLUMNS.map((label, place) => el(place ? "td" : "th", { "data-label": label, scope: place ? null : "row" })));
    if (one.kind === "rollout") {
      const name = one.name;
      row.lastChild.append(el("span", { class: "actions" },
        el("button", { type: "button", "aria-label": `Drain ${name}`, onclick: () => this.act("drain", { name }, `Let ${name} finish its groups and leave?`) }, "Drain"),
        el("button", { type: "button", onclick: (event) => this.act(event.target.dataset.order, { name }) }, "Pause")));
    }
    return row;
  }

  show(state) {
    const samplers = state.services.filter((one) => one.kind === "rollout" && one.state !== "draining");
    this.wanted = state.desired.rollout ?? samplers.length;
    say(this.count, String(this.wanted));
    const steers = state.role === "operate" && state.phase === "running";
    this.controls.hidden = !steers;
    this.controls.querySelector("#pause").disabled = samplers.every((one) => one.paused);
    this.controls.querySelector("#resume").disabled = !samplers.some((one) => one.paused);
    say(this.note, state.phase !== "running" ? "Nothing runs: there are no services to show." : steers ? "" : "This session may only look.");
    this.table.hidden = !state.services.length;
    keep(this.body, state.services, (one) => one.name,
      (one) => this.row(one),
      (row, one) => {
        cells(one).forEach((text, place) => say(row.children[place], text));
        const [drain, pause] = row.querySelectorAll("button");
        if (drain) {
          row.lastChild.firstChild.hidden = !steers;
          drain.disabled = one.state === "draining";
          say(pause, one.paused ? "Resume" : "Pause");
          pause.setAttribute("aria-label", `${pause.textContent} ${one.name}`);
          pause.dataset.order = one.paused ? "resume" : "pause";
        }
        row.children[1].className = `state ${standing(one)[1]}`;
      });
  }
}
