// Tells the server that a page is open: it ends some minutes after the last one was closed (`--keep`: never).
import type { Transport } from "./transport";

const EVERY = 30_000; // ms; browsers let pages in the background speak once a minute at least

/** Starts at once; the function it gives ends it. */
export function startHeartbeat(transport: Transport): () => void {
  if (transport.kind !== "http") return () => {};
  const beat = (): void => void transport.request("alive", {}).catch(() => {}); // a server that ended is told elsewhere
  const timer = setInterval(beat, EVERY);
  document.addEventListener("visibilitychange", beat);
  // A page that holds a lock is not frozen in the background.
  const ended = new AbortController();
  navigator.locks?.request("saccade-viewer", { mode: "shared", signal: ended.signal }, () => new Promise(() => {}))
    .catch(() => {});
  beat();
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", beat);
    ended.abort();
  };
}
