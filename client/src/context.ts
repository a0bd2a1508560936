// What every part of the client gets when it is mounted.
import type { ColourScale } from "./map/scale";
import { messageOf } from "./parts";
import { byId, callOf, type Answer, type Call, type Manifest, type Op, type Protocol, type Run, type Side } from "./protocol";
import type { Store } from "./store";
import { ask, type Transport } from "./transport";
import { WordCache, type Words } from "./words";

export type Axis = "row" | "key";

/** What the map shows, for export: token ranges [start, end) and the painted canvas, margins included. */
export interface Picture {
  rows: [number, number];
  keys: [number, number];
  canvas: HTMLCanvasElement;
  /** Its colours. */
  scale: ColourScale;
  /** Whether some of it is from a sample of rows. */
  sampled: boolean;
}

export interface Context {
  /** The client's outermost element; it carries `data-theme` and `data-size` (wide, middle, narrow). */
  root: HTMLElement;
  store: Store;
  transport: Transport;
  manifest: Manifest;
  words: WordCache;
  ask<O extends Op>(op: O, params: Protocol[O]["params"], signal?: AbortSignal): Promise<Answer<O>>;
  /** The run that is shown, and the call as the shown item has it. */
  run(): Run;
  call(): Call;
  /** The side of an axis of the shown call, and its words by the axis's own tokens: row 0 may stand at `placed`. */
  side(axis: Axis): Side;
  wordsOf(axis: Axis): Words;
  /** Chooses tokens; `add` keeps those chosen before and takes away those that are chosen already. */
  choose(axis: Axis, tokens: readonly number[], add?: boolean): void;
  /** Moves the map until a row and a key token are in view; null leaves an axis as it is. */
  reveal(row: number | null, key: number | null): void;
  /** Says something to screen readers, politely. */
  announce(text: string): void;
  /** Shows an error in one sentence; aborted requests are no errors. */
  fail(error: unknown): void;
  /** What the map shows now; null before the first picture. Set by the map. */
  picture: () => Picture | null;
}

/** A part of the page. `left` stays visible on wide screens, `right` is a tab, `bar` a small control in the header. */
export interface Panel {
  id: string;
  title: string;
  place: "left" | "right" | "bar";
  /** Fills `el`; the function that it returns, if any, is called when the client is removed. */
  mount(el: HTMLElement, context: Context): void | (() => void);
  /** Whether there is anything to show for this manifest; left out: always. */
  wanted?(manifest: Manifest): boolean;
}

export function makeContext(
  root: HTMLElement, store: Store, transport: Transport, manifest: Manifest,
  announce: (text: string) => void, complain: (text: string) => void,
): Context {
  const words = new WordCache(manifest, transport);
  const run = (): Run => byId(manifest.runs, store.get().run) ?? manifest.runs[0];
  const call = (): Call => callOf(byId(run().calls, store.get().call) ?? run().calls[0], store.get().item);
  const sideId = (axis: Axis): string => (axis === "row" ? call().rows : call().keys).side;
  return {
    root, store, transport, manifest, words, run, call, announce,
    ask: (op, params, signal) => ask(transport, op, params, signal),
    side: (axis) => byId(run().sides, sideId(axis)) ?? run().sides[0],
    wordsOf: (axis) => words.side(run().id, sideId(axis)).from(axis === "row" ? call().rows.placed : 0),
    choose(axis, tokens, add = false) {
      const state = store.get();
      const before = add && state.axis === axis ? new Set(state.tokens) : new Set<number>();
      const all = tokens.every((t) => before.has(t));
      for (const token of tokens) if (add && all) before.delete(token); else before.add(token);
      store.set({ axis, tokens: [...before].sort((a, b) => a - b) });
    },
    reveal(row, key) {
      const { x, y } = store.get();
      store.set({ y: row === null ? y : row + 0.5, x: key === null ? x : key + 0.5 });
    },
    fail(error) {
      if (error instanceof DOMException && error.name === "AbortError") return;
      complain(messageOf(error));
    },
    picture: () => null,
  };
}
