// The distribution of rewards by step: the share of each reward among those of a step.
import { $, count, draw, make, many, short } from "./dom.js";

const LEFT = 46, RIGHT = 8, TOP = 6, BOTTOM = 20, HEIGHT = 190;
let told = null, tip = () => {};

export function beginRewards(shown) { tip = shown; }

export function showRewards(rewards) {
  told = rewards ?? null;
  $("rewards").hidden = !told;
  if (told) show();
}

// Two to four round numbers. The edges of the bins are not round, so a number may be slightly outside.
function roundMarks(least, most) {
  const span = most - least, size = 10 ** Math.floor(Math.log10(0.4 * span)), step = [1, 2, 5, 10].map((digit) => digit * size).find((one) => one >= 0.4 * span);
  return Array.from({ length: 4 }, (_, at) => +((Math.ceil(least / step - 1e-3) + at) * step).toPrecision(12)).filter((mark) => mark <= most + 1e-3 * span);
}

function show() {
  const { low, width: bin, stride, step, counts } = told, bins = counts[0].length;
  // Only the bins that are used, and one around them.
  const used = counts[0].map((_, at) => at).filter((at) => counts.some((row) => row[at])), from = used[0], to = used.at(-1) + 1;
  const width = Math.max(220, $("rewards").clientWidth - 36), first = step[0], last = step.at(-1) + stride;
  const x = (at) => LEFT + ((at - first) / (last - first)) * (width - LEFT - RIGHT), y = (at) => TOP + (1 - (at - from) / (to - from)) * (HEIGHT - TOP - BOTTOM);
  const svg = draw("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `Rewards of ${many(step.length, "step")}, from ${short(low + from * bin)} to ${short(low + to * bin)}` });
  step.forEach((at, row) => {
    const total = counts[row].reduce((sum, one) => sum + one, 0);
    for (let place = from; place < to; place += 1) {
      if (!counts[row][place]) continue;
      const cell = draw("rect", { class: "cell", x: x(at).toFixed(1), y: y(place + 1).toFixed(1), width: Math.max(1, x(at + stride) - x(at) - 0.5).toFixed(1), height: Math.max(1, y(place) - y(place + 1) - 0.5).toFixed(1) });
      cell.style.fillOpacity = 0.15 + 0.85 * counts[row][place] / total;
      svg.append(cell);
    }
  });
  for (const value of roundMarks(low + from * bin, low + to * bin)) {
    const at = Math.min(to, Math.max(from, (value - low) / bin)), share = (at - from) / (to - from);
    svg.append(draw("text", { class: "reward-mark", x: LEFT - 7, y: y(at) + (share > 0.95 ? 9 : share < 0.05 ? 0 : 4), "text-anchor": "end" }, short(value)));
  }
  const marks = [...new Set([0, 1 / 3, 2 / 3, 1].map((share) => step[Math.round(share * (step.length - 1))]))];
  for (const at of marks) svg.append(draw("text", { x: x(at + stride / 2), y: HEIGHT - 4, "text-anchor": "middle" }, count(at)));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), wanted = first + (((event.clientX - box.left) * width / box.width - LEFT) / (width - LEFT - RIGHT)) * (last - first);
    const row = step.findLastIndex((at) => at <= wanted);
    if (row < 0 || wanted > step[row] + stride) return tip(null);
    const total = counts[row].reduce((sum, one) => sum + one, 0), common = counts[row].map((one, at) => [one, at]).filter(([one]) => one).sort((a, b) => b[0] - a[0]).slice(0, 6).sort((a, b) => b[1] - a[1]);
    tip(event, [`step ${count(step[row])}${stride > 1 ? ` to ${count(step[row] + stride - 1)}` : ""}: ${many(total, "reward")}`,
      ...common.map(([one, at]) => `${short(low + at * bin)} to ${short(low + (at + 1) * bin)}: ${count(one)} (${Math.round(100 * one / total)} %)`)]);
  });
  svg.addEventListener("pointerleave", () => tip(null));
  $("rewards-chart").replaceChildren(make("figure", { class: "curve cells plot" }, svg));
}

let resized = null;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (told) show(); }, 150); });
