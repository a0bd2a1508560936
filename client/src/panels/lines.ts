// Weights of the chosen tokens: what they look at (rows of the map) and what looks at them (columns), by blocks of tokens.
import type { Axis, Context } from "../context";
import { sameTokens } from "./data";
import type { LineParams, Place } from "../protocol";

export const BLOCK = 512;
/** Tokens that the first block brings as the largest. */
export const TOP = 96;
const MOST_BLOCKS = 256;

/** `from`: the weights on keys, averaged over the chosen tokens; `by`: the weights of rows, summed over them. */
export type Direction = "from" | "by";
export const OP = { from: "row", by: "column" } as const;
/** The axis that the weights of a direction run along. */
export const ALONG: Record<Direction, Axis> = { from: "key", by: "row" };

export interface Line { data: Float32Array; top: [number, number][]; total: number | null; entropy: number | null }

/** Which directions the chosen tokens have: both where rows and keys are the same tokens. */
export function directionsOf(context: Context): Direction[] {
  const { axis, tokens } = context.store.get();
  if (!tokens.length) return [];
  if (sameTokens(context.call())) return ["from", "by"];
  return axis === "row" ? ["from"] : ["by"];
}

/** The request for a block; one for every block, so that a saved page knows it again. The first one brings the largest. */
export function lineParams(place: Place, tokens: number[], block: number, length: number): LineParams {
  const start = block * BLOCK;
  return { ...place, tokens, start, stop: Math.min(length, start + BLOCK), top: block === 0 ? TOP : 0 };
}

export function placeOf(context: Context): Place {
  const { run, call, head, item } = context.store.get();
  return { run, call, head, item };
}

/** The lines of what is chosen; forgotten when that changes. */
export class Lines {
  readonly #blocks = new Map<string, Line>();
  readonly #waiting = new Map<string, Promise<Line>>();

  readonly #context: Context;

  constructor(context: Context) {
    this.#context = context;
  }

  #key(direction: Direction, block: number): string {
    const { run, call, head, item, tokens, axis } = this.#context.store.get();
    return [direction, block, head, item, axis, tokens.join(","), call, run].join(" ");
  }

  /** A block of what is chosen now, if it is here. */
  known(direction: Direction, block: number): Line | undefined {
    return this.#blocks.get(this.#key(direction, block));
  }

  load(direction: Direction, block: number): Promise<Line> {
    const key = this.#key(direction, block), known = this.#blocks.get(key) ?? this.#waiting.get(key);
    if (known) return Promise.resolve(known);
    const { rows, keys } = this.#context.call();
    const length = (ALONG[direction] === "key" ? keys : rows).length;
    const params = lineParams(placeOf(this.#context), [...this.#context.store.get().tokens], block, length);
    const ask = direction === "from"
      ? this.#context.ask("row", params).then((a): Line => ({ data: a.data, top: a.top, total: a.sum, entropy: a.entropy }))
      : this.#context.ask("column", params).then((a): Line => ({ data: a.data, top: a.top, total: a.received, entropy: null }));
    const promise = ask.then((line) => {
      if (this.#blocks.size >= MOST_BLOCKS) this.#blocks.delete(this.#blocks.keys().next().value!);
      this.#blocks.set(key, line);
      return line;
    }).finally(() => this.#waiting.delete(key));
    this.#waiting.set(key, promise);
    return promise;
  }

  /** The sum of the loaded weights of tokens [first, end). */
  sum(direction: Direction, first: number, end: number): number {
    let sum = 0;
    for (let token = first; token < end; token++)
      sum += this.known(direction, Math.floor(token / BLOCK))?.data[token % BLOCK] || 0;
    return sum;
  }

  /** A word's weight: what it gets is summed over its tokens, what it gives is averaged over them. */
  ofWord(direction: Direction, { first, end }: { first: number; end: number }): number {
    return this.sum(direction, first, end) / (direction === "by" ? end - first : 1);
  }
}
