// The charts, drawn by Bokeh. Their data grows with the run.

import { el } from "./dom.js";
import { get } from "./server.js";

let library = null;

// Bokeh makes style elements, which the page's policy takes only with the nonce of this page.
const nonce = document.querySelector("script[nonce]").nonce;
const create = document.createElement.bind(document);
document.createElement = (tag, options) => {
  const element = create(tag, options);
  if (tag === "style") element.nonce = nonce;
  return element;
};

// Bokeh is loaded when the first chart is drawn.
function bokeh() {
  library ??= new Promise((resolve, reject) => {
    document.head.append(el("script", { src: "/static/bokeh.min.js", onload: () => resolve(window.Bokeh), onerror: reject }));
  });
  return library;
}

export class Curves {
  constructor() {
    this.note = el("p", { class: "note" }, "Reads the curves …");
    this.legend = el("p", { class: "meta" });
    this.grid = el("div", { class: "charts" });
    this.element = el("div", {}, this.note, this.legend, this.grid);
    this.shape = null;
    this.busy = false;
    this.asked = "";
  }

  // Draws anew if the runs or the theme changed, else only brings the data up to date.
  async show(runs, theme, reading) {
    const query = new URLSearchParams(runs.map((run) => ["run", run.key]));
    query.append("theme", theme);
    const wanted = query.toString();
    if (this.busy || (wanted === this.asked && reading === this.reading)) return;
    const drawn = wanted === this.asked && this.shape !== null;
    this.busy = true;
    this.asked = wanted;
    this.reading = reading;
    try {
      if (drawn) await this.update(query);
      else await this.draw(query, runs);
    } finally {
      this.busy = false;
    }
  }

  async draw(query, runs) {
    const [found, Bokeh] = await Promise.all([get(`/api/charts?${query}`), bokeh()]);
    const elements = Object.entries(found.titles);
    this.document?.clear();
    this.said = elements.map(() => el("span", { class: "meta" }));
    this.grid.replaceChildren(...elements.map(([id, title], place) =>
      el("section", { class: "card", "aria-label": title }, el("h3", {}, title), el("div", { id }), this.said[place])));
    this.note.textContent = elements.length
      ? "Over the trained batches. Drag to move, use the wheel to zoom; all curves move together."
      : "No batch is trained and no evaluation is done yet: the curves begin with the first.";
    this.legend.replaceChildren(...(runs.length > 1 ? runs.map((run, place) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = (found.colors ?? [])[place];
      return el("span", {}, swatch, `${run.name} `);
    }) : []));
    this.shape = JSON.stringify(found.shape);
    if (!elements.length) return;
    await Bokeh.embed.embed_items(found.documents, found.items);
    this.document = Bokeh.documents.at(-1);
  }

  async update(query) {
    const found = await get(`/api/curves?${query}`);
    if (JSON.stringify(found.shape) !== this.shape) {
      this.asked = "";
      this.shape = null;
      return;
    }
    for (const [key, columns] of Object.entries(found.lines)) this.document.get_model_by_name(key).data = columns;
  }
}
