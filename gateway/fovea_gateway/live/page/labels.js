// Names, notes and tags of runs, and the search over them.
import { $, make } from "./dom.js";
import { put } from "./stream.js";
import { change, onChange, view } from "./view.js";

const labels = new Map();
let shownFor = "", changed = () => {};

export function startLabels(whenChanged) {
  changed = whenChanged;
  const search = $("search");
  search.value = view.search;
  search.addEventListener("input", () => change({ search: search.value }));
  onChange(() => { if (search.value !== view.search) search.value = view.search; });
}

export function takeLabels(told) {
  labels.clear();
  for (const [id, label] of Object.entries(told.labels)) labels.set(id, label);
}
export const labelOf = (id) => labels.get(id) ?? { name: "", notes: "", tags: [] };

// Returns whether a run has every word of the search in its names, notes, tags or metadata. `#word` is a whole tag.
export function isFound(model, others) {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const label = labelOf(model.id), tags = label.tags.map((tag) => tag.toLowerCase());
  const text = [model.id, model.base_model, model.name, ...Object.values(model.metadata), label.name, label.notes, ...tags, ...others(model)].join("\n").toLowerCase();
  return words.every((word) => (word.length > 1 && word.startsWith("#") ? tags.includes(word.slice(1)) : text.includes(word)));
}

// Shows the tags and notes of a run. An open form stays as it is.
export function showLabel(model, mayChange) {
  const box = $("label");
  box.hidden = !model;
  if (!model) return;
  const label = labelOf(model.id), state = JSON.stringify([model.id, label, mayChange]);
  if (state === shownFor || (box.querySelector("form") && box.dataset.model === model.id)) return;
  shownFor = state;
  box.dataset.model = model.id;
  const tags = label.tags.map((tag) => make("button", { type: "button", class: "quiet tag", title: `Search for #${tag}`, onclick: () => change({ search: `#${tag}` }) }, tag));
  const edit = make("button", { type: "button", class: "quiet", onclick: () => openForm(model) }, label.name || label.notes || tags.length ? "Edit name, tags and notes" : "Add name, tags and notes");
  box.replaceChildren(make("div", { class: "tags" }, tags, mayChange ? edit : null), ...(label.notes ? [make("p", { class: "notes" }, label.notes)] : []));
}

function openForm(model) {
  const box = $("label"), label = labelOf(model.id);
  const field = (id, name, control) => make("label", { for: id }, name, control);
  const name = make("input", { id: "label-name", maxlength: 120, value: label.name, autocomplete: "off" });
  const tags = make("input", { id: "label-tags", maxlength: 700, value: label.tags.join(" "), autocomplete: "off", placeholder: "separated by spaces" });
  const notes = make("textarea", { id: "label-notes", maxlength: 2000, rows: 4 });
  notes.value = label.notes;
  const wrong = make("p", { class: "wrong", role: "alert", hidden: true });
  const close = () => { shownFor = ""; box.replaceChildren(); showLabel(model, true); box.querySelector("button:last-of-type")?.focus(); };
  const form = make("form", { class: "label-form" }, field("label-name", "Name", name), field("label-tags", "Tags", tags), field("label-notes", "Notes", notes), wrong,
    make("div", { class: "tags" }, make("button", { type: "submit", class: "main" }, "Save"), make("button", { type: "button", onclick: close }, "Cancel")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const told = await put(`live/runs/${encodeURIComponent(model.id)}`, { name: name.value, notes: notes.value, tags: tags.value.split(/[\s,]+/).filter(Boolean) });
      labels.set(model.id, { name: told.name, notes: told.notes, tags: told.tags });
      close();
      changed([model.id]);
    } catch (error) {
      wrong.hidden = false; wrong.textContent = error.message;
    }
  });
  form.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  box.replaceChildren(form);
  name.focus();
}
