import { $, many, make } from "./dom.js";
import { nameOf, ownerName } from "./panels.js";

const TITLES = { loss_not_finite: "Loss not finite", kl_high: "KL above its bound", trainer_gone: "Trainer gone", sampler_gone: "Sampler gone", renderer_gone: "Renderer gone",
  disk_full: "Disk nearly full", durable_lag: "Durable points lag", slot_wait: "Waiting for an adapter's slot" };
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
let told = null, isOpen = false;

function entry(one) {
  const facts = [one.owner ? nameOf(one.subject) : null, one.owner ? ownerName(one.owner) : null, one.ended_at ? `${clock(one.begun_at)} to ${clock(one.ended_at)}` : `since ${clock(one.begun_at)}`];
  return make("li", { class: one.ended_at ? null : "now" }, make("b", {}, TITLES[one.kind] ?? one.kind.replaceAll("_", " ")), make("span", {}, one.message),
    make("span", { class: "soft small number" }, facts.filter(Boolean).join(" · ")));
}

function show() {
  const { open, ended, webhook } = told, isFailing = Boolean(webhook?.failure);
  $("alerts").hidden = !open.length && !ended.length && !isFailing;
  $("alerts").classList.toggle("now", open.length > 0);
  document.title = open.length ? `(${open.length}) Fovea` : "Fovea";
  $("alerts-count").textContent = open.length ? `${many(open.length, "alert")}` : "None now";
  $("alerts-open").replaceChildren(...open.map(entry));
  $("alerts-webhook").hidden = !isFailing;
  $("alerts-webhook").textContent = isFailing ? `The webhook at ${webhook.host} fails: ${webhook.failure}. ${webhook.dropped ? `${many(webhook.dropped, "event")} could not be sent.` : "It is tried again."}` : "";
  $("alerts-ended").hidden = !ended.length;
  $("alerts-ended").firstElementChild.textContent = `${ended.length} that ended`;
  $("alerts-past").replaceChildren(...(isOpen ? ended.map(entry) : []));
}

export function showAlerts(section) { told = section; show(); }

$("alerts-ended").addEventListener("toggle", () => { isOpen = $("alerts-ended").open; if (told) show(); });
