"use strict";
const run = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const rewards = run.trajectories.filter((t) => !t.failure).map((t) => t.reward);
const low = Math.min(0, ...rewards), high = Math.max(...rewards, low + 1e-9);
let visible = [], selected = 0, view = "conversation";

// Output of a run becomes text nodes only, and is never parsed as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}
const number = (value, digits = 3) => value === null ? "–" : String(+value.toFixed(digits));
const signs = { "\n": "↵", "\t": "⇥" };
const heat = (logprob) => Math.min(0.85, Math.max(0, -logprob) / 5);
const versionsOf = (versions) => versions[0] === versions[1] ? `${versions[0]}` : `${versions[0]} to ${versions[1]}`;

function picture(digest) {
  const image = make("img", { src: run.pictures[digest], alt: `picture ${digest.slice(0, 12)}`, title: digest });
  image.addEventListener("load", () => {
    const scale = Math.max(1, Math.floor(160 / Math.max(image.naturalWidth, image.naturalHeight)));
    if (scale > 1 && image.closest(".text")) image.width = image.naturalWidth * scale;
  });
  return image;
}

function token(kind, id, text, logprob, versions) {
  const element = make("span", { class: kind });
  element.append(...text.split(/([\n\t])/).filter(Boolean).flatMap((part) => part in signs ? [make("span", { class: "mark" }, signs[part]), part] : [part]));
  if (!text) element.append(make("span", { class: "mark" }, "·"));
  if (logprob !== null) element.style.setProperty("--a", heat(logprob));
  element.tip = [JSON.stringify(text), `token ${id}`];
  if (logprob !== null) element.tip.push(`log-probability ${logprob.toFixed(4)}`, `probability ${(100 * Math.exp(logprob)).toFixed(2)} %`, `weights of version ${versionsOf(versions)}`);
  return element;
}

function said(message) {
  const parts = message.parts.map((part) => typeof part === "string" ? part : picture(part.picture));
  return make("div", { class: "say" }, make("div", { class: "role" }, message.role), make("div", { class: "text" }, ...parts));
}

