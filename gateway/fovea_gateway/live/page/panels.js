import { $, ago, bytes, copy, count, make, many, short, swap, table } from "./dom.js";
import { get, hasPublishedKey, remove } from "./stream.js";

const words = (name) => name.replaceAll("_", " ");
const empty = (...children) => make("p", { class: "empty" }, ...children);
let caller = { owner: "", scope: "read" };
let usageAt = 0, nameOfId = (id) => id, keptStepOf = () => undefined;
const confirming = new Set();  // paths of checkpoints for which "Delete" has been clicked

export function setCaller(told) { caller = told; }
export function setNames(name, keptStep) { nameOfId = name; keptStepOf = keptStep; }
export const nameOf = (id) => nameOfId(id);
// The settings may give a key without an owner; its owner's name is then made of the key's hash.
export function ownerName(owner) {
  const nameless = /^key-([0-9a-f]{6})[0-9a-f]{6}$/.exec(owner);
  if (!nameless) return owner;
  return owner === caller.owner ? (hasPublishedKey() ? "tml-local" : "you") : `unnamed key ${nameless[1]}`;
}
export const isAdmin = () => caller.scope === "admin";
const SCOPES = ["read", "sample", "train", "admin"];
export const mayDo = (scope) => SCOPES.indexOf(caller.scope) >= SCOPES.indexOf(scope);
export const canTrain = (owner) => ["train", "admin"].includes(caller.scope) && owner === caller.owner;

export function showQueue(queue) {
  $("queue-count").textContent = queue.total ? `${count(queue.total)} unfinished` : "";
  if (!queue.total) return $("queue").replaceChildren(empty("Nothing waits, nothing runs."));
  const rows = queue.rows.map((one) => make("tr", {},
    make("td", { class: "long" }, make("span", { class: `dot ${one.is_running ? "up" : "wait"}` }), ` ${one.count > 1 ? `${count(one.count)} × ` : ""}${words(one.kind)}`, make("br"),
      make("span", { class: "soft" }, nameOfId(one.model), isAdmin() ? ` · ${ownerName(one.owner)}` : "")),
    make("td", { class: "long" }, one.reason, one.queue_state === "active" ? null : make("span", { class: "soft" }, ` (${words(one.queue_state)})`)),
    make("td", { class: "number nowrap" }, ago(one.since))));
  const more = queue.total - queue.rows.reduce((total, one) => total + one.count, 0);
  const kinds = Object.entries(queue.kinds).map(([kind, number]) => `${count(number)} ${words(kind)}`).join(", ");
  $("queue").replaceChildren(make("p", { class: "note" }, `${kinds}.${more > 0 ? ` ${count(more)} of them are not listed.` : ""}`),
    table([["Request"], ["What it waits for"], ["For", "number"]], rows));
}

