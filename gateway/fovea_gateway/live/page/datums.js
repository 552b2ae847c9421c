// The datums of the selected run with the largest loss per token, in the last step or in all steps that the gateway keeps.
import { $, count, make, many, short, swap } from "./dom.js";
import { heat, prompt, token } from "./samples.js";
import { get } from "./stream.js";

const PACE_MS = 3000;
let model = null, shown = "", asked = "", isSeen = false, pause = null;
new IntersectionObserver((seen) => { isSeen = seen.at(-1).isIntersecting; refresh(); }, { rootMargin: "300px 0px" }).observe($("datums"));

// Call it whenever the selected model may have changed. The rows are fetched while they can be seen.
export function showDatums(selected) {
  const isOther = selected?.id !== model?.id;
  model = selected ?? null;
  if (isOther) { shown = ""; $("datums-rows").replaceChildren(); }
  const isHidden = !model || model.datums === null;
  if ($("datums").hidden !== isHidden) $("datums").hidden = isHidden;
  refresh(isOther);
}

const wanted = () => JSON.stringify([model.id, model.datums, model.step, model.unfinished, $("datums-steps").value]);

async function refresh(isNow = false) {
  if ((pause && !isNow) || !isSeen || !model || model.datums === null || asked === wanted()) return;
  clearTimeout(pause);
  pause = setTimeout(() => { pause = null; refresh(); }, PACE_MS);  // people read what is drawn
  asked = wanted();
  const { id, owner } = model, steps = $("datums-steps").value;
  const isCurrent = () => model?.id === id && $("datums-steps").value === steps;
  try {
    const answer = await get(`live/datums?${new URLSearchParams({ source: id, owner, steps })}`), text = JSON.stringify(answer);
    if (isCurrent() && text !== shown) { shown = text; swap($("datums-rows"), answer.groups.map(row)); }
  } catch (error) {
    if (isCurrent()) $("datums-rows").replaceChildren(make("p", { class: "empty" }, error.message));
  }
}

function row(group) {
  const targets = group.drawn.map((one) => make("div", { class: "one" },
    make("div", { class: one.texts ? "tokens" : "tokens ids" }, one.ids.map((id, at) => token(id, one.texts?.[at], null, one.logprobs[at], heat(one.logprobs[at] ?? -9)))),
    make("div", { class: "figures-small" }, make("b", {}, `loss ${group.loss === null ? "not finite" : short(group.loss)}`), `step ${count(group.step)}`, make("br"), `${many(one.ids.length, "target")}${one.is_cut ? " or more" : ""}`)));
  return make("article", { class: "group" }, prompt(group), make("div", { class: "drawn" }, targets));
}

$("datums-steps").addEventListener("change", () => refresh(true));
