// The numbers of what is in view, exact, from tiles of one level.
import type { Context, Picture } from "../context";
import type { Place, TileParams } from "../protocol";
import type { Words } from "../words";

const TILE = 256;
/** Bins of a side at most; a wider view is saved at a coarser level. */
export const MOST_BINS = 512;

/** Bins [row, row + down) x [key, key + across) of `level`; NaN: no visible pair. `second` is that of the compared head. */
export interface Numbers {
  level: number;
  row: number;
  key: number;
  down: number;
  across: number;
  values: Float32Array;
  second: Float32Array | null;
}

/** The finest level at which [start, end) of both axes has at most MOST_BINS bins. */
export function levelFor(rows: readonly [number, number], keys: readonly [number, number]): number {
  for (let level = 0; ; level++) {
    const bins = ([start, end]: readonly [number, number]): number => Math.ceil(end / 2 ** level) - Math.floor(start / 2 ** level);
    if (Math.max(bins(rows), bins(keys)) <= MOST_BINS) return level;
  }
}

/** Runs `work` for each of `all`, a few at once; stops when `signal` says so. */
export async function inTurn<T>(all: readonly T[], work: (one: T) => Promise<void>, signal?: AbortSignal): Promise<void> {
  let next = 0;
  const worker = async (): Promise<void> => {
    while (next < all.length) {
      signal?.throwIfAborted();
      await work(all[next++]);
    }
  };
  await Promise.all(Array.from({ length: 4 }, worker));
}

async function valuesOf(context: Context, place: Place, numbers: Omit<Numbers, "values" | "second">, signal?: AbortSignal): Promise<Float32Array> {
  const { what, pool } = context.store.get(), { level, row, key, down, across } = numbers;
  const out = new Float32Array(down * across).fill(NaN);
  const tiles: [number, number][] = [];
  for (let r = Math.floor(row / TILE); r * TILE < row + down; r++)
    for (let k = Math.floor(key / TILE); k * TILE < key + across; k++) tiles.push([r, k]);
  await inTurn(tiles, async ([r, k]) => {
    const params: TileParams = { ...place, what, pool: level === 0 ? "max" : pool, level, row: r, key: k, exact: true };
    const tile = await context.ask("tile", params, signal);
    for (let i = Math.max(row, r * TILE); i < Math.min(row + down, r * TILE + tile.rows); i++)
      for (let j = Math.max(key, k * TILE); j < Math.min(key + across, k * TILE + tile.keys); j++)
        out[(i - row) * across + (j - key)] = tile.data[(i - r * TILE) * tile.keys + (j - k * TILE)];
  }, signal);
  return out;
}

export async function numbersInView(context: Context, picture: Pick<Picture, "rows" | "keys">, signal?: AbortSignal): Promise<Numbers> {
  const { run, call, head, item, compare } = context.store.get(), { rows, keys } = picture;
  const level = levelFor(rows, keys), size = 2 ** level;
  const row = Math.floor(rows[0] / size), key = Math.floor(keys[0] / size);
  const where = { level, row, key, down: Math.ceil(rows[1] / size) - row, across: Math.ceil(keys[1] / size) - key };
  const values = await valuesOf(context, { run, call, head, item }, where, signal);
  const other = compare && context.manifest.runs.find((one) => one.id === compare.run)?.calls.find((one) => one.id === compare.call);
  const fits = other && other.rows.length === context.call().rows.length && other.keys.length === context.call().keys.length;
  const second = fits ? await valuesOf(context, { run: compare.run, call: compare.call, head: compare.head, item: Math.min(item, other.items - 1) }, where, signal) : null;
  return { ...where, values, second };
}

/** What `count` bins from `first` on are called, by their first token. Pages of words may come and go meanwhile. */
export async function namesOf(
  words: Words, first: number, count: number, level: number, nameOf: (words: Words, token: number) => string,
): Promise<string[]> {
  const names: string[] = [];
  for (let bin = first; bin < first + count; bin++) {
    const token = bin * 2 ** level;
    await words.need(token, token + 1);
    names.push(nameOf(words, token));
  }
  return names;
}

/** The shown head less the compared one; a weight that only one of them hides counts as 0 there. */
export function differenceOf(a: Float32Array, b: Float32Array, weights: boolean): Float32Array {
  return a.map((x, i) => (weights && !(Number.isNaN(x) && Number.isNaN(b[i])) ? (x || 0) - (b[i] || 0) : x - b[i]));
}
