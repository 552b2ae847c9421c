// The curves of the selected run and of the runs beside it, over each other. Only the curves that are shown are fetched.
import { $, copy, count, make, many, say, short } from "./dom.js";
import { exportCsv, exportPng } from "./exports.js";
import { plotCurves } from "./plots.js";
import { Refused, get } from "./stream.js";
import { MOST_RUNS, change, onChange, view } from "./view.js";

const POINTS = 300, PACE_MS = 1000;
let page = null;  // what main.js supplies: models, nameOf, titles, pairs, hidden, loopStep, tip, showFound, refused
const fetched = new Map();  // by run: {query, model, found}
const slots = new Map();  // by run: the number of its colour
const figures = new Map();  // by metric
const waiting = new Map();  // by metric: what draws its chart in a next frame
let loading = false, again = false, drawing = false, plotting = false, controls = null, told = null;

export function startCharts(supplied) {
  page = supplied;
  controls = toolbar();
  const more = make("details", { class: "more", id: "more", open: view.more }, make("summary"), make("div", { class: "curves" }));
  more.addEventListener("toggle", () => { if (more.open !== view.more) change({ more: more.open }); });
  $("charts").append(controls.box, controls.chips, make("p", { class: "empty" }), make("div", { class: "curves", id: "curves" }), more);
  onChange(showCharts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetPlots(); drawSoon(); });
}

// Call it whenever the models or the selected one may have changed.
export function showCharts() {
  drawSoon();
  load();
}

const shownRuns = () => [...new Set([view.run, ...view.beside])].filter((id) => page.models.has(id)).slice(0, MOST_RUNS);
export const isBeside = (id) => view.beside.includes(id);
export function toggleBeside(id, isWanted) {
  const others = view.beside.filter((one) => one !== id);
  change({ beside: isWanted ? [...others, id].slice(-MOST_RUNS + 1) : others });
}

function slotOf(id, shown) {
  for (const known of [...slots.keys()]) if (!shown.includes(known)) slots.delete(known);
  if (!slots.has(id)) {
    const used = new Set(slots.values());
    slots.set(id, [...Array(MOST_RUNS).keys()].find((slot) => !used.has(slot)));
  }
  return slots.get(id);
}

const mainNames = () => page.pairs.flat(2);
const furtherNames = (shown) => [...new Set(shown.flatMap((id) => Object.keys(page.models.get(id).last)))].filter((name) => !mainNames().includes(name) && !page.hidden.includes(name));

function queryOf() {
  const query = new URLSearchParams({ points: POINTS });
  if (view.zoom) {
    const margin = Math.ceil(0.02 * (view.zoom[1] - view.zoom[0]));
    query.set("first", Math.max(0, Math.floor(view.zoom[0]) - margin)); query.set("last", Math.ceil(view.zoom[1]) + margin);
  }
  if (!view.more) for (const name of [...mainNames(), page.loopStep]) query.append("name", name);
  return query.toString();
}

async function load() {
  if (loading) { again = true; return; }
  loading = true;
  try {
    do {
      again = false;
      const query = queryOf(), shown = shownRuns();
      for (const id of [...fetched.keys()]) if (!shown.includes(id)) fetched.delete(id);
      const stale = shown.filter((id) => fetched.get(id)?.query !== query || fetched.get(id).model !== page.models.get(id));
      await Promise.all(stale.map((id) => loadRun(id, query)));
      if (stale.length) { drawSoon(); await new Promise((done) => setTimeout(done, again && queryOf() !== query ? 0 : PACE_MS)); }
    } while (again);
  } finally {
    loading = false;
  }
}

async function loadRun(id, query) {
  const model = page.models.get(id);
  try {
    fetched.set(id, { query, model, found: await get(`live/curves/${encodeURIComponent(id)}?${query}`) });
  } catch (error) {
    if (error instanceof Refused && error.status === 401) page.refused(error.message);
    else if (error instanceof Refused) fetched.set(id, { query, model, found: { curves: {}, last_step: 0 } });  // deleted meanwhile
    // Else the gateway is away: the page says so, and the next event tries again.
  }
}

function drawSoon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; draw(); });
}

