import { $, count, make, many, short } from "./dom.js";
import { blob, get } from "./stream.js";

const signs = { "\n": "↵", "\t": "⇥" };
const heat = (logprob) => Math.min(0.85, Math.max(0, -logprob) / 5);
const pictures = new Map();
const MOST_PICTURES = 200;
let sources = [], version = -1, chosen = null, step = null, shown = "", busy = false, again = false, preferred = null;

for (const surprise of [0, 0.5, 1, 2, 3, 4.25]) {
  const part = make("i"); part.style.setProperty("--a", heat(-surprise)); $("scale").append(part);
}

function picture(piece) {
  if (!piece.is_kept) return make("span", { class: "gone" }, `picture ${piece.picture.slice(0, 24)}, named by the client and not kept here`);
  const image = make("img", { alt: `picture ${piece.picture.slice(0, 12)}` });
  image.addEventListener("load", () => {
    const scale = Math.max(1, Math.floor(150 / Math.max(image.naturalWidth, image.naturalHeight)));
    if (scale > 1) image.width = image.naturalWidth * scale;
  });
  load(piece.picture).then((address) => { image.src = address; }, (error) => { image.alt = error.message; });
  return image;
}

function load(digest) {
  if (!pictures.has(digest)) {
    pictures.set(digest, blob(`live/pictures/${encodeURIComponent(digest)}`).then(URL.createObjectURL));
    pictures.get(digest).catch(() => pictures.delete(digest));
    if (pictures.size > MOST_PICTURES) {
      const [oldest, address] = pictures.entries().next().value;
      pictures.delete(oldest);
      address.then(URL.revokeObjectURL, () => {});
    }
  }
  return pictures.get(digest);
}

function prompt(group) {
  const box = make("div", { class: "prompt" });
  for (const piece of group.pieces) {
    if (piece.picture) box.append(picture(piece));
    else if (piece.texts === null) box.append(make("span", { class: "special" }, `${many(piece.ids.length, "token")} `));
    // Only the model needs the marks of a chat template.
    else for (const part of piece.texts.join("").split(/(<\|[^|<>]{1,40}\|>)/)) if (part) box.append(part.startsWith("<|") ? make("span", { class: "special" }, part) : part);
  }
  return box;
}

function token(id, text, logprob) {
  const element = make("span", { class: "token" });
  const said = text ?? String(id);
  element.append(...said.split(/([\n\t])/).filter(Boolean).flatMap((part) => part in signs ? [make("span", { class: "mark" }, signs[part]), part] : [part]));
  if (!said) element.append(make("span", { class: "mark" }, "·"));
  if (logprob !== null && logprob !== undefined) element.style.setProperty("--a", heat(logprob));
  element.tip = [text === null || text === undefined ? `token ${id}` : JSON.stringify(text), `token ${id}`];
  if (logprob !== null && logprob !== undefined) element.tip.push(`log-probability ${logprob.toFixed(4)}`, `probability ${(100 * Math.exp(logprob)).toFixed(2)} %`);
  return element;
}

function sequence(one) {
  const tokens = one.ids.map((id, at) => token(id, one.texts?.[at], one.logprobs[at]));
  const sum = one.logprobs.reduce((total, value) => total + (value ?? 0), 0);
  const words = [one.is_cut ? `${count(one.ids.length)}+ tokens` : many(one.ids.length, "token"), one.stop === "length" ? "cut by max_tokens" : null].filter(Boolean).join(", ");
  return make("div", { class: "one" },
    make("div", { class: one.texts ? "tokens" : "tokens ids" }, tokens),
    make("div", { class: "figures-small" }, one.reward !== null ? make("b", {}, `reward ${short(one.reward)}`) : null, words, make("br"), `log p ${short(sum)}`));
}

function render(found) {
  if (!found.groups.length) return empty();
  const hasTexts = found.groups.every((group) => group.drawn.every((one) => one.texts !== null));
  const note = hasTexts ? [] : [make("p", { class: "note" }, "The gateway's machine has no tokenizer of this model: ids are shown instead of texts.")];
  $("groups").replaceChildren(...note, ...found.groups.map((group) => make("article", { class: "group" },
    make("div", {}, prompt(group), group.truth ? make("div", { class: "truth" }, "right answer: ", make("b", {}, group.truth)) : null),
    make("div", { class: "drawn" }, group.drawn.toReversed().map(sequence)))));
}

function empty() {
  $("groups").replaceChildren(make("p", { class: "empty" }, "No samples yet. ", make("code", {}, "sampling_client.sample(…)"), " brings the first one here, with its picture."));
}

const named = (one) => `${one.owner}\n${one.source}`;
const current = () => sources.find((one) => named(one) === chosen);

async function refresh() {
  if (busy) { again = true; return; }
  const source = current();
  if (!source) return empty();
  const wanted = step ?? source.steps.at(-1);
  busy = true;
  try {
    const query = new URLSearchParams({ source: source.source, owner: source.owner, step: wanted });
    const found = await get(`live/samples?${query}`), text = JSON.stringify(found);
    if (text !== shown) { shown = text; render(found); }
  } catch (error) {
    $("groups").replaceChildren(make("p", { class: "empty" }, error.message));
  } finally {
    setTimeout(() => { busy = false; if (again) { again = false; refresh(); } }, 1000);  // at most one update per second, so that people can read
  }
}

function settle() {
  const source = current();
  $("slider").hidden = !source || source.steps.length < 2;
  if (!source) return;
  const slider = $("step"), at = step === null ? source.steps.length - 1 : Math.max(0, source.steps.findLastIndex((one) => one <= step));
  slider.max = source.steps.length - 1;
  slider.value = at;
  slider.setAttribute("aria-valuetext", `step ${source.steps[at]}`);
  $("step-shown").textContent = count(source.steps[at]);
  $("newest").disabled = step === null;
}

export function takeSamples(told, name) {
  if (told.version === version) return;
  version = told.version;
  sources = told.sources;
  if (!current()) choose();
  $("source").hidden = !sources.length;
  const options = sources.map((one) => make("option", { value: named(one), selected: named(one) === chosen }, name(one)));
  const own = $("source"), drawn = options.map((one) => one.textContent).join("\n");
  if (own.dataset.drawn !== drawn) { own.replaceChildren(...options); own.dataset.drawn = drawn; }  // an open list stays open
  own.value = chosen ?? "";
  settle();
  refresh();
}

function choose() {
  const own = sources.find((one) => one.source === preferred);
  chosen = own ? named(own) : sources.length ? named(sources[0]) : null;
  step = null;
}

// Selects the samples of the model that the page shows, if it has any.
export function prefer(model) {
  preferred = model;
  if (!sources.some((one) => one.source === model) || current()?.source === model) return;
  choose();
  $("source").value = chosen;
  settle();
  refresh();
}

$("source").addEventListener("change", () => { chosen = $("source").value; step = null; settle(); refresh(); });
$("step").addEventListener("input", () => {
  const steps = current().steps, at = +$("step").value;
  step = at === steps.length - 1 ? null : steps[at];
  settle();
  refresh();
});
$("newest").addEventListener("click", () => { step = null; settle(); refresh(); });
empty();
