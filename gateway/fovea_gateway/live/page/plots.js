// Draws the lines of one chart with uPlot, a library that is kept beside this file: see uPlot.LICENSE.
/* global uPlot */
import { make, short } from "./dom.js";

// Without a GPU, a line of one pixel takes a fifth of the time of a wider one, which many lines would multiply.
const HEIGHT = 178, WIDTH = 1.7, FEW = 2, INTEGERS = [1, 2, 5].flatMap((digit) => [...Array(12).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colourOf = (line) => colour(`--run-${line.slot}`);

// Starts the axis at 0 if 0 is near, so that a curve does not look steeper than it is.
function range(values, fromZero, isLog) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) return high > low * 1.01 ? [low / (high / low) ** 0.04, high * (high / low) ** 0.04] : [low / 2, high * 2];
  if (low > 0 && (fromZero || low < 0.7 * high)) low = 0;
  if (high < 0 && high > 0.7 * low) high = 0;
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return high > 0 ? [0, 1.1 * high] : low < 0 ? [1.1 * low, 0] : [0, 1];  // a flat line
  const room = 0.06 * (high - low);
  return [low === 0 ? 0 : low - room, high === 0 ? 0 : high + room];
}

// The marks of a logarithmic axis: 1, 2 and 5 times powers of ten, or round numbers if these are too few.
function logMarks(low, high) {
  const digits = high / low > 1000 ? [1] : [1, 2, 5], found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    for (const digit of digits) { const mark = +(digit * 10 ** power).toPrecision(3); if (mark >= low && mark <= high) found.push(mark); }
  }
  if (found.length > 1) return found;
  const raw = (high - low) / 4, size = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((digit) => digit * size).find((one) => one >= raw);
  return Array.from({ length: 6 }, (_, at) => +((Math.ceil(low / step) + at) * step).toPrecision(12)).filter((mark) => mark <= high);
}

// Smooths with an exponential mean, corrected for its beginning, so that the first values are not drawn to 0.
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

const positive = (values, isLog) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] < wanted) low = middle; else high = middle; }
  return wanted - steps[low] <= steps[high] - wanted ? low : high;
}

// Draws or updates `one.plot` in `one.box`; returns false if nothing has changed. `span`: the first and the last step shown.
export function plotCurves(one, span, options) {
  const { lines } = one.chart, width = Math.max(200, Math.floor(one.box.width ?? one.box.clientWidth));
  const isLog = options.log && lines.some(({ curve }) => curve.mean.some((value) => value > 0));
  const isAlone = new Set(lines.map((line) => line.id)).size === 1;
  one.box.setAttribute("role", "img");
  one.box.setAttribute("aria-label", `${one.title}: ${lines.map((line) => `${line.run}${line.isHeldOut ? " held out" : ""} ${short(line.latest)}`).join(", ")}`);
  const asked = JSON.stringify([lines.map(({ id, run, slot, isHeldOut, resumed }) => [id, run, slot, isHeldOut, resumed]), span, width, isLog, options.smooth]);
  if (one.plot && one.asked === asked && lines.every(({ curve, loop }, at) => one.drawn[at].curve === curve && one.drawn[at].loop === loop)) return false;
  one.asked = asked;
  Object.assign(one, { span, isLog, drawn: lines.map((line) => ({ ...line, values: positive(line.isHeldOut ? line.curve.mean : smoothed(line.curve.mean, options.smooth), isLog) })), options });
  const isWithin = (step) => step >= span[0] && step <= span[1], seen = [];
  for (const { curve, values } of one.drawn) {
    const band = options.smooth || !isAlone ? [] : [curve.low, curve.high].filter(Boolean);
    for (const each of [values, ...band]) each.forEach((value, at) => { if (value !== null && (!isLog || value > 0) && isWithin(curve.step[at])) seen.push(value); });
  }
  one.yRange = range(seen, options.fromZero, isLog);
  // uPlot wants one column of steps for all lines.
  const data = uPlot.join(one.drawn.map(({ curve, values }) => [curve.step, values]));
  const shape = JSON.stringify([lines.map(({ id, slot, isHeldOut, curve }) => [id, slot, isHeldOut, curve.step.length < 40]), isLog, isAlone]);
  one.figure.dataset.points = Math.max(...lines.map(({ curve }) => curve.step.length));
  one.figure.dataset.span = span.join("-");
  one.figure.dataset.scale = isLog ? "log" : "linear";
  redraw(one, shape, width, HEIGHT, data, () => settings(one, isAlone));
  return true;
}

// Updates `one.plot`, or makes a new one if `shape` has changed. `settings` returns uPlot's options but for the size.
export function redraw(one, shape, width, height, data, settings) {
  if (one.plot && one.shape === shape) {
    if (one.plot.width !== width) one.plot.setSize({ width, height });
    one.plot.setData(data);
    return;
  }
  one.plot?.destroy();
  one.shape = shape;
  one.plot = new uPlot({ width, height, legend: { show: false }, padding: [8, 10, 0, 0], ...settings() }, data, one.box);
}

export const axisLook = () => ({ stroke: colour("--faint"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } });

