// All text from a server, a client or a model becomes text nodes. None of it is ever parsed as HTML.
export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Sets the text of an element that has nothing else.
export function say(element, text) {
  if (element.textContent === text) return;
  if (element.firstChild) element.firstChild.data = text;
  else element.textContent = text;
}

// Replaces the children of an element that is drawn again. The focus stays on the control with the same place and name.
export function swap(container, ...children) {
  const active = document.activeElement, isWithin = active !== container && container.contains(active);
  const [label, nth] = isWithin ? [labelOf(active), controls(container, labelOf(active)).indexOf(active)] : [];
  container.replaceChildren(...children.flat().filter((child) => child !== null && child !== false));
  if (isWithin) controls(container, label)[Math.max(0, nth)]?.focus({ preventScroll: true });
}
const labelOf = (one) => one.tagName === "SUMMARY" ? one.tagName : `${one.closest("[data-path]")?.dataset.path ?? ""} ${one.title || one.textContent}`;
const controls = (container, label) => [...container.querySelectorAll("button, summary, a, input, select")].filter((one) => labelOf(one) === label);

const SVG = "http://www.w3.org/2000/svg";
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Formats a number with three digits, such as 0.982, 12.5 or 2.1e-8.
export function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e6) return value.toExponential(1).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(digits)).replace("-", "−");
}
export const count = (value) => Math.round(value).toLocaleString("en");
export const many = (value, noun, plural = `${noun}s`) => `${count(value)} ${value === 1 ? noun : plural}`;

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function ago(seconds) {
  const age = Math.max(0, Date.now() / 1000 - seconds);
  if (age < 1.5) return "now";
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (age >= size) return `${Math.floor(age / size)} ${name}`;
  return `${Math.floor(age)} s`;
}

// Shortens a model's id to the session's id and the number. The rest is the same for all models.
export function shortId(id) {
  const found = /^sess-([0-9a-f]{6})[0-9a-f]*(?:-\d+)?:(train|sample):(\d+)$/.exec(id);
  return found ? `${found[1]} ${found[2] === "train" ? "model" : "sampling"} ${found[3]}` : id;
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    window.prompt("Copy this:", text);  // no clipboard on plain http from another machine
  }
  setTimeout(() => { button.textContent = before; }, 1200);
}

export function table(columns, rows) {
  const head = columns.map(([name, kind]) => make("th", { class: kind || null, scope: "col" }, name));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
}