function meter(share, label) {
  const bar = make("i"); bar.style.width = `${Math.round(100 * Math.min(1, share))}%`;
  return make("div", { class: "meter", role: "meter", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": label }, bar);
}

function memory(found) {
  if (!found || !found.used) return null;
  return `${bytes(found.used)} of ${bytes(found.total)}${found.what === "gpu" ? " GPU memory" : " memory"}`;
}

function service(name, one, share, figure, facts) {
  const [dot, said] = one.up ? ["up", figure] : one.starting ? ["wait", "starting"] : ["down", "does not answer"];
  if (!one.up && one.reason) facts = [...facts, one.reason];
  return make("div", { class: "row" }, make("span", { class: `dot ${dot}` }), make("span", {}, name),
    share === null ? make("span") : meter(share, `${name} at work`), make("span", { class: "number" }, said),
    make("span", { class: "facts" }, facts.filter(Boolean).join(" · ")));
}

export function showServices(told) {
  const pushes = told.pushes;
  $("pushes").textContent = pushes.count ? `${many(pushes.count, "push", "pushes")} of weights, last ${short(pushes.last_s)} s, mean ${short(pushes.mean_s)} s` : "";
  $("services").replaceChildren(...told.base_models.map((base) => {
    const rows = [];
    base.trainers.forEach((trainer, index) => rows.push(service(base.trainers.length > 1 ? `Trainer ${index + 1}` : "Trainer", trainer, base.trainer_busy, `${Math.round(100 * base.trainer_busy)} %`,
      [index ? null : "at work in the last minute", trainer.draining ? "draining" : null, many(trainer.models, "model"), many(trainer.ranks, "rank"), trainer.dtype, memory(trainer.memory), trainer.address])));
    base.samplers.forEach((one, index) => rows.push(service(base.samplers.length > 1 ? `Sampler ${index + 1}` : "Sampler", one, base.sampler_busy, `${Math.round(100 * base.sampler_busy)} %`,
      [index ? null : "at work in the last minute", `${one.inside} inside`, one.waiting ? `${one.waiting} wait` : null, `${many(one.adapters, "adapter")} held`, one.waiting_for_slot ? `${one.waiting_for_slot} wait for an adapter's slot` : null, one.dtype, memory(one.memory), one.address])));
    if (!base.samplers.length) rows.push(make("div", { class: "soft small" }, "No sampler: this model is trained, not sampled."));
    base.renderers.forEach((one, index) => rows.push(service(base.renderers.length > 1 ? `Renderer ${index + 1}` : "Renderer", one, null, "", [`${one.inside} inside`, one.waiting ? `${one.waiting} wait` : null, one.address])));
    return make("div", { class: "service" }, make("h3", {}, base.name), rows);
  }));
}

export function showErrors(told) {
  if (!told.errors.length) return $("errors").replaceChildren(empty("None since the gateway started."));
  $("errors").replaceChildren(make("ul", { class: "errors" }, told.errors.map((one) => make("li", {},
    make("div", { class: "meta" }, make("span", { class: "number" }, new Date(one.at * 1000).toLocaleTimeString("en-GB")), make("span", {}, words(one.what)),
      one.subject ? make("span", {}, nameOfId(one.subject)) : null, make("span", {}, one.reason), one.count > 1 ? make("span", {}, `${count(one.count)} times`) : null, isAdmin() ? make("span", {}, ownerName(one.owner)) : null),
    one.field ? make("span", { class: "field" }, one.field) : null, one.field ? " " : null, one.message))));
}

export async function loadCheckpoints() {
  try {
    const found = await get(`checkpoints?limit=200${isAdmin() ? "&owner=*" : ""}`);
    showCheckpoints(found);
  } catch (error) {
    $("checkpoints").replaceChildren(empty(error.message));
  }
}

function path(one) {
  const [, run, kind, name] = /^tinker:\/\/([^/]+)\/([^/]+)\/([^/]+)$/.exec(one.tinker_path);
  return { run, kind, name, url: `training_runs/${encodeURIComponent(run)}/checkpoints/${kind}/${encodeURIComponent(name)}` };
}

const resume = {
  training: (one) => ["Copy resume line", `training = service.create_training_client_from_state_with_optimizer(${JSON.stringify(one.tinker_path)})`],
  sampler: (one) => ["Copy sample line", `sampler = service.create_sampling_client(model_path=${JSON.stringify(one.tinker_path)})`],
};

function download(one, place) {
  if (one.checkpoint_type === "training") {
    // The API offers files only of sampler weights and exports. The SDK's command creates an export, fetches it and removes it.
    const line = `TINKER_BASE_URL=${JSON.stringify(location.href.replace(/[#?].*$/, "").replace(/\/$/, ""))} tinker checkpoint download ${JSON.stringify(one.tinker_path)}`;
    return make("button", { class: "quiet", type: "button", title: line, onclick: (event) => copy(line, event.target) }, "Copy download line");
  }
  return make("button", { class: "quiet", type: "button", onclick: async (event) => {
    event.target.disabled = true;
    try {
      const found = await get(`${path(one).url}/external_weights_urls`);
      place.replaceChildren(...Object.entries(found.urls).map(([file, url]) => make("a", { href: new URL(url, location.href).href, download: file.split("/").at(-1) }, file)));
    } catch (error) { place.replaceChildren(error.message); }
    event.target.disabled = false;
  } }, "Download");
}

function deletion(one) {
  const box = make("span");
  const ask = make("button", { class: "quiet", type: "button", onclick: () => { confirming.add(one.tinker_path); box.replaceChildren(sure, keep); keep.focus(); } }, "Delete");
  const keep = make("button", { class: "quiet", type: "button", onclick: () => { confirming.delete(one.tinker_path); box.replaceChildren(ask); ask.focus(); } }, "Keep");
  const sure = make("button", { class: "quiet bad", type: "button", onclick: async () => {
    sure.disabled = true;
    confirming.delete(one.tinker_path);
    try { await remove(path(one).url); await loadCheckpoints(); } catch (error) { box.replaceChildren(error.message); }
  } }, "Delete for good");
  box.append(...(confirming.has(one.tinker_path) ? [sure, keep] : [ask]));
  return box;
}

function showCheckpoints({ checkpoints, cursor }) {
  $("checkpoints-count").textContent = checkpoints.length ? `${count(cursor.total_count)} in all` : "";
  if (!checkpoints.length) {
    return $("checkpoints").replaceChildren(empty("None yet. ", make("code", {}, "training.save_state(\"name\")"), " keeps one to go on from, ", make("code", {}, "save_weights_for_sampler(\"name\")"), " one to sample from."));
  }
  const mayChange = ["train", "admin"].includes(caller.scope);
  const rows = checkpoints.map((one) => {
    const { run, name } = path(one), place = make("div", { class: "links" }), own = !one.owner || one.owner === caller.owner;
    const line = resume[one.checkpoint_type]?.(one), isBest = one.checkpoint_type === "sampler" && name === `step-${keptStepOf(run)}`;
    return make("tr", { "data-path": one.tinker_path },
      make("td", { class: "long" }, make("b", {}, name), isBest ? make("span", { class: "state ready best", title: "the lowest held-out loss: fine_tune keeps these weights" }, "best") : null, make("br"), make("span", { class: "soft" }, nameOfId(run), one.owner ? ` · ${ownerName(one.owner)}` : "", one.public ? " · public" : ""), place),
      make("td", {}, one.checkpoint_type === "external" ? "export" : one.checkpoint_type),
      make("td", { class: "number nowrap" }, one.size_bytes ? bytes(one.size_bytes) : "–"),
      make("td", { class: "nowrap number hide-small" }, new Date(one.time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }),
        one.expires_at ? make("div", { class: "soft" }, `until ${new Date(one.expires_at).toLocaleDateString("en-GB")}`) : null),
      make("td", {}, make("div", { class: "actions" },
        line ? make("button", { class: "quiet", type: "button", title: line[1], onclick: (event) => copy(line[1], event.target) }, line[0]) : null,
        one.checkpoint_type === "sampler" && own && mayDo("sample") ? make("button", { class: "quiet", type: "button", onclick: () => document.dispatchEvent(new CustomEvent("chat", { detail: one.tinker_path })) }, "Chat") : null,
        own ? download(one, place) : null, own && mayChange ? deletion(one) : null)));
  });
  swap($("checkpoints"), table([["Name"], ["Kind"], ["Size", "number"], ["Saved", "number hide-small"], [""]], rows));
}

export async function loadUsage(force = false) {
  if (!force && Date.now() - usageAt < 20000) return;
  usageAt = Date.now();
  try {
    const [found, keys] = await Promise.all([get(`usage?days=30${isAdmin() ? "&owner=*" : ""}`), isAdmin() ? get("keys") : { keys: [] }]);
    showUsage(found, new Map(keys.keys.map((key) => [key.key_id, key.name])));
  } catch (error) {
    $("usage").replaceChildren(empty(error.message));
  }
}

function showUsage(found, names) {
  const sums = new Map();
  for (const row of found.usage) {
    const id = `${row.owner}\n${row.key_id}`, sum = sums.get(id) ?? { ...row, trained_tokens: 0, scored_tokens: 0, prompt_tokens: 0, sampled_tokens: 0, gpu_seconds: 0 };
    for (const name of ["trained_tokens", "scored_tokens", "prompt_tokens", "sampled_tokens", "gpu_seconds"]) sum[name] += row[name];
    sums.set(id, sum);
  }
  if (!sums.size) return $("usage").replaceChildren(empty("Nothing was trained or sampled in the last 30 days."));
  const price = found.gpu_hour_price_usd;
  const rows = [...sums.values()].map((row) => make("tr", {},
    make("td", { class: "long" }, isAdmin() ? ownerName(row.owner) : names.get(row.key_id) || ownerName(row.owner), make("br"), make("span", { class: "soft mono" }, row.key_id || "–")),
    ...["trained_tokens", "prompt_tokens", "sampled_tokens"].map((name) => make("td", { class: "number" }, count(row[name]))),
    make("td", { class: "number" }, short(row.gpu_seconds)),
    price ? make("td", { class: "number" }, `$${(row.gpu_seconds / 3600 * price).toFixed(2)}`) : null));
  const stored = Object.values(found.stored_bytes).reduce((total, size) => total + size, 0);
  $("usage").replaceChildren(table([["Key"], ["Trained", "number"], ["Prompts", "number"], ["Sampled", "number"], ["GPU s", "number"], ...(price ? [["Cost", "number"]] : [])], rows),
    make("p", { class: "note" }, `Tokens, and seconds of trainer and samplers on GPUs. Checkpoints take ${bytes(stored)}.`));
}
