// Tells the server that a page is open: it ends some minutes after the last one was closed (`--keep`: never).
import type { Transport } from "./transport";

const EVERY = 30_000; // ms; browsers let pages in the background speak once a minute at least

/** Starts at once; the function it gives ends it. */
export function startHeartbeat(transport: Transport): () => void {
  if (transport.kind !== "http") return () => {};
  const beat = (): void => void transport.request("alive", {}).catch(() => {}); // a server that ended is told elsewhere
  const timer = setInterval(beat, EVERY);
  document.addEventListener("visibilitychange", beat);
  let release = (): void => {};
  const lock = (): Promise<void> => new Promise((resolve) => { release = resolve; });
  void navigator.locks?.request("saccade-viewer", { mode: "shared" }, lock); // browsers freeze no page that holds a lock
  beat();
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", beat);
    release();
  };
}
