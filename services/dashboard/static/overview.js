// State of the run, the ring, and its replicas.

import { duration, el, keep, number, percent, say, whole } from "./dom.js";
import { Ring } from "./ring.js";
import { Replicas } from "./replicas.js";

const PHASES = { running: "running", finished: "finished", stopped: "not running" };

function figures(state) {
  const now = state.progress;
  const budget = state.plan.staleness_budget;
  return [
    ["Run", PHASES[state.phase]],
    ["Batches", `${whole(now.step)} of ${whole(now.total)}`],
    ["Time left", state.phase === "running" ? duration(now.seconds_left) : "–"],
    ["Reward, last batches", number(now.reward)],
    ["Accuracy", now.accuracy === null ? "–" : `${(100 * now.accuracy).toFixed(1)} % (version ${now.accuracy_step})`],
    ["Staleness (budget " + budget + ")", now.staleness_mean === null ? "–" : `${now.staleness_mean.toFixed(2)}, max ${now.staleness_max}`],
    ["Samplers", now.sampler_tokens_per_second === null ? "–" : `${whole(now.sampler_tokens_per_second)} tokens/s`],
    ["Trainer", now.trainer_tokens_per_second === null ? "–" : `${whole(now.trainer_tokens_per_second)} tokens/s`],
    ["Samplers idle", percent(now.sampler_idle)],
    ["Trainer idle", percent(now.trainer_idle)],
    ["Who waits", now.waiting || "–"],
    ["Dropped groups", dropped(state.counts)],
  ];
}

function dropped(counts) {
  const reasons = Object.entries(counts).filter(([name, count]) => name.startsWith("dropped:") && count);
  const words = reasons.sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name.slice(8).replaceAll("_", " ")} ${count}`);
  return words.length ? words.join(", ") : whole(counts.dropped ?? 0);
}

export class Overview {
  constructor(act) {
    this.tiles = el("dl", { class: "tiles", id: "tiles" });
    this.progress = el("progress", { max: 1, value: 0, "aria-label": "Batches trained" });
    this.ring = new Ring();
    this.replicas = new Replicas(act);
    this.element = el(
      "div", {},
      this.tiles, this.progress,
      el("section", { class: "card", "aria-labelledby": "ring-title" },
        el("h2", { id: "ring-title" }, "The ring"),
        el("p", { class: "note" }, "Groups that wait between the services, now. A dashed frame marks who waits."),
        this.ring.element),
      this.replicas.element,
    );
  }

  show(state) {
    keep(this.tiles, figures(state), ([name]) => name.split(" (")[0],
      () => el("div", {}, el("dt"), el("dd")),
      (tile, [name, value]) => {
        say(tile.firstChild, name);
        say(tile.lastChild, value);
      });
    this.progress.value = state.progress.total ? state.progress.step / state.progress.total : 0;
    this.ring.show(state);
    this.replicas.show(state);
  }
}
