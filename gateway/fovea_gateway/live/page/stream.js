// Requests to the gateway with the API key. EventSource sends no headers, and a key in a URL would appear in logs.
// Therefore fetch reads the stream, and the key is in the header that all clients use.
const STORED = "fovea-key";
let key = sessionStorage.getItem(STORED);

export const PUBLISHED = "tml-local";  // accepted only on this machine
export const hasKey = () => key !== null;
export const hasPublishedKey = () => key === PUBLISHED;
export function setKey(text) { key = text; sessionStorage.setItem(STORED, text); }
export function forgetKey() { key = null; sessionStorage.removeItem(STORED); }

export class Refused extends Error {
  constructor(status, detail) { super(detail); this.status = status; }
}

async function ask(path, options = {}) {
  // Without a key, the cookie of a sign-in counts; it needs the second header, which no other site can send.
  const answer = await fetch(`api/v1/${path}`, { ...options, headers: { "X-API-Key": key ?? "", "X-Fovea-Page": "1", ...options.headers } });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, said.detail || `the gateway answered ${answer.status}`);
}
// Routes beside the SDK's, such as those of OpenAI's API.
async function askRoot(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { "X-API-Key": key ?? "", "X-Fovea-Page": "1", ...options.headers } });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, said.error?.message || `the gateway answered ${answer.status}`);
}
export const getRoot = async (path) => (await askRoot(path)).json();
export const postRoot = (path, body, signal) => askRoot(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });
export const get = async (path) => (await ask(path)).json();
export const remove = (path) => ask(path, { method: "DELETE" });
export const post = (path) => ask(path, { method: "POST" });
export const put = async (path, body) => (await ask(path, { method: "PUT", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } })).json();
export const blob = async (path) => (await ask(path)).blob();

// Calls `take(event, data)` until the stream ends; throws Refused, or the errors of fetch.
export async function listen(take, signal) {
  const answer = await ask("live/events", { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const messages = rest.split("\n\n");
    rest = messages.pop();
    for (const message of messages) {
      const name = /^event: (.*)$/m.exec(message), data = /^data: (.*)$/m.exec(message);
      if (name && data) take(name[1], JSON.parse(data[1]));
      else take("alive", null);
    }
  }
}
