// Saves a chart as a picture or as a table.
import { colourOf } from "./plots.js";

// Quotes a cell. A spreadsheet would run a text that begins as a formula does.
function cell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function save(blob, name) {
  const url = URL.createObjectURL(blob), link = document.createElement("a");
  link.href = url; link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// The values as the server holds them, without smoothing, of the steps that are shown.
export function exportCsv(one) {
  const rows = [["run_id", "run", "metric", "step", "mean", "low", "high"]];
  for (const { id, run, name, curve } of one.chart.lines) {
    curve.step.forEach((step, at) => {
      if (step >= one.span[0] && step <= one.span[1]) rows.push([id, run, name, step, curve.mean[at], (curve.low ?? curve.mean)[at], (curve.high ?? curve.mean)[at]]);
    });
  }
  save(new Blob([rows.map((row) => `${row.map(cell).join(",")}\n`).join("")], { type: "text/csv" }), `${one.chart.name}.csv`);
}

// The chart with its title and the names of its runs.
export function exportPng(one, view) {
  const chart = one.plot.ctx.canvas, scale = devicePixelRatio, style = getComputedStyle(document.documentElement);
  const line = 20 * scale, margin = 12 * scale, runs = one.drawn;
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = chart.width + 2 * margin;
  canvas.height = chart.height + 2 * margin + line * (runs.length + 1);
  context.fillStyle = style.getPropertyValue("--card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = style.getPropertyValue("--ink");
  context.font = `600 ${14 * scale}px system-ui, sans-serif`;
  context.fillText(`${one.title}${view.smooth ? `, smoothed by ${view.smooth}` : ""}`, margin, margin + 14 * scale);
  context.drawImage(chart, margin, margin + line);
  context.font = `${12 * scale}px system-ui, sans-serif`;
  runs.forEach((run, at) => {
    const y = margin + line * (at + 1.8) + chart.height;
    context.fillStyle = colourOf(run);
    context.fillRect(margin, y - 9 * scale, (run.isHeldOut ? 5 : 10) * scale, 10 * scale);
    context.fillStyle = style.getPropertyValue("--ink");
    context.fillText(`${run.run}${run.isHeldOut ? ", held out" : ""}`, margin + 16 * scale, y, canvas.width - 2 * margin - 16 * scale);
  });
  canvas.toBlob((blob) => save(blob, `${one.chart.name}.png`), "image/png");
}
