// Figures of the services over time, for administrators: one request for the past, then a point in the stream each ten seconds.
import { $, bytes, draw, make, short } from "./dom.js";
import { isAdmin } from "./panels.js";
import { get } from "./stream.js";

const percent = (value) => `${Math.round(100 * value)} %`, seconds = (value) => `${short(value)} s`;
const FIGURES = { gpu_memory: ["GPU memory", bytes], host_memory: ["Memory", bytes], busy: ["At work", percent], gpu_use: ["GPU utilisation", percent],
  queue: ["Requests", (value) => short(value)], tokens: ["Tokens per second", (value) => short(value)], push: ["Push of weights", seconds], lag: ["Oldest change not durable", seconds] };
const HEIGHT = 132, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;
let past = null, counts = {}, busy = false, tip = () => {};

export function setTip(shown) { tip = shown; }

async function load() {
  if (busy || !isAdmin()) return;
  busy = true;
  try {
    past = await get(`live/system?hours=${$("system-hours").value}&points=240`);
    counts = {};
    show();
  } catch (error) {
    $("system-charts").replaceChildren(make("p", { class: "empty" }, error.message));
  } finally {
    busy = false;
  }
}

// Adds a point of the stream. A point of the chart joins those of `period_s` seconds: their mean and their highest value.
function add(told) {
  const bucket = Math.floor(told.at / past.period_s) * past.period_s;
  if (bucket > past.at.at(-1)) {
    counts = {};
    while (past.at.at(-1) < bucket) {
      past.at.push(past.at.at(-1) + past.period_s); past.at.shift();
      for (const one of Object.values(past.series)) for (const list of [one.mean, one.high]) { list.push(null); list.shift(); }
    }
  }
  for (const [name, value] of Object.entries(told.values)) {
    const one = past.series[name] ??= { mean: past.at.map(() => null), high: past.at.map(() => null) }, last = past.at.length - 1, known = one.mean[last];
    const count = counts[name] = (counts[name] ?? (known === null ? 0 : 1)) + 1;
    one.mean[last] = known === null ? value : known + (value - known) / count;
    one.high[last] = Math.max(one.high[last] ?? value, value);
  }
}

// A new caller may not be an administrator.
export function beginSystem() {
  past = null;
  $("system").hidden = !isAdmin();
  $("system-charts").replaceChildren();
}

export function showSystem(told) {
  if (!past || told.at - past.at.at(-1) > 20 * past.period_s) return load();
  add(told);
  show();
}

function show() {
  const groups = new Map();
  for (const name of Object.keys(past.series)) {
    const [figure, label] = name.split("|");
    if (!groups.has(figure)) groups.set(figure, []);
    groups.get(figure).push([label, past.series[name]]);
  }
  const wide = innerWidth > 56 * 16, width = Math.max(220, Math.floor(($("system").clientWidth - 36 - (wide ? 29 : 0)) / (wide ? 2 : 1)));
  $("system-charts").replaceChildren(...Object.keys(FIGURES).filter((figure) => groups.has(figure)).map((figure) => chart(figure, groups.get(figure), width)));
}

// Labels end with the base model's name, which says nothing if all have the same.
function shortened(labels) {
  const ends = new Set(labels.map((label) => /( of )?([^ ]+)$/.exec(label)[0]));
  return labels.map((label) => (ends.size === 1 && label.includes(" of ") ? label.slice(0, label.lastIndexOf(" of ")) : label));
}

function marks(top, unit) {
  const base = unit === bytes ? 1000 ** Math.floor(Math.log10(top) / 3) : 1, power = base * 10 ** Math.floor(Math.log10(top / base / 2));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => top / size <= 3) ?? top;
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, at) => at * step);
}

const hour = (at, withSeconds) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}) });

function chart(figure, series, width) {
  const [title, unit] = FIGURES[figure], names = shortened(series.map(([label]) => label)), at = past.at;
  const last = series.map(([, one]) => one.mean.findLast((value) => value !== null));
  const top = Math.max(...series.flatMap(([, one]) => one.high.map((value) => value ?? 0)), unit === percent ? 1 : 0) || 1;
  const lines = marks(top, unit), high = lines.at(-1);
  const x = (index) => LEFT + (index / (at.length - 1)) * (width - LEFT - RIGHT), y = (value) => TOP + (1 - value / high) * (HEIGHT - TOP - BOTTOM);
  const svg = draw("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${names.map((name, index) => `${name} ${unit(last[index])}`).join(", ")}` });
  for (const mark of lines) {
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }), draw("text", { x: LEFT - 7, y: y(mark) + 4, "text-anchor": "end" }, unit(mark)));
  }
  for (const share of [0, 1 / 3, 2 / 3, 1]) {
    const index = Math.round(share * (at.length - 1));
    svg.append(draw("text", { x: x(index), y: HEIGHT - 4, "text-anchor": share === 1 ? "end" : share ? "middle" : "start" }, hour(at[index])));
  }
  series.forEach(([, one], number) => {
    let path = "", isDown = false;
    one.mean.forEach((value, index) => {
      if (value !== null) path += `${isDown ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      if (value !== null && !isDown && (one.mean[index + 1] ?? null) === null) svg.append(draw("circle", { class: `line-${number % 6}`, cx: x(index), cy: y(value), r: 2 }));
      isDown = value !== null;
    });
    svg.append(draw("path", { class: `path line-${number % 6}`, d: path }));
  });
  const cross = draw("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), index = Math.round((((event.clientX - box.left) * width / box.width - LEFT) / (width - LEFT - RIGHT)) * (at.length - 1));
    if (index < 0 || index >= at.length) return tip(null);
    cross.setAttribute("x1", x(index)); cross.setAttribute("x2", x(index)); cross.setAttribute("visibility", "visible");
    const known = series.flatMap(([, one], number) => one.mean[index] === null ? [] : [`${names[number]}: ${unit(one.mean[index])}${one.high[index] > one.mean[index] * 1.02 ? `, at most ${unit(one.high[index])}` : ""}`]);
    tip(event, [hour(at[index], true), ...(known.length ? known : ["nothing known"])]);
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip(null); });
  const legend = make("span", { class: "keys" }, names.map((name, number) => make("span", {}, make("i", { class: `line-${number % 6}` }), names.length > 1 ? `${name} ` : null, make("b", {}, unit(last[number])))));
  return make("figure", { class: "curve" }, make("figcaption", {}, make("span", {}, title), legend), svg);
}

$("system-hours").addEventListener("change", load);
let resized = null;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (past) show(); }, 150); });