function settings(one, isAlone) {
  const axis = axisLook(), warn = colour("--warn");
  return {
    scales: { x: { time: false, range: () => one.span }, y: { distr: one.isLog ? 3 : 1, range: () => one.yRange } },
    axes: [
      { ...axis, size: 24, gap: 4, space: 70, incrs: INTEGERS, grid: { show: false }, values: (_, marks) => marks.map((mark) => mark.toLocaleString("en")) },
      { ...axis, size: 50, gap: 6, space: 38, ...(one.isLog ? { splits: () => logMarks(...one.yRange), filter: (_, marks) => marks } : {}), values: (_, marks) => marks.map((mark) => (mark === null ? "" : short(mark))) },
    ],
    series: [{}, ...one.drawn.map((line) => ({
      stroke: isAlone && line.isHeldOut ? warn : colourOf(line), width: one.drawn.length > FEW ? 1 : WIDTH, dash: line.isHeldOut ? [6, 4] : undefined, spanGaps: true,
      points: { show: line.curve.step.length < 40, size: 5 },
    }))],
    cursor: {
      y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => { one.options.zoomTo(0, 0); } },
    },
    hooks: {
      drawAxes: [(plot) => { drawBehind(plot, one, isAlone); }],
      setSelect: [(plot) => {
        const { left, width: chosen } = plot.select;
        if (chosen < 4) return;
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        one.options.zoomTo(plot.posToVal(left, "x"), plot.posToVal(left + chosen, "x"));
      }],
      ready: [(plot) => {
        plot.over.addEventListener("pointermove", (event) => hover(plot, one, event));
        plot.over.addEventListener("pointerleave", () => one.options.tip(null));
      }],
    },
  };
}

// Draws, behind the lines, the range of the steps that share a point, the values before smoothing, and where a run was resumed.
function drawBehind(plot, one, isAlone) {
  const context = plot.ctx, at = (step, value) => [plot.valToPos(step, "x", true), plot.valToPos(value, "y", true)];
  const path = (curve, values) => curve.step.forEach((step, index) => { if (values[index] !== null && (!one.isLog || values[index] > 0)) context.lineTo(...at(step, values[index])); });
  context.save();
  context.beginPath();
  context.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  context.clip();
  for (const line of one.drawn) {
    context.fillStyle = context.strokeStyle = colourOf(line);
    if (isAlone && line.curve.low && !one.options.smooth && !line.isHeldOut) {
      const back = { step: line.curve.step.toReversed() };
      context.globalAlpha = 0.16;
      context.beginPath();
      path(line.curve, line.curve.high); path(back, line.curve.low.toReversed());
      context.fill();
    }
    if (one.options.smooth && !line.isHeldOut) {
      context.globalAlpha = 0.22;
      context.lineWidth = devicePixelRatio;
      context.beginPath(); path(line.curve, line.curve.mean); context.stroke();
    }
  }
  context.globalAlpha = 1;
  context.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  context.lineWidth = devicePixelRatio;
  const resumed = one.drawn.filter((line) => line.resumed !== null && !line.isHeldOut && line.resumed >= one.span[0] && line.resumed <= one.span[1]);
  for (const line of resumed) {
    const x = plot.valToPos(line.resumed, "x", true);
    context.strokeStyle = isAlone ? colour("--warn") : colourOf(line);
    context.beginPath(); context.moveTo(x, plot.bbox.top); context.lineTo(x, plot.bbox.top + plot.bbox.height); context.stroke();
  }
  one.figure.dataset.resumed = resumed.map((line) => line.resumed).join(",");
  context.restore();
}

// The step of the loop that took an optimizer step: the first one that was reported at it or later.
function loopStepAt(loop, wanted) {
  const at = loop ? loop.step.findIndex((step) => step >= Math.round(wanted)) : -1;
  return at < 0 ? null : loop.mean[at];
}

function hover(plot, one, event) {
  const wanted = plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x");
  const rows = one.drawn.map((line) => {
    const { step, low, high } = line.curve, near = nearest(step, wanted), value = line.curve.mean[near];
    return { line, step: step[near], text: short(line.values[near] ?? value, 5), range: low ? `${short(low[near], 4)} to ${short(high[near], 4)}` : "" };
  });
  const isAlone = new Set(one.drawn.map((line) => line.id)).size === 1, name = (line) => (isAlone ? (line.isHeldOut ? "held out" : "") : `${line.run}${line.isHeldOut ? ", held out" : ""}`);
  const shown = (step) => Math.round(step).toLocaleString("en"), loop = loopStepAt(one.drawn[0].loop, wanted);
  one.options.tip(event, [`step ${shown(Math.max(0, wanted))}${loop ? `, loop's step ${shown(loop)}` : ""}`, ...rows.map((row) => make("span", { class: "tip-row" }, make("i", { class: `swatch run-${row.line.slot}` }), `${name(row.line)} `,
    make("b", {}, row.text), Math.abs(row.step - wanted) > 0.02 * (one.span[1] - one.span[0]) ? ` at step ${shown(row.step)}` : "", row.range && isAlone ? ` (${row.range})` : ""))]);
}
