// The view that a link holds, in the URL's fragment: the selected run, the runs beside it, smoothing, scale, zoom, search.
// A fragment without "=" is a run's id, as in links of earlier versions.
export const MOST_RUNS = 10;
const EMPTY = { run: null, beside: [], smooth: 0, log: false, zoom: null, search: "", more: false };
const listeners = [];

function read() {
  const text = location.hash.slice(1);
  if (text && !text.includes("=")) return { ...EMPTY, run: decodeURIComponent(text) };
  const query = new URLSearchParams(text), smooth = Number(query.get("smooth")), zoom = (query.get("zoom") ?? "").split("-").map(Number);
  return {
    run: query.get("run") || null,
    beside: [...new Set((query.get("with") ?? "").split(",").filter(Boolean))].slice(0, MOST_RUNS - 1),
    smooth: smooth > 0 && smooth < 1 ? smooth : 0,
    log: query.get("scale") === "log",
    zoom: zoom.length === 2 && zoom[0] >= 0 && zoom[1] > zoom[0] ? zoom : null,
    search: query.get("search") ?? "",
    more: query.get("more") === "1",
  };
}

function write() {
  const { run, beside, smooth, log, zoom, search, more } = view;
  const parts = { run, with: beside.join(","), smooth: smooth || "", scale: log ? "log" : "", zoom: zoom ? zoom.join("-") : "", search, more: more ? "1" : "" };
  return new URLSearchParams(Object.entries(parts).filter(([, value]) => value)).toString().replaceAll("%3A", ":").replaceAll("%2C", ",");
}

export const view = read();
export function change(parts) {
  Object.assign(view, parts);
  history.replaceState(null, "", `#${write()}`);
  for (const listener of listeners) listener();
}
export const onChange = (listener) => listeners.push(listener);
addEventListener("hashchange", () => { Object.assign(view, read()); for (const listener of listeners) listener(); });
