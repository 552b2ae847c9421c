import { draw } from "./dom.js";

export function spark(values) {
  const width = 64, height = 18;
  const svg = draw("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  if (values.length < 2) return svg;
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const path = values.map((value, at) => `${((at / (values.length - 1)) * (width - 2) + 1).toFixed(1)} ${(height - 2 - ((value - low) / span) * (height - 4)).toFixed(1)}`);
  svg.append(draw("path", { d: `M${path.join("L")}` }));
  return svg;
}
