// The newest log lines of the services, for administrators. They are fetched while they can be seen.
import { $, make, many } from "./dom.js";
import { isAdmin } from "./panels.js";
import { get } from "./stream.js";

const PACE_MS = 2000, TYPED_MS = 300;
let isSeen = false, timer = null, shown = "", asked = 0;
new IntersectionObserver((seen) => { isSeen = seen.at(-1).isIntersecting; if (isSeen) refresh(); }, { rootMargin: "300px 0px" }).observe($("logs"));

// A new caller may not be an administrator.
export function beginLogs() {
  shown = "";
  $("logs-lines").replaceChildren();
  $("logs").hidden = !isAdmin();
}

async function refresh() {
  clearTimeout(timer);
  if (!isSeen || !isAdmin() || document.hidden) return;
  const mine = asked += 1, query = new URLSearchParams({ service: $("logs-service").value, level: $("logs-level").value, text: $("logs-text").value.trim() });
  try {
    const found = await get(`live/logs?${query}`);
    if (mine === asked) show(found);
  } catch (error) {
    if (mine === asked) $("logs-said").textContent = error.message;
  }
  if (mine === asked) timer = setTimeout(refresh, PACE_MS);
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB") + (at % 1).toFixed(3).slice(1);
const kind = (level) => (level >= 40 ? "error" : level >= 30 ? "warning" : null);

function show({ services, lines, failures }) {
  const text = JSON.stringify([services, lines, failures]);
  if (text === shown) return;
  shown = text;
  const box = $("logs-lines"), own = $("logs-service"), chosen = own.value, isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
  if (own.options.length !== services.length + 1 || services.some((name, at) => own.options[at + 1].value !== name)) {
    own.replaceChildren(own.options[0], ...services.map((name) => make("option", { value: name }, name)));
    own.value = services.includes(chosen) ? chosen : "";
  }
  const failed = Object.entries(failures).map(([name, reason]) => `${name}: ${reason}`);
  $("logs-said").textContent = [many(lines.length, "line"), ...failed].join("; ");
  box.replaceChildren(...lines.map((line) => make("p", { class: kind(line.level) }, make("span", { class: "soft" }, clock(line.at)), make("span", { class: "soft" }, line.service), make("span", {}, line.text))));
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

for (const name of ["logs-service", "logs-level"]) $(name).addEventListener("change", refresh);
$("logs-text").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(refresh, TYPED_MS); });
document.addEventListener("visibilitychange", refresh);