// Returns the charts to draw: for each metric the runs that have it, and their held-out curves.
function charts(shown) {
  const has = (id, name) => fetched.get(id)?.found.curves[name]?.step.length > 0;
  const line = (id, name, isHeldOut) => ({
    id, name, isHeldOut, run: page.nameOf(page.models.get(id)), slot: slotOf(id, shown), curve: fetched.get(id).found.curves[name],
    latest: page.models.get(id).last[name] ?? fetched.get(id).found.curves[name].mean.at(-1), resumed: page.models.get(id).resumed?.step ?? null, loop: fetched.get(id).found.curves[page.loopStep] ?? null,
  });
  const chart = (names, others) => {
    const name = shown.map((id) => names.find((one) => has(id, one))).find(Boolean) ?? null;
    const held = (id) => others.find((other) => has(id, other));
    const runs = name ? shown.filter((id) => has(id, name)) : [];
    const own = runs.map((id) => line(id, name, false)), beside = shown.filter(held).map((id) => line(id, held(id), true));
    if (!own.length && !beside.length) return null;
    return { name: name ?? beside[0].name, lines: [...own, ...beside] };
  };
  const further = view.more ? furtherNames(shown).map((name) => chart([name], [])) : [];
  return { first: page.pairs.map(([names, others]) => chart(names, others)).filter(Boolean), further: further.filter(Boolean) };
}

function draw() {
  const shown = shownRuns(), box = $("charts");
  box.hidden = !shown.length;
  const latest = fetched.get(view.run)?.found ?? null;
  if (latest !== told) { told = latest; page.showFound(told ?? {}); }
  if (!shown.length) return;
  const { first, further } = charts(shown), all = [...first, ...further];
  const isLoaded = shown.every((id) => fetched.has(id));
  const empty = box.querySelector(":scope > .empty");
  empty.hidden = first.length > 0;
  empty.textContent = isLoaded ? "The first optim_step brings the first curves." : "…";
  controls.show(shown);
  const steps = all.flatMap(({ lines }) => lines.map(({ curve }) => curve.step));
  const last = Math.max(2, ...shown.map((id) => fetched.get(id)?.found.last_step ?? 0)), begin = Math.min(1, ...steps.map((each) => each[0]));
  const span = view.zoom ?? [begin, Math.max(last, begin + 1)];
  for (const [name, one] of figures) if (!all.some((chart) => chart.name === name)) { widths.unobserve(one.box); one.plot?.destroy(); one.figure.remove(); figures.delete(name); }
  place($("curves"), first, span, shown);
  const names = furtherNames(shown), more = $("more");
  more.hidden = !names.length;
  more.open = view.more;
  more.firstChild.textContent = many(names.length, "further curve");
  place(more.lastChild, further, span, shown);
}

// Draws one chart in a frame, because the browser fills the lines after the script; at first all, to be ready early.
function plot() {
  const isFirst = !performance.getEntriesByName("curves-drawn").length;
  for (const [name, does] of waiting) {
    waiting.delete(name);
    if (does() && !isFirst) break;
  }
  plotting = waiting.size > 0;
  if (plotting) requestAnimationFrame(plot);
  else if (isFirst && shownRuns().every((id) => fetched.has(id))) performance.mark("curves-drawn");
}

function place(box, wanted, span, shown) {
  wanted.forEach((chart, at) => {
    if (!figures.has(chart.name)) figures.set(chart.name, figureOf(chart.name));
    const one = figures.get(chart.name);
    if (box.children[at] !== one.figure) box.insertBefore(one.figure, box.children[at] ?? null);
    one.chart = chart;
    caption(one, shown);
    const options = { smooth: view.smooth, log: view.log, fromZero: ["learning_rate", "accuracy"].includes(chart.name), tip: page.tip, zoomTo };
    waiting.set(chart.name, () => figures.get(chart.name) === one && plotCurves(one, span, options));
  });
  if (waiting.size && !plotting) { plotting = true; plot(); }
}

// Reading a width while drawing would lay the page out once more.
const widths = new ResizeObserver((seen) => {
  for (const { target, contentRect } of seen) target.width = contentRect.width;
  drawSoon();
});

function figureOf(name) {
  const title = page.titles[name] ?? name, one = { title, plot: null, shape: "" };
  const button = (text, does) => make("button", { type: "button", class: "quiet", title: `Save this chart as ${text}`, onclick: () => does(one, view) }, text);
  one.caption = make("span", { class: "values" });
  one.box = make("div", { class: "plot" });
  widths.observe(one.box);
  one.figure = make("figure", { class: "curve", "data-metric": name },
    make("figcaption", {}, make("span", {}, title), one.caption, make("span", { class: "export" }, button("PNG", exportPng), button("CSV", exportCsv))), one.box);
  return one;
}

