import { $, count, make, many, short, swap } from "./dom.js";
import { blob, get } from "./stream.js";

const signs = { "\n": "↵", "\t": "⇥" };
export const heat = (logprob) => Math.min(0.85, Math.max(0, -logprob) / 5);
const gap = (one, other) => Math.min(0.85, Math.abs(one - other));
const isNumber = (value) => value !== null && value !== undefined;
const FILTERS = ["text", "least_reward", "most_reward", "first_step", "last_step"];
const SEARCH_PAUSE_MS = 5000;
const pictures = new Map();
const MOST_PICTURES = 200;
let enlarged = null, enlargedIn = null, drawn = null, searchTimer = null;
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
  return make("button", { class: "picture", type: "button", title: `Enlarge picture ${piece.picture.slice(0, 12)}`, "data-picture": piece.picture, onclick: (event) => { enlargedIn = event.currentTarget.closest("section").id; enlarge(piece.picture); } }, image);
}

// The picture as large as the window. Escape or a click closes it, and the focus returns to the picture in the list.
async function enlarge(digest) {
  const shownPicture = $("viewer-picture");
  shownPicture.src = await load(digest);
  shownPicture.alt = `picture ${digest.slice(0, 12)}, enlarged`;
  await shownPicture.decode().catch(() => {});
  const scale = Math.max(1, Math.min((innerWidth - 80) / shownPicture.naturalWidth, (innerHeight - 120) / shownPicture.naturalHeight));
  shownPicture.style.width = `${Math.floor(shownPicture.naturalWidth * scale)}px`;
  enlarged = digest;
  $("viewer").showModal();
}
$("viewer").addEventListener("click", () => $("viewer").close());
$("viewer").addEventListener("close", () => { $(enlargedIn)?.querySelector(`[data-picture="${CSS.escape(enlarged)}"]`)?.focus({ preventScroll: true }); });

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

export function prompt(group) {
  const box = make("div", { class: "prompt" });
  for (const piece of group.pieces) {
    if (piece.picture) box.append(picture(piece));
    else if (piece.texts === null) box.append(make("span", { class: "special" }, `${many(piece.ids.length, "token")} `));
    // Only the model needs the marks of a chat template.
    else for (const part of piece.texts.join("").split(/(<\|[^|<>]{1,40}\|>)/)) if (part) box.append(part.startsWith("<|") ? make("span", { class: "special" }, part) : part);
  }
  return box;
}

function shade(sampled, trained) {
  const colour = $("colour").value;
  if (colour === "difference") return isNumber(sampled) && isNumber(trained) ? gap(sampled, trained) : 0;
  const value = colour === "trainer" ? trained : sampled;
  return isNumber(value) ? heat(value) : 0;
}

function tipOf(id, text, sampled, trained) {
  const lines = [isNumber(text) ? JSON.stringify(text) : `token ${id}`, `token ${id}`];
  if (isNumber(sampled)) lines.push(`log-probability ${sampled.toFixed(4)}`, `probability ${(100 * Math.exp(sampled)).toFixed(2)} %`);
  if (isNumber(trained)) lines.push(`trainer ${trained.toFixed(4)}`);
  if (isNumber(sampled) && isNumber(trained)) lines.push(`trainer − sampler ${(trained - sampled).toFixed(4)}, ratio ${Math.exp(trained - sampled).toFixed(3)}`);
  return lines;
}

// The sampler's and the trainer's values and their difference as three rows, one column for each token.
function strip(one) {
  const canvas = make("canvas", { class: "token strip", width: one.ids.length, height: 3, role: "img", "aria-label": `log-probabilities of ${many(one.ids.length, "token")}: sampler, trainer, difference` });
  canvas.style.width = `${Math.max(60, one.ids.length * 9)}px`;
  const brush = canvas.getContext("2d"), ink = getComputedStyle(document.documentElement).getPropertyValue("--heat");
  one.ids.forEach((_, at) => {
    const sampled = one.logprobs[at], trained = one.trained[at];
    [isNumber(sampled) ? heat(sampled) : 0, isNumber(trained) ? heat(trained) : 0, isNumber(sampled) && isNumber(trained) ? gap(sampled, trained) : 0].forEach((share, row) => {
      brush.fillStyle = `rgb(${ink} / ${share})`;
      brush.fillRect(at, row, 1, 1);
    });
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), at = Math.max(0, Math.min(one.ids.length - 1, Math.floor(((event.clientX - box.left) / box.width) * one.ids.length)));
    canvas.tip = tipOf(one.ids[at], one.texts?.[at], one.logprobs[at], one.trained[at]);
  });
  canvas.tip = ["log-probabilities"];
  return make("div", { class: "strips" }, make("span", { class: "soft" }, "sampler", make("br"), "trainer", make("br"), "difference"), canvas);
}

