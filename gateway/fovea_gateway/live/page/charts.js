import { draw, make, short } from "./dom.js";

const HEIGHT = 158, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;

// Starts the axis at 0 if 0 is near, so that a curve does not look steeper than it is.
function range(values, fromZero) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (low > 0 && (fromZero || low < 0.7 * high)) low = 0;
  if (high < 0 && high > 0.7 * low) high = 0;
  if (high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return [low, high];
  return high > 0 ? [0, high] : low < 0 ? [low, 0] : [0, 1];  // a flat line, above or below 0
}

// Returns round numbers that enclose the range, at distances of 1, 2 or 5 times a power of ten.
function ticks(low, high, most) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let at = Math.floor(low / step + 1e-9) * step; at < high + step * (1 - 1e-9); at += step) found.push(+at.toPrecision(12));
  return found;
}

export function spark(values) {
  const width = 64, height = 18;
  const svg = draw("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  if (values.length < 2) return svg;
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const path = values.map((value, at) => `${((at / (values.length - 1)) * (width - 2) + 1).toFixed(1)} ${(height - 2 - ((value - low) / span) * (height - 4)).toFixed(1)}`);
  svg.append(draw("path", { d: `M${path.join("L")}` }));
  return svg;
}

const nearest = (steps, wanted) => steps.reduce((near, step, index) => (Math.abs(step - wanted) < Math.abs(steps[near] - wanted) ? index : near), 0);

// Draws one metric by step. The band spans the minimum and maximum of the steps that share a point.
// `beside`: a second curve in the same chart, {name, curve, latest}. `resumed`: the step at which the run was resumed.
export function chart({ title, curve, latest, lastStep, width, tip, fromZero = false, beside = null, resumed = null }) {
  const figure = make("figure", { class: "curve" });
  const steps = curve.step, means = curve.mean;
  figure.append(make("figcaption", {}, make("span", {}, title), make("b", {}, means.length > 1 ? `${short(means[0])} → ${short(latest)}` : short(latest)),
    beside ? make("span", { class: "beside" }, `${beside.name} `, make("b", {}, short(beside.latest))) : null));
  const low = curve.low || means, high = curve.high || means;
  const marks = ticks(...range([...low, ...high, ...(beside ? beside.curve.mean : [])], fromZero), 3);
  const bottom = marks[0], top = marks.at(-1);
  const first = Math.min(1, steps[0]), last = Math.max(lastStep, first + 1);
  const x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((top - value) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
  const at = (step, value) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
  const svg = draw("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${short(latest)} at step ${lastStep}` });
  for (const mark of marks) {
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }));
    svg.append(draw("text", { x: LEFT - 7, y: y(mark) + 4, "text-anchor": "end" }, short(mark)));
  }
  const whole = ticks(first, last, Math.max(3, Math.floor(width / 100))).filter((step) => step >= first && step <= last && Number.isInteger(step));
  for (const step of whole) svg.append(draw("text", { x: x(step), y: HEIGHT - 4, "text-anchor": x(step) > width - 30 ? "end" : "middle" }, step.toLocaleString("en")));
  if (resumed !== null && resumed >= first && resumed <= last) {
    svg.append(draw("line", { class: "resumed", x1: x(resumed), x2: x(resumed), y1: TOP, y2: HEIGHT - BOTTOM }, draw("title", {}, `resumed at step ${resumed}`)));
  }
  if (curve.low) {
    const there = steps.map((step, index) => at(step, high[index])), back = steps.map((step, index) => at(step, low[index])).reverse();
    svg.append(draw("path", { class: "band", d: `M${[...there, ...back].join("L")}Z` }));
  }
  if (steps.length > 1) svg.append(draw("path", { class: "path", d: `M${steps.map((step, index) => at(step, means[index])).join("L")}` }));
  if (steps.length) svg.append(draw("circle", { class: "dot-last", cx: x(steps.at(-1)), cy: y(means.at(-1)), r: 2.8 }));
  if (beside) {
    const own = beside.curve;
    if (own.step.length > 1) svg.append(draw("path", { class: "path beside", d: `M${own.step.map((step, index) => at(step, own.mean[index])).join("L")}` }));
    own.step.forEach((step, index) => { if (own.step.length < 40) svg.append(draw("circle", { class: "dot-beside", cx: x(step), cy: y(own.mean[index]), r: 2.4 })); });
  }
  const cross = draw("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), wanted = first + (((event.clientX - box.left) * width / box.width - LEFT) / (width - LEFT - RIGHT)) * (last - first);
    const near = nearest(steps, wanted);
    cross.setAttribute("x1", x(steps[near])); cross.setAttribute("x2", x(steps[near])); cross.setAttribute("visibility", "visible");
    const lines = [`step ${(+steps[near].toFixed(0)).toLocaleString("en")}: ${short(means[near], 5)}`];
    if (curve.low) lines.push(`${short(low[near], 4)} to ${short(high[near], 4)}`);
    if (beside?.curve.step.length) {
      const other = nearest(beside.curve.step, steps[near]);
      lines.push(`${beside.name}, step ${(+beside.curve.step[other].toFixed(0)).toLocaleString("en")}: ${short(beside.curve.mean[other], 5)}`);
    }
    tip(event, lines);
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip(null); });
  figure.append(svg);
  return figure;
}
