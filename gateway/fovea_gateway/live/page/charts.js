import { draw } from "./dom.js";

const WIDTH = 64, HEIGHT = 18;
export const spark = () => draw("svg", { class: "spark", width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" }, draw("path"));

export function drawSpark(svg, values) {
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, at) => `${((at / (values.length - 1)) * (WIDTH - 2) + 1).toFixed(1)} ${(HEIGHT - 2 - ((value - low) / span) * (HEIGHT - 4)).toFixed(1)}`);
  svg.firstChild.setAttribute("d", values.length < 2 ? "" : `M${points.join("L")}`);
}
