// The numbers of what is in view, as exact as they can be had, from tiles of one level.
import type { Axis, Context, Picture } from "../context";
import { TILE } from "../map/viewport";
import { byId, type Place, type TileParams } from "../protocol";
import type { Words } from "../words";

/** Bins of a side at most; a wider view is saved at a coarser level. */
export const MOST_BINS = 512;
export type Seen = Pick<Picture, "rows" | "keys">;

/**
 * Bins [row, row + down) x [key, key + across) of `level`; NaN: no visible pair. `second` is that of the compared head.
 */
export interface Numbers {
  level: number;
  row: number;
  key: number;
  down: number;
  across: number;
  values: Float32Array;
  second: Float32Array | null;
  /** Whether some of them are from a sample of rows. */
  sampled: boolean;
  /** What bins are called: by their first tokens. */
  rowNames: string[];
  keyNames: string[];
}

/** The finest level at which [start, end) of both axes has at most MOST_BINS bins. */
export function levelFor(...axes: readonly (readonly [number, number])[]): number {
  let level = 0;
  while (axes.some(([start, end]) => Math.ceil(end / 2 ** level) - Math.floor(start / 2 ** level) > MOST_BINS)) level++;
  return level;
}

/** Runs `work` for each of `all`, a few at once; stops when `signal` says so. */
export async function inTurn<T>(all: readonly T[], work: (one: T) => Promise<unknown>,
  signal: AbortSignal): Promise<void> {
  let next = 0;
  const worker = async (): Promise<void> => {
    while (next < all.length) {
      signal.throwIfAborted();
      await work(all[next++]);
    }
  };
  await Promise.all([worker(), worker(), worker(), worker()]);
}

/**
 * Numbers of what is in view, of the shown head and of the one that it is compared with, if they have one size.
 */
export async function numbersInView(context: Context, { rows, keys }: Seen,
  nameOf: (words: Words, token: number) => string, signal: AbortSignal): Promise<Numbers> {
  const { run, call, head, item, compare, what, pool } = context.store.get(), level = levelFor(rows, keys),
    size = 2 ** level;
  const row = Math.floor(rows[0] / size), key = Math.floor(keys[0] / size), down = Math.ceil(rows[1] / size) - row,
    across = Math.ceil(keys[1] / size) - key;
  const tiles: [number, number][] = [];
  for (let r = Math.floor(row / TILE); r * TILE < row + down; r++)
    for (let k = Math.floor(key / TILE); k * TILE < key + across; k++) tiles.push([r, k]);

  let sampled = false;
  const valuesOf = async (place: Place): Promise<Float32Array> => {
    const out = new Float32Array(down * across).fill(NaN);
    await inTurn(tiles, async ([r, k]) => {
      const params: TileParams = { ...place, what, pool: level ? pool : "max", level, row: r, key: k, exact: true };
      const tile = await context.ask("tile", params, signal);
      sampled ||= tile.sampled > 0;
      const top = r * TILE, left = k * TILE;
      for (let i = Math.max(row, top); i < Math.min(row + down, top + tile.rows); i++)
        for (let j = Math.max(key, left); j < Math.min(key + across, left + tile.keys); j++)
          out[(i - row) * across + (j - key)] = tile.data[(i - top) * tile.keys + (j - left)];
    }, signal);
    return out;
  };
  const namesOf = async (axis: Axis, first: number, count: number): Promise<string[]> => {
    const words = context.wordsOf(axis), names: string[] = [];
    for (let bin = first; bin < first + count; bin++) { // pages of words may come and go meanwhile
      await words.need(bin * size, bin * size + 1);
      names.push(nameOf(words, bin * size));
    }
    return names;
  };
  const own = context.call(), other = byId(byId(context.manifest.runs, compare?.run)?.calls, compare?.call);
  const fits = compare && other?.rows.length === own.rows.length && other.keys.length === own.keys.length;
  const numbers = {
    level, row, key, down, across, values: await valuesOf({ run, call, head, item }),
    second: fits ? await valuesOf({ run: compare.run, call: compare.call, head: compare.head,
      item: Math.min(item, other.items - 1) }) : null,
    rowNames: await namesOf("row", row, down), keyNames: await namesOf("key", key, across),
  };
  return { ...numbers, sampled };
}

/** The shown head less the compared one; a weight that only one of them hides counts as 0 there. */
export const differenceOf = (a: Float32Array, b: Float32Array, weights: boolean): Float32Array =>
  a.map((x, i) => (weights && !(Number.isNaN(x) && Number.isNaN(b[i])) ? (x || 0) - (b[i] || 0) : x - b[i]));
