import { showAnswers } from "./answers.js";
import { showDatums } from "./datums.js";
import { $, ago, count, make, many, say, short, shortId, swap } from "./dom.js";
import { showAlerts } from "./alerts.js";
import { drawSpark, spark } from "./charts.js";
import { isBeside, showCharts, startCharts, toggleBeside } from "./compare.js";
import { isFound, labelOf, showLabel, startLabels, takeLabels } from "./labels.js";
import { canTrain, isAdmin, loadCheckpoints, loadUsage, ownerName, setCaller, setNames, showErrors, showQueue, showServices } from "./panels.js";
import { beginLogs } from "./logs.js";
import { chatWith, loadChatModels } from "./playground.js";
import { beginRewards, showRewards } from "./rewards.js";
import { prefer, takeSamples } from "./samples.js";
import { PUBLISHED, Refused, forgetKey, get, hasKey, listen, post, setKey } from "./stream.js";
import { beginSystem, setTip, showSystem } from "./system.js";
import { change, onChange, view } from "./view.js";

const isLoopback = /^(localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(location.hostname);
const TITLES = { loss_per_token: "Loss per token", loss_sum: "Loss, sum of the step", reward: "Reward", held_out_reward: "Held-out reward", held_out_loss: "Held-out loss per token",
  forward_loss_per_token: "Held-out loss per token", forward_loss_sum: "Held-out loss, sum", accuracy: "Held-out accuracy", kl: "KL, nats per token", learning_rate: "Learning rate",
  grad_norm: "Gradient norm", tokens: "Tokens of the step", clipped_share: "Clipped share", ratio_max: "Greatest ratio" };
// The main charts: names of the metric, of which the first known one is drawn, and names of the held-out one beside it.
const FIRST = [[["loss_per_token", "loss_sum"], ["held_out_loss", "forward_loss_per_token", "forward_loss_sum"]],
  [["reward"], ["held_out_reward"]], [["accuracy"], []], [["kl"], []], [["learning_rate"], []]];

// Reports carry the loop's own step, which may have several optimizer steps, and the step of the checkpoint that is kept.
const LOOP_STEP = "loop_step", KEPT_STEP = "kept_step";

const models = new Map(), items = new Map();
let order = [], selected = view.run, isAutomatic = false;
let pending = {}, drawing = false, stop = null, samplesTold = null;
let isDead = false, toldAt = Date.now();

function tip(event, lines) {
  const box = $("tip");
  box.hidden = !event;
  if (!event) return;
  box.replaceChildren(make("b", {}, lines[0]), ...lines.slice(1).flatMap((line) => [make("br"), line]));
  box.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${event.clientY + 22 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 22}px`;
}
document.addEventListener("pointermove", (event) => {
  const token = event.target.closest?.(".token");
  if (token) tip(event, token.tip);
  else if (!event.target.closest?.(".plot")) tip(null);
});

// A run without a name is known by its base model and its beginning; models of one session also by their number.
const lastPart = (path) => path.replace(/\/+$/, "").split("/").at(-1);
const [BEGAN, SINCE] = [{ day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }, { dateStyle: "medium", timeStyle: "short" }].map((form) => new Intl.DateTimeFormat("en-GB", form));
const began = (model) => BEGAN.format(new Date(model.created));
const numberOf = (id) => { const number = +(/:train:(\d+)$/.exec(id)?.[1] ?? 0); return number ? ` (${number + 1})` : ""; };
const nameOf = (model) => labelOf(model.id).name || model.name || model.metadata.name || model.metadata.run_name || `${lastPart(model.base_model)}, ${began(model)}${numberOf(model.id)}`;
const nameOfId = (id) => (models.has(id) ? nameOf(models.get(id)) : id.startsWith("sess-") ? shortId(id) : lastPart(id));
const runOf = (path) => path.replace("tinker://", "").split("/")[0];
const stateOf = (model) => (isDead ? "unknown" : model.state);
const nameOfSource = (one) => nameOfId(one.source) + (isAdmin() ? ` · ${ownerName(one.owner)}` : "");
setNames(nameOfId, (id) => models.get(id)?.last[KEPT_STEP]);
setTip(tip);
beginRewards(tip);
const mainMetric = (model) => model.spark.name || Object.keys(model.last).find((name) => name !== LOOP_STEP && name !== KEPT_STEP);
const loopStep = (model) => (LOOP_STEP in model.last ? Math.round(model.last[LOOP_STEP]) : null);
const stateDot = { ready: "up", creating: "wait", parked: "wait", failed: "down", lost: "down" };

const words = (name) => (TITLES[name] ?? name.replaceAll("_", " ")).toLowerCase();

// An entry stays in its place and shows the run of that place, because the browser lays out every entry that moves. It is
// drawn when it can be seen, because most of hundreds are out of sight.
const sight = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) { target.inSight = isIntersecting; if (isIntersecting) drawItem(target); }
}, { root: $("models"), rootMargin: "150px 0px" });

function entryOf() {
  const tick = make("input", { type: "checkbox", title: "Show beside the selected run" }), entry = make("li", {}, tick, make("div"));
  // A click is for the run that was there when it began. A key gives a click without a pointer.
  const chosen = (event) => (event.detail && entry.pressed) || entry.model;
  entry.addEventListener("pointerdown", () => { entry.pressed = entry.model; });
  tick.addEventListener("click", (event) => toggleBeside(chosen(event), tick.checked));
  entry.parts = [make("span"), make("span", { class: "name" }), make("span", { class: "value number" }), make("span", { class: "what" }), spark()];
  entry.button = make("button", { type: "button", onclick: (event) => select(chosen(event)) }, entry.parts);
  sight.observe(entry);
  return entry;
}

function drawItem(entry) {
  const model = models.get(entry.model), [dot, name, value, what, line] = entry.parts;
  if (!entry.isStale || !model) return;
  entry.isStale = false;
  const metric = mainMetric(model), loop = loopStep(model);
  say(name, nameOf(model));
  say(value, metric ? short(model.last[metric]) : "");
  say(what, [model.step ? `step ${count(model.step)}${loop ? ` · loop ${count(loop)}` : ""}` : "no step yet", model.resumed ? `resumed at ${count(model.resumed.step)}` : null, metric ? words(metric) : null, isAdmin() ? ownerName(model.owner) : null].filter(Boolean).join(" · "));
  dot.className = `dot ${stateDot[model.state] ?? ""}`;
  dot.title = stateOf(model);
  drawSpark(line, model.spark.values);
  entry.button.title = model.id;
  entry.firstChild.setAttribute("aria-label", `Show ${name.textContent} beside the selected run`);
  if (!entry.button.parentElement) entry.lastChild.append(entry.button);
}

// Shows in an entry a run that has changed or that has come to its place.
function assign(entry, id) {
  if (entry.model !== id && !entry.inSight) entry.lastChild.replaceChildren();
  entry.model = id;
  entry.isStale = true;
  if (entry.inSight) drawItem(entry);
}

function showModels(changed) {
  const parts = partsOf(), list = $("models"), ids = new Set(changed.map((model) => model.id)), active = document.activeElement, focused = active?.closest("#models li"), followed = focused?.model;
  const shown = order.filter((id) => models.has(id) && (!parts.has(id) || id === selected || isBeside(id)) && isFound(models.get(id), (model) => [nameOf(model), isAdmin() ? ownerName(model.owner) : ""]));
  items.clear();
  shown.forEach((id, at) => {
    const entry = list.children[at] ?? list.appendChild(entryOf()), tick = entry.firstChild, isTicked = id === selected || isBeside(id);
    items.set(id, entry);
    if (entry.model !== id || ids.has(id)) assign(entry, id);
    if (tick.checked !== isTicked) tick.checked = isTicked;
    if (tick.disabled !== (id === selected)) tick.disabled = id === selected;
    if (entry.button.ariaCurrent !== String(id === selected)) entry.button.ariaCurrent = id === selected;
  });
  while (list.children.length > shown.length) { sight.unobserve(list.lastChild); list.lastChild.remove(); }
  const place = items.get(followed);  // the focus stays on its run
  if (followed && !place) active.blur();
  if (place && place !== focused) { drawItem(place); (active === focused.firstChild ? place.firstChild : place.button).focus({ preventScroll: true }); }
  const running = [...models.values()].filter((model) => model.state === "ready").length;
  say($("models-count"), !models.size ? "" : view.search.trim() ? `${count(shown.length)} of ${count(models.size)} found` : `${count(running)} in training, ${count(shown.length)} shown`);
  $("models-none").hidden = shown.length > 0;
  say($("models-none"), models.size ? "No run matches." : "None yet.");
}

// An earlier part that trains beside the resumed one is a run of its own.
const goesOn = (earlier, model) => earlier.state === "ready" && earlier.step > model.resumed.step;

// A run that was resumed under its own name has one entry: the last part that has trained. Its curve has the earlier parts.
function partsOf() {
  const hidden = new Set();
  for (const model of models.values()) {
    const earlier = models.get(model.resumed && runOf(model.resumed.path));
    if (!earlier || earlier.owner !== model.owner || nameOf(earlier) !== nameOf(model)) continue;
    if (model.step <= model.resumed.step) hidden.add(model.id);
    else if (!goesOn(earlier, model)) hidden.add(earlier.id);
  }
  return hidden;
}

function select(id) {
  selected = id;
  isAutomatic = false;
  if (view.run !== id) change({ run: id, beside: view.beside.filter((one) => one !== id) });
  showRun();
  prefer(id);
}

// Selects a run until the user does. Names may arrive after the models, and only with them is a part known.
function selectFirst() {
  const parts = partsOf();
  if (!order.length || (models.has(selected) && !(isAutomatic && parts.has(selected)))) return false;
  select(order.find((id) => !parts.has(id)) ?? order[0]);
  isAutomatic = true;
  return true;
}

function introduction() {
  const base = location.href.replace(/[#?].*$/, "").replace(/\/$/, "");
  return [make("div", { class: "head" }, make("h2", {}, "Nothing is trained yet")),
    make("p", { class: "empty" }, "Point the Tinker SDK here, create a model, and its curves appear while it learns:"),
    make("p", { class: "empty" }, make("code", {}, `export TINKER_BASE_URL=${base}`))];
}

function figure(value, name) { return make("div", { class: "figure" }, make("b", {}, value), make("span", {}, name)); }

function showRun() {
  const run = $("run-head"), model = models.get(selected);
  showLabel(model, model && canTrain(model.owner));
  showCharts();
  showDatums(model);
  if (!model) return run.replaceChildren(...introduction());
  const facts = [model.base_model, model.rank ? `LoRA of rank ${model.rank}` : "all parameters", `since ${SINCE.format(new Date(model.created))}`, model.trainer ? `in trainer ${model.trainer}` : null, isAdmin() ? `of ${ownerName(model.owner)}` : null];
  const head = [make("div", { class: "head" }, make("h2", {}, nameOf(model)), make("span", { class: `state ${stateOf(model)}` }, stateOf(model)),
    model.resumed ? make("span", { class: "state", title: model.resumed.path }, `resumed at step ${count(model.resumed.step)} of ${nameOfId(runOf(model.resumed.path))}`) : null,
    make("span", { class: "id mono" }, model.id)), make("p", { class: "note head-note" }, facts.filter(Boolean).join(" · "), model.state_reason ? ` · ${model.state_reason}` : "")];
  const metadata = Object.entries(model.metadata).filter(([, value]) => value !== nameOf(model));
  if (metadata.length) head.push(make("p", { class: "note" }, metadata.map(([name, value]) => `${name} ${value}`).join(" · ")));
  const figures = make("div", { class: "figures" }, loopStep(model) ? figure(count(loopStep(model)), "steps of the loop") : null, figure(count(model.step), loopStep(model) ? "optimizer steps" : "steps"),
    ...FIRST.flatMap((groups) => groups.map((names) => names.find((name) => name in model.last))).filter(Boolean).map((name) => figure(short(model.last[name]), TITLES[name])),
    figure(count(model.unfinished), "requests unfinished"));
  swap(run, head, figures);
  run.dataset.model = model.id;
}

function take(name, told) {
  if (name === "caller") {
    setCaller(told);
    beginSystem();
    beginLogs();
    $("caller").textContent = `${ownerName(told.owner)} · ${told.scope}`;
    $("wrong").textContent = ""; $("ask").hidden = true; $("app").hidden = false; $("forget").hidden = false;
    loadUsage(true);
  } else if (name === "refused") {
    askKey(told.detail);
  } else if (name === "models") {
    const kept = new Set(told.order);
    for (const id of [...models.keys()]) if (!kept.has(id)) models.delete(id);
    for (const model of told.changed) models.set(model.id, model);
    order = told.order;
    pending.models = [...(pending.models ?? []), ...told.changed];
  } else if (name !== "alive") pending[name] = told;
  toldAt = Date.now();
  setLink("live", "live");
  // Events may arrive faster than frames are drawn, so only the last one of each section is drawn.
  if (!drawing) { drawing = true; requestAnimationFrame(render); }
}

function render() {
  drawing = false;
  const { models: changed, labels, queue, services, errors, samples, checkpoints, alerts, system } = pending;
  pending = {};
  if (labels) { takeLabels(labels); selectFirst(); relabel(models.keys()); }
  if (changed) {
    const latest = new Map(changed.map((model) => [model.id, model]));
    showModels([...latest.values()]);
    if (!selectFirst() && (latest.has(selected) || !models.size)) requestAnimationFrame(showRun);  // the list has filled this frame
    else if ([...latest.keys()].some(isBeside)) showCharts();
    if (samplesTold) takeSamples({ ...samplesTold, version: samplesTold.version }, nameOfSource);
  }
  if (queue) showQueue(queue);
  if (services) showServices(services);
  if (errors) showErrors(errors);
  if (samples) { samplesTold = samples; takeSamples(samples, nameOfSource); if (selected) prefer(selected); }
  if (checkpoints) { loadCheckpoints(); loadChatModels(); }
  if (alerts) showAlerts(alerts);
  if (system) showSystem(system);
  loadUsage();
}

function setLink(kind, text) {
  const age = kind === "lost" && models.size && Date.now() - toldAt > 2000 ? `; data of ${ago(toldAt / 1000)} ago` : "";
  if ($("link").className !== `link ${kind}` || $("link").textContent !== text + age) { $("link").className = `link ${kind}`; $("link").textContent = text + age; }
  if (isDead === (kind === "lost")) return;
  isDead = kind === "lost";  // nothing on the page is known to be true any more
  document.body.classList.toggle("dead", isDead);
  showModels([...models.values()]);
  showRun();
}
// The stream says something every 15 s, so a longer silence means that the gateway or the network is gone.
const DEAD = "the gateway does not answer";
let reason = DEAD;
setInterval(() => { if (isDead || ($("link").classList.contains("live") && Date.now() - toldAt > 25000)) setLink("lost", reason); }, 1000);

function askKey(wrong) {
  stop?.abort();
  forgetKey();
  setLink("", "waiting for a key");
  $("app").hidden = true; $("ask").hidden = false; $("forget").hidden = true; $("caller").textContent = "";
  $("wrong").hidden = !wrong; $("wrong").textContent = wrong ?? "";
  $("key").value = ""; $("key").focus();
}

async function connect() {
  stop?.abort();
  const mine = stop = new AbortController();
  for (let pause = 500; !mine.signal.aborted; pause = Math.min(pause * 2, 8000)) {
    reason = DEAD;
    try {
      const begun = performance.now();
      await listen(take, mine.signal);
      if (performance.now() - begun > 5000) pause = 500;
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Refused && error.status === 401) return askKey(error.message);
      reason = error instanceof Refused ? error.message : reason;
    }
    if (mine.signal.aborted) return;
    setLink("lost", reason);
    await new Promise((done) => setTimeout(done, pause));
  }
}

let isSignedIn = false;
async function begin() {
  const { sign_in } = await get("auth/methods").catch(() => ({}));
  $("sign-in").hidden = !sign_in;
  if (!hasKey() && sign_in) {
    try { await get("auth/apikey/me"); } catch (error) { if (error instanceof Refused) return askKey(); }
    isSignedIn = true;
    $("forget").textContent = "Sign out";
    return connect();
  }
  if (!hasKey() && isLoopback) {
    setKey(PUBLISHED);
    try { await get("auth/apikey/me"); } catch (error) { if (error instanceof Refused) return askKey(); }
  }
  return hasKey() ? connect() : askKey();
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const typed = $("key").value.trim();
  if (!/^[!-~]+$/.test(typed)) return askKey("a key has letters, digits and signs alone, and no spaces");
  setKey(typed);
  try {
    await get("auth/apikey/me");
    connect();
  } catch (error) {
    askKey(error instanceof Refused ? error.message : "the gateway does not answer; try again");
  }
});
document.addEventListener("chat", (event) => chatWith(event.detail));
$("forget").addEventListener("click", async () => {
  if (isSignedIn) await post("auth/logout").catch(() => {});
  isSignedIn = false;
  $("forget").textContent = "Change key";
  askKey();
});

function relabel(ids) {
  showModels([...ids].map((id) => models.get(id)).filter(Boolean));
  if (models.size) showRun();
}
startLabels(relabel);
startCharts({ models, nameOf, titles: TITLES, pairs: FIRST, hidden: [LOOP_STEP, KEPT_STEP], loopStep: LOOP_STEP, tip, refused: askKey, showFound: ({ rewards, answers }) => { showRewards(rewards); showAnswers(answers); } });
let searched = view.search;
onChange(() => {
  if (view.run !== selected && models.has(view.run)) select(view.run);
  if (view.search !== searched) $("models").scrollTop = 0;
  searched = view.search;
  showModels([]);
});
begin();
