// Figures of the services over time, for administrators: one request for the past, then a point in the stream each ten seconds.
import { $, bytes, make, short } from "./dom.js";
import { isAdmin } from "./panels.js";
import { axisLook, colour, redraw } from "./plots.js";
import { get } from "./stream.js";

const percent = (value) => `${Math.round(100 * value)} %`, seconds = (value) => `${short(value)} s`;
const FIGURES = { gpu_memory: ["GPU memory", bytes], gpu_utilization: ["GPU utilisation", percent], host_memory: ["Memory", bytes], busy: ["At work", percent],
  queue: ["Requests", (value) => short(value)], tokens: ["Tokens per second", (value) => short(value)], push: ["Push of weights", seconds], lag: ["Oldest change not durable", seconds] };
const HEIGHT = 150, plots = new Map();
let past = null, counts = {}, busy = false, tip = () => {};

export function setTip(shown) { tip = shown; }

async function load() {
  if (busy || !isAdmin()) return;
  busy = true;
  try {
    past = await get(`live/system?hours=${$("system-hours").value}&points=240`);
    counts = {};
    $("system-said").textContent = "";
    show();
  } catch (error) {
    $("system-said").textContent = error.message;
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
  for (const one of plots.values()) { one.plot?.destroy(); one.figure.remove(); }
  plots.clear();
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
  const wanted = Object.keys(FIGURES).filter((figure) => groups.has(figure));
  for (const [figure, one] of plots) if (!groups.has(figure)) { one.plot?.destroy(); one.figure.remove(); plots.delete(figure); }
  wanted.forEach((figure, place) => {
    if (!plots.has(figure)) plots.set(figure, frame(figure));
    const one = plots.get(figure);
    if ($("system-charts").children[place] !== one.figure) $("system-charts").insertBefore(one.figure, $("system-charts").children[place] ?? null);
    draw(one, groups.get(figure));
  });
}

// Labels end with the base model's name, which says nothing if all have the same.
function shortened(labels) {
  const ends = new Set(labels.map((label) => /( of )?([^ ]+)$/.exec(label)[0]));
  return labels.map((label) => (ends.size === 1 && label.includes(" of ") ? label.slice(0, label.lastIndexOf(" of ")) : label));
}

const clock = (at, withSeconds) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}) });

function frame(figure) {
  const [title, unit] = FIGURES[figure], legend = make("span", { class: "keys" }), box = make("div", { class: "plot" });
  return { title, unit, legend, box, shape: "", plot: null, figure: make("figure", { class: "curve" }, make("figcaption", {}, make("span", {}, title), legend), box) };
}

function draw(one, series) {
  const { unit } = one, names = shortened(series.map(([label]) => label)), last = series.map(([, each]) => each.mean.findLast((value) => value !== null));
  one.legend.replaceChildren(...names.map((name, number) => make("span", {}, make("i", { class: `swatch run-${number % 10}` }), names.length > 1 ? ` ${name} ` : " ", make("b", {}, unit(last[number])))));
  one.box.setAttribute("role", "img");
  one.box.setAttribute("aria-label", `${one.title}: ${names.map((name, index) => `${name} ${unit(last[index])}`).join(", ")}`);
  one.series = series;
  one.names = names;
  one.top = Math.max(...series.flatMap(([, each]) => each.high.map((value) => value ?? 0)), unit === percent ? 1 : 0) || 1;
  const data = [past.at, ...series.map(([, each]) => each.mean)], width = Math.max(200, Math.floor(one.box.clientWidth)), shape = JSON.stringify([names, past.period_s, past.at.length]);
  redraw(one, shape, width, HEIGHT, data, () => settings(one));
}

function settings(one) {
  const axis = axisLook();
  return {
    scales: { x: { time: true, range: () => [past.at[0], past.at.at(-1)] }, y: { range: () => [0, one.top * (one.unit === percent ? 1 : 1.06)] } },
    axes: [
      { ...axis, size: 24, gap: 4, space: 70, grid: { show: false }, values: (_, marks) => marks.map((mark) => clock(mark)) },
      { ...axis, size: 58, gap: 6, space: 30, values: (_, marks) => marks.map((mark) => one.unit(mark)) },
    ],
    series: [{}, ...one.series.map(([, each], number) => ({ stroke: colour(`--run-${number % 10}`), width: 1.7, spanGaps: false, points: { show: each.mean.filter((value) => value !== null).length < 60, size: 4 } }))],
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    hooks: { ready: [(plot) => {
      plot.over.addEventListener("pointermove", (event) => hover(plot, one, event));
      plot.over.addEventListener("pointerleave", () => tip(null));
    }] },
  };
}

function hover(plot, one, event) {
  const index = plot.posToIdx(event.clientX - plot.over.getBoundingClientRect().left), at = past.at[index];
  if (at === undefined) return tip(null);
  const known = one.series.flatMap(([, each], number) => each.mean[index] === null ? [] : [`${one.names[number]}: ${one.unit(each.mean[index])}${each.high[index] > each.mean[index] * 1.02 ? `, at most ${one.unit(each.high[index])}` : ""}`]);
  tip(event, [clock(at, true), ...(known.length ? known : ["nothing known"])]);
}

$("system-hours").addEventListener("change", load);
// Colours are drawn into the charts, so another scheme needs new ones.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const one of plots.values()) one.shape = ""; if (past) show(); });
let resized = null;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (past) show(); }, 150); });
