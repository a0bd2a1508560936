// Weights of the chosen tokens: what they look at (rows of the map) and what looks at them (columns), by blocks of tokens.
import type { Axis, Context } from "../context";
import type { LineParams, Place } from "../protocol";
import type { State } from "../store";
import { sameTokens } from "./data";

export const BLOCK = 512;
/** Tokens that the first block brings as the largest. */
export const TOP = 96;
const MOST_BLOCKS = 256;

/** `from`: the weights on keys, averaged over the chosen tokens; `by`: the weights of rows, summed over them. */
export type Direction = "from" | "by";
/** The axis that the weights of a direction run along. */
export const ALONG: Record<Direction, Axis> = { from: "key", by: "row" };

export interface Line { data: Float32Array; top: [number, number][]; total: number | null; entropy: number | null }

/** Which directions the chosen tokens have: both where rows and keys are the same tokens. */
export function directionsOf(context: Context): Direction[] {
  const { axis, tokens } = context.store.get();
  return !tokens.length ? [] : sameTokens(context.call()) ? ["from", "by"] : axis === "row" ? ["from"] : ["by"];
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

/** The lines of what is chosen. */
export class Lines {
  readonly #context: Context;
  readonly #blocks = new Map<string, Line>();
  #state: Readonly<State> | null = null;
  #choice = "";
  readonly #waiting = new Map<string, Promise<Line>>();

  constructor(context: Context) {
    this.#context = context;
  }

  #key(direction: Direction, block: number): string {
    const state = this.#context.store.get();
    if (state !== this.#state) [this.#state, this.#choice] = [state, JSON.stringify([state.axis, state.tokens, placeOf(this.#context)])];
    return `${direction} ${block} ${this.#choice}`;
  }

  /** A block of what is chosen now, if it is here. */
  known(direction: Direction, block: number): Line | undefined {
    return this.#blocks.get(this.#key(direction, block));
  }

  load(direction: Direction, block: number): Promise<Line> {
    const blocks = this.#blocks, context = this.#context, key = this.#key(direction, block), known = blocks.get(key) ?? this.#waiting.get(key);
    if (known) return Promise.resolve(known);
    const call = context.call(), params = lineParams(placeOf(context), [...context.store.get().tokens], block,
      (ALONG[direction] === "key" ? call.keys : call.rows).length);
    const asked = direction === "from"
      ? context.ask("row", params).then(({ data, top, sum, entropy }): Line => ({ data, top, total: sum, entropy }))
      : context.ask("column", params).then(({ data, top, received }): Line => ({ data, top, total: received, entropy: null }));
    const promise = asked.then((line) => {
      if (blocks.size >= MOST_BLOCKS) blocks.delete(blocks.keys().next().value!);
      blocks.set(key, line);
      return line;
    }).finally(() => this.#waiting.delete(key));
    this.#waiting.set(key, promise);
    return promise;
  }

  /** A word's weight, as far as it is loaded: what it gets is summed over its tokens, what it gives is averaged over them. */
  ofWord(direction: Direction, { first, end }: { first: number; end: number }): number {
    let sum = 0, data: Float32Array | undefined;
    for (let token = first; token < end; token++) {
      if (token === first || token % BLOCK === 0) data = this.known(direction, Math.floor(token / BLOCK))?.data;
      sum += data?.[token % BLOCK] || 0;
    }
    return sum / (direction === "by" ? end - first : 1);
  }
}
