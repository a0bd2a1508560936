// What is shown: one value that everything reads, changes and listens to, and that the URL holds.
import { on } from "./dom";
import { byId, type Manifest, type Pool, type What } from "./protocol";

export interface Compare {
  run: string;
  call: string;
  head: number;
  mode: "side" | "difference";
}

export interface State {
  run: string;
  call: string;
  head: number;
  item: number;
  what: What;
  pool: Pool;
  tone: "linear" | "log";
  /** Key token at the centre of the map, and row token; fractions allowed. */
  x: number;
  y: number;
  /** CSS pixels per key token; 0: the whole map fits. */
  scale: number;
  /** The chosen tokens, rising, and on which axis they were chosen. In self-attention they are rows and keys. */
  axis: "row" | "key";
  tokens: number[];
  compare: Compare | null;
  /** The panel in front, by its id. */
  panel: string;
  theme: "auto" | "light" | "dark";
  searched: string;
  /** The cell under the pointer or the keyboard's cursor; not in the URL. */
  cursor: { row: number; key: number } | null;
}

export type Listener = (state: Readonly<State>, changed: ReadonlySet<keyof State>) => void;

export interface Store {
  get(): Readonly<State>;
  /** Listeners are told at once, of the fields whose values differ. */
  set(patch: Partial<State>): void;
  /** Tells `listener` of changes of any of `fields` (of all when left out); returns what ends that. */
  subscribe(listener: Listener, fields?: readonly (keyof State)[]): () => void;
}

export const DEFAULTS: Readonly<State> = {
  run: "0", call: "0", head: 0, item: 0, what: "weights", pool: "max", tone: "log", x: 0, y: 0, scale: 0,
  axis: "row", tokens: [], compare: null, panel: "", theme: "auto", searched: "", cursor: null,
};

const same = (a: unknown, b: unknown): boolean => a === b || JSON.stringify(a) === JSON.stringify(b);

export function makeStore(initial: Partial<State> = {}): Store {
  let state: State = { ...DEFAULTS, ...initial };
  const listeners = new Map<Listener, readonly (keyof State)[] | null>();
  return {
    get: () => state,
    set(patch) {
      const keys = (Object.keys(patch) as (keyof State)[]).filter((key) => !same(state[key], patch[key]));
      if (!keys.length) return;
      state = { ...state, ...patch };
      const changed = new Set(keys);
      for (const [listener, fields] of [...listeners])
        if (!fields || fields.some((field) => changed.has(field))) listener(state, changed);
    },
    subscribe(listener, fields) {
      listeners.set(listener, fields ?? null);
      return () => void listeners.delete(listener);
    },
  };
}