function turnCard(turn, index) {
  const metrics = Object.entries(turn.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const tokens = turn.tokens.map(([id, text, logprob]) => token("token", id, text, logprob, turn.versions));
  return make("div", { class: "card turn" },
    make("h3", {}, `turn ${index + 1}`, make("span", { class: "spring" }), metrics, make("span", { class: "number" }, `reward ${number(turn.reward)}`)),
    ...turn.messages.map(said),
    make("div", { class: "say" }, make("div", { class: "role" }, "model"), make("div", { class: "text sampled" }, ...tokens)),
    turn.note ? make("div", { class: "say" }, make("div", { class: "role" }, "note"), make("div", { class: "soft" }, turn.note)) : null);
}

function segmentCard(segment, index) {
  const stream = make("div", { class: "stream" });
  for (const piece of segment.pieces) {
    if (piece.picture) stream.append(picture(piece.picture));
    else for (const [id, text, logprob] of piece.tokens) stream.append(token(logprob === null ? "read" : "wrote", id, text, logprob, piece.versions));
  }
  const turns = segment.turns.map((turn) => turn + 1).join(", ");
  return make("div", { class: "card turn" }, make("h3", {}, `datum ${index + 1}`, make("span", { class: "spring" }), turns ? `loss on turns ${turns}` : "no loss"), stream);
}

function failureBox(failure) {
  return make("div", { class: "failure" }, make("b", {}, `failed at ${failure.stage}: `), failure.error,
    failure.traceback ? make("details", {}, make("summary", {}, "traceback"), make("pre", {}, failure.traceback)) : null);
}

function toggle(name) {
  const button = make("button", { "aria-pressed": view === name, type: "button" }, name);
  button.addEventListener("click", () => look(name));
  return button;
}

function legend() {
  const scale = make("span", { class: "scale" }, ...[0, 0.5, 1, 2, 3, 4.25].map((surprise) => {
    const step = make("i"); step.style.setProperty("--a", heat(-surprise)); return step;
  }));
  const log = make("span", { class: "soft" }, "sure", scale, "surprised");
  const mask = make("span", { class: "soft" }, make("span", { class: "key wrote" }, "sampled, loss on"), " \u00a0 read, loss off");
  const keys = make("span", { class: "soft" }, make("kbd", {}, "↑"), " ", make("kbd", {}, "↓"), " trajectory \u00a0 ", make("kbd", {}, "T"), " tokens");
  return make("div", { class: "legend" }, log, mask, make("span", { class: "spring" }), keys);
}

function show() {
  const shown = $("shown");
  if (!visible.length) return shown.replaceChildren(make("div", { class: "card empty" }, "No trajectory is like that."));
  const trajectory = run.trajectories[visible[selected]];
  const facts = [["end", trajectory.end], ["turns", trajectory.turns.length], ["tokens", trajectory.tokens], ["datums", trajectory.segments.length],
    ["weights", trajectory.versions ? versionsOf(trajectory.versions) : "–"], ["prefix breaks", trajectory.prefix_breaks], ["rewrites", trajectory.rewrites], ["seconds", number(trajectory.seconds, 2)]];
  const head = make("div", { class: "card" },
    make("div", { class: "head" }, make("h2", {}, trajectory.conversation),
      make("span", { class: trajectory.failure ? "number failed" : "number" }, trajectory.end === "failed" ? "failed" : `reward ${number(trajectory.reward)}`),
      make("span", { class: "spring" }), toggle("conversation"), toggle("tokens")),
    make("div", { class: "facts soft" }, ...facts.map(([name, value]) => make("span", {}, `${name} `, make("b", {}, String(value))))),
    trajectory.failure ? failureBox(trajectory.failure) : null, legend());
  const cards = view === "tokens" ? trajectory.segments.map(segmentCard) : trajectory.turns.map(turnCard);
  shown.replaceChildren(head, ...cards);
}

function look(name) {
  view = name;
  select(selected);
}

// scrollIntoView is not used, because it would scroll the page as well.
function reveal(list, row) {
  if (!row) return;
  const top = row.offsetTop - list.offsetTop, bottom = top + row.offsetHeight;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  // Below the header, the list extends past the end of the window until the page is scrolled.
  list.scrollTop += Math.max(0, row.getBoundingClientRect().bottom + 8 - innerHeight);
}

function select(place) {
  selected = Math.max(0, Math.min(visible.length - 1, place));
  [...$("list").children].forEach((row, index) => row.setAttribute("aria-selected", index === selected));
  reveal($("list"), $("list").children[selected]);
  if (visible.length) history.replaceState(null, "", `#${visible[selected]}/${view}`);
  show();
}

function row(index, place) {
  const trajectory = run.trajectories[index];
  const share = Math.max(0, Math.min(1, (trajectory.reward - low) / (high - low)));
  const bar = make("i"); bar.style.width = `${100 * share}%`;
  const isFailed = trajectory.end === "failed";
  const element = make("li", { role: "option" },
    make("span", { class: "name" }, trajectory.conversation),
    make("span", { class: isFailed ? "number failed" : "number" }, isFailed ? "failed" : number(trajectory.reward)),
    make("span", { class: "what" }, `${trajectory.turns.length} turn${trajectory.turns.length === 1 ? "" : "s"}, ${trajectory.end}`),
    isFailed ? null : make("span", { class: "bar" }, bar));
  element.addEventListener("click", () => select(place));
  return element;
}

const filters = { "all": () => true, "failed": (t) => t.failure !== null,
  [`top third`]: (t) => !t.failure && t.reward > low + (high - low) * 2 / 3,
  [`middle third`]: (t) => !t.failure && t.reward >= low + (high - low) / 3 && t.reward <= low + (high - low) * 2 / 3,
  [`bottom third`]: (t) => !t.failure && t.reward < low + (high - low) / 3 };
for (const name of Object.keys(filters)) $("filter").append(make("option", { value: name }, name));

function refresh() {
  const words = $("search").value.toLowerCase();
  const matches = (t) => !words || t.conversation.toLowerCase().includes(words)
    || t.turns.some((turn) => turn.text.toLowerCase().includes(words) || turn.messages.some((m) => m.parts.some((p) => typeof p === "string" && p.toLowerCase().includes(words))));
  visible = [...run.trajectories.keys()].filter((i) => filters[$("filter").value](run.trajectories[i]) && matches(run.trajectories[i]));
  const sign = { none: 0, worst: 1, best: -1 }[$("order").value];
  if (sign) visible.sort((a, b) => sign * (run.trajectories[a].reward - run.trajectories[b].reward) || a - b);
  $("list").replaceChildren(...visible.map(row));
  $("count").textContent = `${visible.length} of ${run.trajectories.length} trajectories`;
  select(0);
}

for (const id of ["search", "filter", "order"]) $(id).addEventListener("input", refresh);
document.addEventListener("keydown", (event) => {
  if (/^(INPUT|SELECT)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
  if (event.key in moves) select(selected + moves[event.key]);
  else if (event.key.toLowerCase() === "t") look(view === "tokens" ? "conversation" : "tokens");
  else return;
  event.preventDefault();
});
document.addEventListener("mousemove", (event) => {
  const tip = $("tip"), lines = event.target.closest?.(".token, .read, .wrote")?.tip;
  tip.hidden = !lines;
  if (!lines) return;
  tip.replaceChildren(make("b", {}, lines[0]), ...lines.slice(1).flatMap((line) => [make("br"), line]));
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 22 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 22}px`;
});
// The address contains what is shown, so that it can be shared: page.html#17/tokens.
const asked = /^#(\d+)\/(conversation|tokens)$/.exec(location.hash);
refresh();
if (asked) {
  view = asked[2];
  select(+asked[1]);
}
