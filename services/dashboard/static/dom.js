// Building elements. Text is always text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

// Sets the text of an element only if it changed, so that selections and screen readers are left alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Keeps the children of `parent` in the order of `items`: one child for each key, made once, then updated.
export function keep(parent, items, key, make, update) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const name = String(key(item));
    let child = there.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    there.delete(name);
    update(child, item);
    const place = before ? before.nextSibling : parent.firstChild;
    if (place !== child) parent.insertBefore(child, place);
    before = child;
  }
  for (const child of there.values()) child.remove();
}

export const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumSignificantDigits: digits });
export const whole = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const total = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}
