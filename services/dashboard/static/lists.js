// Reward jobs and events, as tables.

import { el, number, whole } from "./dom.js";
import { get } from "./server.js";

const time = (seconds) => (seconds ? new Date(1000 * seconds).toLocaleString() : "–");

function table(label, columns, rows) {
  return el("table", { class: "stack", "aria-label": label },
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, place) => el("td", { "data-label": columns[place] }, cell))))));
}

class List {
  constructor() {
    this.element = el("section", { class: "card" });
  }

  async show(run, attempt, reading) {
    const asked = `${run.key} ${reading}`;
    if (asked === this.asked) return;
    this.asked = asked;
    await attempt(async () => this.element.replaceChildren(...this.parts(await get(`/api/runs/${run.key}/${this.path}`))));
  }
}

export class Events extends List {
  path = "events";

  parts({ events }) {
    const head = el("h2", {}, "Events");
    if (!events.length) return [head, el("p", { class: "note" }, "Nothing has happened yet.")];
    return [head, table("Events", ["time", "kind", "what"], events.map((event) => [time(event.time), event.kind, event.text]))];
  }
}

export class Jobs extends List {
  path = "jobs";

  away() {
    this.asked = "";
    this.element.replaceChildren(el("h2", {}, "Reward jobs"), el("p", { class: "note" }, "The run's reward service, which has the jobs, is not running."));
  }

  parts({ jobs }) {
    const head = el("h2", {}, "Reward jobs");
    const how = el("p", { class: "note" }, "Durable jobs of the run's reward service, the newest first. ", el("code", {}, "tandem reward submit"), " makes them.");
    if (!jobs.length) return [head, how, el("p", {}, "There are none.")];
    return [head, how, table("Reward jobs", ["name", "state", "progress", "not scored", "mean", "priority", "submitted", "id"], jobs.map((job) => {
      const unscored = Object.entries(job.num_unscored).map(([reason, count]) => `${reason} ${count}`).join(", ");
      const done = job.num_items - job.num_waiting;
      const bar = el("progress", { max: Math.max(1, job.num_items), "aria-label": `${done} of ${job.num_items} items` });
      bar.value = done;
      return [job.name || "–", job.state, el("span", { class: "bar" }, bar, ` ${whole(done)} of ${whole(job.num_items)}`), unscored || "0",
        job.num_scored ? number(job.mean_value, 4) : "–", String(job.priority), time(job.created_at), el("code", {}, job.job_id)];
    }))];
  }
}
