// A chat with a base model or a checkpoint, through the route of OpenAI's API that any client can use.
import { $, make, swap } from "./dom.js";
import { mayDo, nameOf } from "./panels.js";
import { getRoot, postRoot } from "./stream.js";

const MOST_BYTES = 4e6, MOST_SIDE = 1536;
let said = [], picture = null, running = null, known = "";

const label = (id) => {
  const [, run, name] = /^tinker:\/\/([^/]+)\/.*?([^/]+)$/.exec(id) ?? [];
  return run ? `${nameOf(run)} · ${name}` : id;
};

export async function loadChatModels() {
  $("playground").hidden = !mayDo("sample");
  if ($("playground").hidden) return;
  try {
    const ids = (await getRoot("v1/models")).data.map((one) => one.id), drawn = JSON.stringify(ids.map((id) => [id, label(id)]));
    if (drawn === known) return;
    const chosen = $("chat-model").value;
    known = drawn;
    $("chat-model").replaceChildren(...ids.map((id) => make("option", { value: id, selected: id === chosen }, label(id))));
  } catch (error) {
    note(error.message);
  }
}

// Opens the playground with a checkpoint.
export async function chatWith(path) {
  await loadChatModels();
  $("chat-model").value = path;
  restart();
  $("playground").scrollIntoView({ block: "nearest" });
  $("chat-text").focus();
}

function note(text) {
  $("chat-note").hidden = !text;
  $("chat-note").textContent = text ?? "";
}

function bubble(one) {
  const parts = typeof one.content === "string" ? [{ text: one.content }] : one.content;
  return make("div", { class: `said ${one.role}` }, make("span", { class: "soft small" }, one.role === "user" ? "you" : label(one.model ?? "")),
    parts.map((part) => part.image_url ? make("img", { src: one.shown, alt: "your picture" }) : make("p", {}, part.text)));
}

function show() {
  const box = $("chat"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  swap(box, said.map(bubble));
  box.hidden = !said.length;
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function setRunning(control) {
  running = control;
  $("chat-send").textContent = running ? "Stop" : "Send";
}

function restart() {
  running?.abort();
  said = [];
  note("");
  show();
}

// Calls `take` with the object of each event, until the stream ends.
async function read(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const messages = (rest + value).split("\n\n");
    rest = messages.pop();
    for (const message of messages) {
      const data = /^data: (.*)$/m.exec(message)?.[1];
      if (data && data !== "[DONE]") take(JSON.parse(data));
    }
  }
}

async function send() {
  const text = $("chat-text").value.trim(), model = $("chat-model").value;
  if (!model || (!text && !picture)) return;
  const content = picture ? [{ type: "image_url", image_url: { url: picture.url } }, ...(text ? [{ type: "text", text }] : [])] : text;
  said.push({ role: "user", content, shown: picture?.shown });
  $("chat-text").value = "";
  setPicture(null);
  note("");
  const messages = said.map(({ role, content }) => ({ role, content })), reply = { role: "assistant", content: "", model }, control = new AbortController(), begun = performance.now();
  let drawing = false;
  said.push(reply);
  setRunning(control);
  show();
  try {
    const options = { model, messages, stream: true, temperature: +$("chat-temperature").value, max_tokens: +$("chat-tokens").value };
    await read(await postRoot("v1/chat/completions", options, control.signal), (event) => {
      if (event.error) throw new Error(event.error.message);
      reply.content += event.choices?.[0]?.delta?.content ?? "";
      if (!drawing) { drawing = true; requestAnimationFrame(() => { drawing = false; show(); }); }
    });
    if (running === control) note(`${reply.content ? "Answered" : "An empty answer"} in ${((performance.now() - begun) / 1000).toFixed(1)} s.`);
  } catch (error) {
    if (!control.signal.aborted) note(error.message);
  } finally {
    // A turn without an answer is not sent again; its text is back in the field.
    if (!reply.content && said.at(-1) === reply) { said.splice(-2); if (!$("chat-text").value) $("chat-text").value = text; }
    if (running === control) setRunning(null);
    show();
  }
}

function setPicture(found) {
  picture = found;
  $("chat-shown").hidden = !found;
  if (found) $("chat-preview").src = found.shown; else { $("chat-preview").removeAttribute("src"); $("chat-picture").value = ""; }
}

const dataUrl = (blob) => new Promise((done, fail) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => fail(reader.error);
  reader.readAsDataURL(blob);
});

// The route takes PNG and JPEG. Other formats and large pictures are converted here.
async function takePicture(file) {
  if (!file) return setPicture(null);
  try {
    let blob = file;
    if (!["image/png", "image/jpeg"].includes(file.type) || file.size > MOST_BYTES) {
      const bitmap = await createImageBitmap(file), scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
      const canvas = make("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
      canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
      blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
    }
    setPicture({ url: await dataUrl(blob), shown: URL.createObjectURL(blob) });
  } catch (error) {
    note(`${file.name} cannot be read as a picture: ${error.message}`);
  }
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort(); else send();
});
$("chat-text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) send();
});
$("chat-text").addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file) { event.preventDefault(); takePicture(file); }
});
$("chat-picture").addEventListener("change", () => takePicture($("chat-picture").files[0]));
$("chat-remove").addEventListener("click", () => { setPicture(null); $("chat-text").focus(); });
$("chat-new").addEventListener("click", () => { restart(); $("chat-text").focus(); });
$("chat-model").addEventListener("change", () => note(said.length ? "The next answer is of this model." : ""));
