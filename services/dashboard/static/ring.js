// The ring as a diagram: services, the queues between them, credits and weights on their way back.

import { duration, el, percent, say, svg, whole } from "./dom.js";

const NODES = [
  ["feed", "Feed", null],
  ["rollout", "Samplers", "prompts_leased"],
  ["reward", "Scorers", "generated_leased"],
  ["trainer", "Trainer", "scored_claimed"],
];
const QUEUES = [["prompts", "prompts_waiting"], ["generated", "generated_waiting"], ["scored", "scored_waiting"]];
const WIDE = { view: "0 0 960 270", box: [182, 92], at: (n) => [10 + n * 253, 46], across: true };
const NARROW = { view: "0 0 330 600", box: [190, 84], at: (n) => [10, 8 + n * 150], across: false };

// How many run, what they are waiting for, and else how busy they are with how many groups.
function standing(kind, held, state) {
  const all = state.services.filter((one) => one.kind === kind);
  const up = all.filter((one) => one.state === "running");
  const running = all.length ? `${up.length} of ${all.length} running` : state.phase === "running" ? "none" : "";
  const busy = up.map((one) => one.busy).filter((share) => share !== undefined);
  const share = busy.length ? busy.reduce((sum, one) => sum + one, 0) / busy.length : null;
  const counts = state.counts;
  const work = [
    ...(share === null ? [] : [`${percent(Math.min(1, share))} busy`]),
    ...(counts[held] ? [`${whole(counts[held])} ${counts[held] === 1 ? "group" : "groups"}`] : []),
  ];
  let waits = "";
  const feed = all.find((one) => one.activity);
  const waiting = all.find((one) => one.waiting_seconds > 1);
  if (!all.length || state.phase !== "running") waits = "";
  else if (!up.length) waits = all[0].state;
  else if (all.every((one) => one.paused)) waits = "paused";
  else if (kind === "feed") waits = counts.outstanding >= credits(state) ? "waits for credits" : (feed?.activity ?? "");
  else if (kind === "trainer") waits = waiting ? `waits for groups (${duration(waiting.waiting_seconds)})` : "";
  else if (kind === "rollout") waits = !counts.prompts_leased && !counts.prompts_waiting ? "wait for prompts" : "";
  else waits = !counts.generated_leased && !counts.generated_waiting ? "wait for answers" : "";
  return [running, waits, work.join(", ")];
}

const credits = (state) => (state.plan.staleness_budget + 1) * state.plan.groups_per_batch;

export class Ring {
  constructor() {
    this.element = el("div");
    this.narrow = matchMedia("(max-width: 700px)");
    this.narrow.addEventListener("change", () => this.draw());
    this.draw();
  }

  draw() {
    const plan = this.narrow.matches ? NARROW : WIDE;
    const [width, height] = plan.box;
    this.texts = {};
    const text = (key, x, y, attributes = {}) => (this.texts[key] = svg("text", { x, y, ...attributes }));
    const arrow = { "marker-end": "url(#arrow)" };
    const marker = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
    marker.append(svg("path", { d: "M0 0 8 4 0 8z" }));
    this.nodes = {};
    const parts = [svg("defs", {}, marker)];
    NODES.forEach(([kind, label], place) => {
      const [x, y] = plan.at(place);
      this.nodes[kind] = svg(
        "g", {},
        svg("rect", { x, y, width, height, rx: 10 }),
        svg("text", { x: x + 12, y: y + 25, class: "title" }, label),
        text(`${kind}/up`, x + 12, y + 48),
        text(`${kind}/waits`, x + 12, y + 70, { class: "small" }),
      );
      parts.push(this.nodes[kind]);
    });
    QUEUES.forEach(([stage], place) => {
      const [x, y] = plan.at(place);
      const [nextX, nextY] = plan.at(place + 1);
      if (plan.across) {
        const middle = (x + width + nextX) / 2;
        const centre = { "text-anchor": "middle" };
        parts.push(svg("path", { d: `M${x + width} ${y + 46}H${nextX - 2}`, ...arrow }));
        parts.push(text(`${stage}/count`, middle, y + 34, { ...centre, class: "count" }));
        parts.push(svg("text", { x: middle, y: y + 66, ...centre, class: "small" }, stage));
      } else {
        parts.push(svg("path", { d: `M${x + 50} ${y + height}V${nextY - 2}`, ...arrow }));
        parts.push(text(`${stage}/count`, x + 62, y + height + 29, { class: "count" }));
        parts.push(svg("text", { x: x + 62, y: y + height + 48, class: "small" }, stage));
      }
    });
    if (plan.across) {
      parts.push(svg("path", { d: "M866 138V186H352V140", ...arrow }), text("weights", 609, 178, { "text-anchor": "middle" }));
      parts.push(svg("path", { d: "M906 138V238H95V140", ...arrow }), text("credits", 500, 230, { "text-anchor": "middle" }));
    } else {
      parts.push(svg("path", { d: "M200 486H240V200H202", ...arrow }), svg("path", { d: "M200 516H300V50H202", ...arrow }));
      parts.push(text("weights", 10, 566), text("credits", 10, 590));
    }
    this.svg = svg("svg", { class: "ring", viewBox: plan.view, role: "img" }, parts);
    this.element.replaceChildren(this.svg);
    if (this.state) this.show(this.state);
  }

  show(state) {
    this.state = state;
    const counts = state.counts;
    const said = [];
    for (const [kind, label, held] of NODES) {
      const [up, waits, work] = standing(kind, held, state);
      say(this.texts[`${kind}/up`], up);
      say(this.texts[`${kind}/waits`], waits || work);
      this.nodes[kind].setAttribute("class", /wait|paused/.test(waits) ? "waits" : "");
      said.push([`${label}: ${up}`, waits || work].filter(Boolean).join(", "));
    }
    for (const [stage, waiting] of QUEUES) {
      say(this.texts[`${stage}/count`], whole(counts[waiting] ?? 0));
      said.push(`${counts[waiting] ?? 0} ${stage} waiting`);
    }
    const total = credits(state);
    const free = Math.max(0, total - (counts.outstanding ?? 0));
    say(this.texts.credits, `credits: ${free} of ${total} free`);
    say(this.texts.weights, `weights: version ${(counts.published_version ?? -1) < 0 ? "–" : counts.published_version}`);
    this.svg.setAttribute("aria-label", `${said.join("; ")}; ${this.texts.credits.textContent}; ${this.texts.weights.textContent}`);
  }
}