export function token(id, text, logprob, trained, share = shade(logprob, trained)) {
  const element = make("span", { class: "token" });
  const said = text ?? String(id);
  element.append(...said.split(/([\n\t])/).filter(Boolean).flatMap((part) => part in signs ? [make("span", { class: "mark" }, signs[part]), part] : [part]));
  if (!said) element.append(make("span", { class: "mark" }, "·"));
  element.style.setProperty("--a", share);
  element.tip = tipOf(id, text, logprob, trained);
  return element;
}

function sequence(one) {
  const tokens = one.ids.map((id, at) => token(id, one.texts?.[at], one.logprobs[at], one.trained[at]));
  const sum = one.logprobs.reduce((total, value) => total + (value ?? 0), 0);
  const words = [one.is_cut ? `${count(one.ids.length)}+ tokens` : many(one.ids.length, "token"), one.stop === "length" ? "cut by max_tokens" : null].filter(Boolean).join(", ");
  const told = [one.held_out ? "held out" : null, one.reward !== null ? `reward ${short(one.reward)}` : null].filter(Boolean).join(", ");
  return make("div", { class: "one" },
    make("div", {}, make("div", { class: one.texts ? "tokens" : "tokens ids" }, tokens), one.trained.length ? strip(one) : null),
    make("div", { class: "figures-small" }, told ? make("b", {}, told) : null, words, make("br"), `log p ${short(sum)}`));
}

function render(found) {
  drawn = found;
  $("colour").hidden = !found.groups.some((group) => group.drawn.some((one) => one.trained.length));
  if (!found.groups.length) return isSearching() ? $("groups").replaceChildren(make("p", { class: "empty" }, "Nothing kept here matches.")) : empty();
  const hasTexts = found.groups.every((group) => group.drawn.every((one) => one.texts !== null));
  const note = hasTexts ? [] : [make("p", { class: "note" }, "The gateway's machine has no tokenizer of this model: ids are shown instead of texts.")];
  swap($("groups"), note, found.groups.map((group) => make("article", { class: "group" },
    make("div", {}, isSearching() ? make("div", { class: "soft small" }, `step ${count(group.step)}`) : null, prompt(group), group.truth ? make("div", { class: "truth" }, "right answer: ", make("b", {}, group.truth)) : null),
    make("div", { class: "drawn" }, group.drawn.toReversed().map(sequence)))));
}

function empty() {
  $("groups").replaceChildren(make("p", { class: "empty" }, "No samples yet. ", make("code", {}, "sampling_client.sample(…)"), " brings the first one here, with its picture."));
}

const wanted = () => FILTERS.map((name) => [name, $(`find-${name}`).value.trim()]).filter(([, value]) => value);
const isSearching = () => wanted().length > 0;

const named = (one) => `${one.owner}\n${one.source}`;
const current = () => sources.find((one) => named(one) === chosen);

async function refresh() {
  if (busy) { again = true; return; }
  const source = current();
  if (!source) return empty();
  const found = wanted(), asked = found.length ? Object.fromEntries(found) : { step: step ?? source.steps.at(-1) };
  busy = true;
  try {
    const query = new URLSearchParams({ source: source.source, owner: source.owner, ...asked });
    const answer = await get(`live/samples?${query}`), text = JSON.stringify([answer, asked]);
    if (text !== shown) { shown = text; render(answer); }
    $("find-said").textContent = found.length ? `${many(answer.groups.length, "prompt")}${answer.is_partial ? " so far, the newest; narrow the search for others" : ""}` : "";
  } catch (error) {
    $("groups").replaceChildren(make("p", { class: "empty" }, error.message));
  } finally {
    setTimeout(() => { busy = false; if (again) { again = false; refresh(); } }, 1000);  // at most one update per second, so that people can read
  }
}

function settle() {
  const source = current();
  $("filter").hidden = !source;
  $("slider").hidden = !source || source.steps.length < 2 || isSearching();
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
  if (!isSearching()) return refresh();
  searchTimer ??= setTimeout(() => { searchTimer = null; refresh(); }, SEARCH_PAUSE_MS);  // a search reads many texts
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
let typed = null;
function search() {
  $("find-clear").disabled = !isSearching();
  clearTimeout(typed);
  typed = setTimeout(() => { settle(); refresh(); }, 300);
}
$("filter").addEventListener("input", search);
$("filter").addEventListener("submit", (event) => { event.preventDefault(); search(); });
$("find-clear").addEventListener("click", () => { for (const name of FILTERS) $(`find-${name}`).value = ""; $("find-text").focus(); search(); });
$("colour").addEventListener("change", () => { if (drawn) render(drawn); });
$("newest").addEventListener("click", () => { step = null; settle(); refresh(); });
empty();