function caption(one, shown) {
  const { lines } = one.chart, own = lines.find((line) => line.id === shown[0] && !line.isHeldOut), held = lines.find((line) => line.id === shown[0] && line.isHeldOut);
  const parts = [];
  if (own) parts.push(make("b", {}, own.curve.mean.length > 1 && !view.zoom ? `${short(own.curve.mean[0])} → ${short(own.latest)}` : short(own.latest)));
  if (held && own) parts.push(make("span", { class: new Set(lines.map((line) => line.id)).size === 1 ? "beside" : null }, "held out ", make("b", {}, short(held.latest))));
  else if (held) parts.push(make("b", {}, short(held.latest)));
  one.caption.replaceChildren(...parts);
  one.figure.dataset.runs = new Set(lines.map((line) => line.id)).size;
  one.figure.dataset.heldOut = lines.filter((line) => line.isHeldOut).length;
}

function forgetPlots() { for (const one of figures.values()) { one.plot?.destroy(); one.plot = null; one.shape = ""; } }

function zoomTo(first, last) {
  const [low, high] = [Math.max(0, Math.floor(first)), Math.ceil(last)];
  change({ zoom: high > low ? [low, high] : null });
}

function toolbar() {
  const smooth = make("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01 }), said = make("output", { for: "smooth" });
  smooth.addEventListener("input", () => change({ smooth: Number(smooth.value) }));
  const log = make("input", { type: "checkbox", id: "log" });
  log.addEventListener("change", () => change({ log: log.checked }));
  const [from, to] = [["from", "First step shown"], ["to", "Last step shown"]].map(([id, label]) => make("input", { type: "number", id, min: 0, step: 1, "aria-label": label }));
  for (const field of [from, to]) {
    field.addEventListener("change", () => {
      const last = Math.max(...shownRuns().map((id) => fetched.get(id)?.found.last_step ?? 0));
      zoomTo(Number(from.value || 0), Number(to.value || last));
    });
  }
  const whole = make("button", { type: "button", class: "quiet", id: "whole", onclick: () => change({ zoom: null }) }, "Whole run");
  const link = make("button", { type: "button", class: "quiet", id: "share", title: "A link to these runs, this scale and this zoom", onclick: (event) => copy(location.href, event.target) }, "Copy link");
  const box = make("div", { class: "tools" }, make("label", {}, "Smoothing ", smooth, said), make("label", {}, log, " Log scale"),
    make("span", { class: "zoom" }, "Steps ", from, " to ", to, whole), link);
  const chips = make("ul", { class: "chips" });
  const fill = (field, value) => { if (document.activeElement !== field && field.value !== value) field.value = value; };
  let known = "";
  const show = (shown) => {
    fill(smooth, String(view.smooth)); said.textContent = view.smooth ? view.smooth.toFixed(2) : "off"; log.checked = view.log;
    fill(from, view.zoom ? String(view.zoom[0]) : ""); fill(to, view.zoom ? String(view.zoom[1]) : "");
    whole.disabled = !view.zoom;
    const runs = shown.map((id) => [id, page.nameOf(page.models.get(id)), slotOf(id, shown), page.models.get(id).step]);
    const made = JSON.stringify(runs.map(([id, name, slot]) => [id, name, slot]));
    chips.hidden = shown.length < 2;
    if (known === made) return runs.forEach(([, , , step], at) => say(chips.children[at].children[2], `step ${count(step)}`));
    const focused = chips.contains(document.activeElement) ? document.activeElement.dataset.run : null;
    known = made;
    chips.replaceChildren(...runs.map(([id, name, slot, step]) => make("li", { title: id }, make("i", { class: `swatch run-${slot}` }), make("span", { class: "chip-name" }, name), make("span", { class: "soft" }, `step ${count(step)}`),
      id === view.run ? null : make("button", { type: "button", class: "quiet", "data-run": id, "aria-label": `Remove ${name}`, title: "Remove from the charts", onclick: () => toggleBeside(id, false) }, "×"))));
    if (focused) [...chips.querySelectorAll("button")].find((one) => one.dataset.run === focused)?.focus({ preventScroll: true });
  };
  return { box, chips, show };
}
