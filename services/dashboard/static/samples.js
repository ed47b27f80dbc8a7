// The sample browser: search over the answers of the recorded batches, and one answer by token.

import { el, number, percent, whole } from "./dom.js";
import { get } from "./server.js";

// The fates of samples.py, and what the page says of them.
const FATES = {
  trained: "trained",
  "equal rewards": "trained, but all rewards of its group are equal",
  unscored: "not trained: not scored",
  baseline: "not trained: greedy answer to compare with",
  "zero variance": "group dropped: all its rewards are equal",
  stale: "group dropped: sampled by versions older than run.hard_staleness_cap allows",
  "too few scored rows": "group dropped: too few of its answers were scored",
  "no scored baseline": "group dropped: its greedy answer was not scored",
  "unknown version": "group dropped: the version that sampled it is unknown",
};

const choices = (id, label, options) =>
  el("label", {}, `${label} `, el("select", { id }, options.map(([value, text]) => el("option", { value }, text))));

export class Samples {
  constructor() {
    this.words = el("input", { type: "search", id: "words", "aria-label": "Search prompts and answers", placeholder: "words of a prompt or answer", "aria-keyshortcuts": "/" });
    this.fate = choices("fate", "Fate", [["", "all"], ...Object.keys(FATES).map((fate) => [fate, fate])]);
    this.version = el("input", { type: "number", id: "version", min: 1, "aria-label": "Only the batch of version", placeholder: "version" });
    this.colour = choices("colour", "Colour", [["version", "by version"], ["logprob", "by log-prob"], ["none", "none"]]);
    this.note = el("p", { class: "note", role: "status" });
    this.dropped = el("div");
    this.list = el("ul", { class: "samples", "aria-label": "Answers" });
    this.more = el("button", { type: "button", onclick: () => this.search(this.offset + 25) }, "More");
    this.detail = el("article", { class: "card", "aria-live": "polite", tabindex: -1 }, el("p", { class: "note" }, "Choose an answer."));
    const again = () => this.search(0);
    const form = el("form", { class: "row", role: "search", onsubmit: (event) => { event.preventDefault(); again(); } },
      this.words, this.fate, this.version, el("button", {}, "Search"), this.colour);
    this.fate.addEventListener("change", again);
    this.colour.addEventListener("change", () => this.showAnswer());
    this.element = el("div", {}, form, this.note, this.dropped,
      el("div", { class: "browser" }, el("div", {}, this.list, this.more), this.detail));
  }

  show(run, state, attempt) {
    this.attempt = attempt;
    this.drops(state);
    const reading = `${run.key} ${state.read.batches || -(state.counts.dropped ?? 0)}`;
    if (reading === this.reading || this.busy) return;
    if (!this.reading?.startsWith(run.key)) {
      this.answer = null;
      this.offset = 0;
    }
    this.run = run;
    this.reading = reading;
    if (this.answer?.fate.match(/^(trained|equal rewards)$/) && this.answer.advantage === null) this.refresh(this.answer);
    if (!this.offset && !this.answer) this.search(0);
  }

  // By reason, with the first error. The search finds answers of those groups that the trainer rejected.
  drops(state) {
    const reasons = Object.entries(state.counts).filter(([name, count]) => name.startsWith("dropped:") && count);
    const text = JSON.stringify([reasons, state.drop_errors]);
    if (text === this.droppedText) return;
    this.droppedText = text;
    this.dropped.replaceChildren(...(reasons.length ? [el("details", {}, el("summary", {}, `Dropped groups: ${reasons.reduce((sum, [, count]) => sum + count, 0)}`),
      el("p", { class: "note" }, "Answers of groups that the trainer rejected can be searched, at most as many groups a batch as it trains. By reason, with the first error:"),
      el("ul", {}, reasons.map(([name, count]) => {
        const reason = name.slice(8);
        const error = state.drop_errors[reason];
        return el("li", {}, `${reason.replaceAll("_", " ")}: ${count}`, error ? el("pre", {}, error) : null);
      })))] : []));
  }

  async search(offset) {
    if (!this.run) return;
    const query = new URLSearchParams({ words: this.words.value, fate: this.fate.querySelector("select").value, version: this.version.value, offset });
    this.busy = true;
    await this.attempt(async () => {
      const found = await get(`/api/runs/${this.run.key}/samples?${query}`);
      this.offset = offset;
      const rows = found.rows.map((row) => this.row(row));
      if (offset) this.list.append(...rows);
      else this.list.replaceChildren(...rows);
      this.more.hidden = this.list.children.length >= found.found;
      const partly = found.indexed < found.batches ? `; ${found.indexed} of ${found.batches} batches are indexed` : "";
      this.note.textContent = found.batches || found.found ? `${whole(found.found)} answers${partly}` : "No batch is recorded yet: answers appear with the first.";
      if (found.indexed < Math.min(found.batches, 500)) setTimeout(() => { this.reading = ""; }, 1000);
    });
    this.busy = false;
  }

