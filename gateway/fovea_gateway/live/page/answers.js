// The answers to the held-out rows of the selected run, by label: a confusion matrix.
import { $, count, make, many } from "./dom.js";

let drawn = "";

export function showAnswers(answers) {
  const text = JSON.stringify(answers ?? null);
  if (text === drawn) return;
  drawn = text;
  $("answers").hidden = !answers;
  if (!answers) return;
  const { step, labels, counts } = answers, sum = (values) => values.reduce((all, one) => all + one, 0), sums = counts.map(sum);
  $("answers-said").textContent = `${count(sum(counts.map((row, at) => row[at])))} of ${many(sum(sums), "row")} right at step ${count(step)}; right answers down, the model’s across`;
  const names = counts.some((row) => row.at(-1)) ? [...labels, "other"] : labels;
  const title = (kind, name) => make("th", { scope: kind, title: name }, make("span", {}, name));
  const cell = (row, to) => {
    const value = counts[row][to], said = to < labels.length ? `“${labels[to]}”` : "with no label";
    const one = make("td", { class: row === to ? "hit" : value ? "miss" : "none", title: `“${labels[row]}” answered ${said}: ${count(value)} of ${many(sums[row], "row")}` }, count(value));
    one.style.setProperty("--share", value / (sums[row] || 1));
    return one;
  };
  const head = make("tr", {}, make("td"), names.map((name) => title("col", name)), title("col", "rows"));
  const rows = labels.map((label, row) => make("tr", {}, title("row", label), names.map((_, to) => cell(row, to)), make("td", { class: "sum" }, count(sums[row]))));
  const isTall = labels.some((label) => label.length > 3);
  $("answers-matrix").replaceChildren(make("table", { class: isTall ? "matrix tall" : "matrix" }, make("thead", {}, head), make("tbody", {}, rows)));
}
