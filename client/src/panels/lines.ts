// Weights of the chosen tokens, by blocks of tokens: what they look at (rows of the map), what looks at them (columns).
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

/**
 * The request for a block; one for every block, so that a saved page knows it again. The first one brings the largest.
 */
export function lineParams(place: Place, tokens: number[], block: number, length: number): LineParams {
  const start = block * BLOCK;
  return { ...place, tokens, start, stop: Math.min(length, start + BLOCK), top: block === 0 ? TOP : 0 };
}

export const lengthOf = (context: Context, axis: Axis): number =>
  context.call()[axis === "row" ? "rows" : "keys"].length;

export function placeOf(context: Context): Place {
  const { run, call, head, item } = context.store.get();
  return { run, call, head, item };
}

/** The lines of what is chosen. */
export interface Lines {
  /** A block of what is chosen now, if it is here. */
  known(direction: Direction, block: number): Line | undefined;
  load(direction: Direction, block: number): Promise<Line>;
  /**
   * A word's weight, as far as it is loaded: what it gets is summed over its tokens, what it gives is averaged over
   * them.
   */
  ofWord(direction: Direction, word: { first: number; end: number }): number;
}

export function makeLines(context: Context): Lines {
  const blocks = new Map<string, Line>(), waiting = new Map<string, Promise<Line>>();
  let of: Readonly<State> | null = null, choice = "";

  const keyOf = (direction: Direction, block: number): string => {
    const state = context.store.get();
    if (state !== of) [of, choice] = [state, JSON.stringify([state.axis, state.tokens, placeOf(context)])];
    return `${direction} ${block} ${choice}`;
  };
  const known = (direction: Direction, block: number): Line | undefined => blocks.get(keyOf(direction, block));
  const ask = async (direction: Direction, block: number, key: string): Promise<Line> => {
    const params = lineParams(placeOf(context), [...context.store.get().tokens], block,
      lengthOf(context, ALONG[direction]));
    try {
      const line = direction === "from"
        ? await context.ask("row", params).then(({ data, top, sum, entropy }) => ({ data, top, total: sum, entropy }))
        : await context.ask("column", params).then(({ data, top, received }) =>
          ({ data, top, total: received, entropy: null }));
      if (blocks.size >= MOST_BLOCKS) blocks.delete(blocks.keys().next().value!);
      blocks.set(key, line);
      return line;
    } finally {
      waiting.delete(key);
    }
  };
  return {
    known,
    load(direction, block) {
      const key = keyOf(direction, block), line = blocks.get(key) ?? waiting.get(key) ?? ask(direction, block, key);
      if (line instanceof Promise) waiting.set(key, line);
      return Promise.resolve(line);
    },
    ofWord(direction, { first, end }) {
      let sum = 0;
      for (let token = first; token < end; token++) sum += known(direction,
        Math.floor(token / BLOCK))?.data[token % BLOCK] || 0;
      return sum / (direction === "by" ? end - first : 1);
    },
  };
}