/** Tokens as runs: [3, 4, 5, 9] is "3-5,9". */
function writeTokens(tokens: readonly number[]): string {
  const runs: [number, number][] = [];
  for (const token of tokens) {
    const last = runs[runs.length - 1];
    if (last && token === last[1] + 1) last[1] = token;
    else runs.push([token, token]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

const MOST_TOKENS = 4096;

function readTokens(text: string): number[] {
  const tokens = new Set<number>();
  for (const part of text.split(",")) {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(part);
    if (!match) continue;
    const first = Number(match[1]);
    const last = Math.min(match[2] === undefined ? first : Number(match[2]), first + MOST_TOKENS);
    for (let t = first; t <= last && tokens.size < MOST_TOKENS; t++) tokens.add(t);
  }
  return [...tokens].sort((a, b) => a - b);
}

const short = (value: number): string => String(Number(value.toPrecision(7)));

/** The state as the text after `#`; what equals the defaults is left out. */
export function toHash(state: Readonly<State>): string {
  const out = new URLSearchParams();
  const put = (key: string, value: string, usual: string): void => {
    if (value !== usual) out.set(key, value);
  };
  out.set("run", state.run);
  out.set("call", state.call);
  out.set("head", String(state.head));
  put("item", String(state.item), "0");
  out.set("tone", state.tone); // the usual one depends on the length of the text
  for (const key of ["what", "pool", "theme", "panel"] as const) put(key, state[key], DEFAULTS[key]);
  if (state.scale) for (const key of ["x", "y", "scale"] as const) out.set(key, short(state[key]));
  if (state.tokens.length) out.set(state.axis, writeTokens(state.tokens));
  const other = state.compare;
  if (other) out.set("with", [other.mode, other.head, other.run, other.call].join("."));
  put("find", state.searched, "");
  return out.toString();
}

function oneOf<T extends string>(value: string | null, ...all: T[]): T | undefined {
  return all.find((one) => one === value);
}

function finite(text: string | null): number | undefined {
  const value = text === null || text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(value) ? value : undefined;
}

function natural(text: string | null): number | undefined {
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : undefined;
}

function readCompare(text: string | null): Compare | null {
  const [mode, head, run, ...call] = (text ?? "").split(".");
  const known = oneOf(mode ?? null, "side", "difference");
  const number = natural(head ?? null);
  return known && number !== undefined && run !== undefined && call.length
    ? { mode: known, head: number, run, call: call.join(".") } : null;
}

/** Reads what `toHash` writes; anything malformed is left out, so the defaults stand. */
export function fromHash(hash: string): Partial<State> {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const axis = given.has("key") ? "key" : given.has("row") ? "row" : undefined;
  const scale = finite(given.get("scale"));
  const patch: { [K in keyof State]?: State[K] | undefined } = {
    run: given.get("run") ?? undefined,
    call: given.get("call") ?? undefined,
    head: natural(given.get("head")),
    item: natural(given.get("item")),
    what: oneOf(given.get("what"), "weights", "logits", "bias"),
    pool: oneOf(given.get("pool"), "max", "mean"),
    tone: oneOf(given.get("tone"), "linear", "log"),
    theme: oneOf(given.get("theme"), "auto", "light", "dark"),
    panel: given.get("panel") ?? undefined,
    searched: given.get("find") ?? undefined,
    x: finite(given.get("x")),
    y: finite(given.get("y")),
    scale: scale !== undefined && scale > 0 ? scale : undefined,
    axis,
    tokens: axis && readTokens(given.get(axis) ?? ""),
    compare: readCompare(given.get("with")) ?? undefined,
  };
  return Object.fromEntries(Object.entries(patch).filter(([, value]) => value !== undefined)) as Partial<State>;
}

/** Makes the state one that the manifest has: what does not exist becomes what Python shows first. */
export function fitted(state: Readonly<State>, manifest: Manifest): State {
  const find = (run: string, call: string, head: number) => {
    const known = byId(byId(manifest.runs, run)?.calls, call);
    return known && head < known.heads ? known : undefined;
  };
  const out: State = { ...state };
  let call = find(out.run, out.call, out.head);
  if (!call) {
    Object.assign(out, manifest.shown);
    call = find(out.run, out.call, out.head);
  }
  if (!call) return out;
  if (out.item >= call.items) out.item = 0;
  if (out.what === "bias" && call.bias === null) out.what = "weights";
  const length = (out.axis === "row" ? call.rows : call.keys).length;
  out.tokens = out.tokens.filter((token) => token < length);
  if (out.compare && !find(out.compare.run, out.compare.call, out.compare.head)) out.compare = null;
  return out;
}

/** Keeps the hash of the page at what is shown, and follows a hash that the user changes. Returns what ends that. */
export function bindHash(store: Store, manifest: Manifest): () => void {
  let timer = 0;
  const write = (): void => {
    timer = 0;
    try {
      history.replaceState(history.state, "", "#" + toHash(store.get()));
    } catch {
      // Some browsers forbid it for files, and Safari for many changes in a short time.
    }
  };
  const end = store.subscribe((_, changed) => {
    if (changed.size === 1 && changed.has("cursor")) return;
    if (!timer) timer = setTimeout(write, 250);
  });
  const read = (): void => {
    if (location.hash.slice(1) === toHash(store.get())) return;
    store.set(fitted({ ...DEFAULTS, ...manifest.shown, ...fromHash(location.hash) }, manifest));
  };
  const deaf = on(window, "hashchange", read);
  return () => {
    end();
    clearTimeout(timer);
    deaf();
  };
}