  row(row) {
    const place = `${row.version}/${row.group_id}/${row.number}`;
    const reward = row.reward === null ? "no reward" : `reward ${number(row.reward, 4)}`;
    return el("li", {}, el("button", { type: "button", class: "sample", onclick: () => this.open(place) },
      el("span", { class: "meta" }, `version ${row.version} · group ${row.group_id} · ${reward} · staleness ${row.staleness} · ${row.tokens} tokens · ${row.fate}`),
      el("span", { class: "line" }, row.prompt), el("span", { class: "line" }, row.answer || "(empty)")));
  }

  async open(place) {
    await this.attempt(async () => {
      this.answer = await get(`/api/runs/${this.run.key}/samples/${place}`);
      this.showAnswer();
      this.detail.focus();
      this.detail.scrollIntoView({ block: "start" });
    });
  }

  // A batch is recorded before it is trained; only then its answers have advantages.
  async refresh(shown) {
    await this.attempt(async () => {
      const now = await get(`/api/runs/${this.run.key}/samples/${shown.version}/${shown.group_id}/${shown.number}`);
      if (this.answer !== shown) return;
      this.answer = now;
      this.showAnswer();
    });
  }

  showAnswer() {
    const one = this.answer;
    if (!one) return;
    const facts = [
      ["Fate", one.fate === "trained" || one.fate === "equal rewards" ? `${FATES[one.fate]} (version ${one.version})` : FATES[one.fate] ?? one.fate],
      ...(one.dropped && one.dropped !== one.fate ? [["Its group", FATES[one.dropped] ?? `dropped: ${one.dropped}`]] : []),
      ["Reward", one.reward === null ? `none: ${one.unscored.filter(Boolean).join(": ")}` : number(one.reward, 5)],
      ...Object.entries(one.breakdown).map(([name, value]) => [`· ${name}`, number(value, 5)]),
      ["Advantage (mean of its tokens)", one.advantage === null ? "–" : number(one.advantage, 4)],
      ["Rewards of its group", one.others.map((reward) => (reward === null ? "none" : number(reward, 3))).join(", ")],
      ["Ended by", one.finish_reason],
      ["Ground truth", one.ground_truth],
      ["Data source", one.data_source || "–"],
    ];
    this.detail.replaceChildren(
      el("h2", {}, `Answer ${one.number} of group ${one.group_id}`),
      el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("h3", {}, "Prompt"), el("pre", {}, one.prompt),
      el("h3", {}, "Answer"), ...this.text(one),
    );
  }

  text(one) {
    const way = this.colour.querySelector("select").value;
    const tokens = one.segments.flat();
    if (way === "none" || !tokens.length) {
      const why = way === "none" ? [] : [el("p", { class: "note" }, "Without colours: the model's tokenizer.json is not on this machine.")];
      return [...why, el("pre", { class: "answer" }, one.answer || "(empty)")];
    }
    const versions = [...new Set(tokens.map(([, version]) => version).filter((version) => version !== null))];
    const legend = way === "version"
      ? versions.map((version, place) => el("span", { class: `token v${place % 6}` }, `version ${version}`))
      : [0.9, 0.5, 0.1, 0.01].map((share) => el("span", { class: `token p${shade(Math.log(share))}` }, `p ≥ ${share}`)).concat(el("span", { class: "token p4" }, "less"));
    const spans = [];
    for (const [text, version, logprob] of tokens) {
      const kind = version === null ? "context" : way === "version" ? `v${versions.indexOf(version) % 6}` : `p${shade(logprob)}`;
      const last = spans.at(-1);
      if (way === "version" && last?.className === `token ${kind}`) last.textContent += text;
      else spans.push(el("span", { class: `token ${kind}`, title: version === null ? "not sampled by the policy" : way === "version" ? `sampled by version ${version}` : `p = ${percent(Math.exp(logprob))}, log-prob ${number(logprob, 3)}, version ${version}` }, text));
    }
    return [el("p", { class: "row meta" }, legend), el("pre", { class: "answer" }, spans)];
  }
}

// 0: p ≥ 0.9 … 4: p < 0.01
function shade(logprob) {
  const place = [0.9, 0.5, 0.1, 0.01].findIndex((share) => logprob >= Math.log(share) - 1e-9);
  return place < 0 ? 4 : place;
}
