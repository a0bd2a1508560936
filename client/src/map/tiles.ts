// Tiles of maps: which are here, which are asked for, in which order. At most a few requests are under way.
import type { Pool, TileParams, What } from "../protocol";
import { Lru } from "./lru";
import type { TileAt } from "./viewport";

/** One head's map, as tiles are asked for. */
export interface MapOf {
  run: string;
  call: string;
  head: number;
  item: number;
  what: What;
  pool: Pool;
}

export interface Tile {
  level: number;
  rows: number;
  keys: number;
  /** 0: exact; n: from n rows of each bin. */
  sampled: number;
  /** There is no better one: exact, or sampled although an exact one was asked for. */
  final: boolean;
  /** (rows, keys); NaN: no visible pair. */
  data: Float32Array;
  /** Smallest and largest finite number; low > high when there is none. */
  low: number;
  high: number;
}

export type FetchTile = (params: TileParams, signal: AbortSignal) => Promise<{
  rows: number; keys: number; sampled: number; final?: boolean; data: Float32Array;
}>;

export interface Wanted {
  map: MapOf;
  at: TileAt;
  /** A sampled tile is enough. */
  rough?: boolean;
}

const BUDGET = 128 * 2 ** 20;
const PIXEL = 8; // bytes a number takes here: itself and its painted pixel
const MOST_AT_ONCE = 4;
const MOST_EXACT_AT_ONCE = 2; // exact ones may take seconds: there is always room for what is missing
const MOST_FAILURES = 3;
const RETRY_AFTER = 1500;

function paramsOf({ map, at }: Wanted, exact: boolean): TileParams {
  const pool = at.level === 0 ? "max" : map.pool; // a bin of one pair has no other
  return { run: map.run, call: map.call, head: map.head, item: map.item, what: map.what, pool, ...at, exact };
}

const keyOf = (wanted: Wanted): string => JSON.stringify(paramsOf(wanted, true));

export class TileStore {
  readonly #tiles: Lru<Tile>;
  readonly #running = new Map<string, { request: AbortController; exact: boolean }>();
  readonly #failures = new Map<string, number>();
  #wanted: readonly Wanted[] = [];
  #queue: Wanted[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;

  readonly #fetch: FetchTile;
  readonly #loaded: (tile: Tile, of: MapOf) => void;
  readonly #failed: (error: unknown) => void;

  constructor(
    fetch: FetchTile, loaded: (tile: Tile, of: MapOf) => void, failed: (error: unknown) => void, budget = BUDGET,
  ) {
    this.#fetch = fetch;
    this.#loaded = loaded;
    this.#failed = failed;
    this.#tiles = new Lru(budget);
  }

  get(map: MapOf, at: TileAt): Tile | undefined {
    return this.#tiles.get(keyOf({ map, at }));
  }

  /** Whether tiles of the last `want` are still to come. */
  get busy(): boolean {
    return this.#running.size > 0 || this.#queue.length > 0;
  }

  /** Whether any of the last `want` failed so often that it is asked for no more. */
  get gaveUp(): boolean {
    return this.#failures.size > 0 && this.#wanted.some((wanted) => this.#gone(keyOf(wanted)));
  }

  /** Asks again for what failed, from now on as often as at first. */
  retry(): void {
    this.#failures.clear();
    this.want(this.#wanted);
  }

  /** Asks for these, first things first. Requests for anything else are dropped. */
  want(wanted: readonly Wanted[]): void {
    this.#wanted = wanted;
    this.#queue = [...wanted];
    const kept = new Set(wanted.map(keyOf));
    for (const [key, { request }] of this.#running) if (!kept.has(key)) {
      request.abort();
      this.#running.delete(key);
    }
    this.#next();
  }

  close(): void {
    this.want([]);
    clearTimeout(this.#timer);
  }

  #gone(key: string): boolean {
    return (this.#failures.get(key) ?? 0) >= MOST_FAILURES;
  }

  /** Starts requests: missing tiles first, then exact ones for those that are sampled. */
  #next(): void {
    this.#queue = this.#queue.filter((w) => {
      const tile = this.#tiles.get(keyOf(w));
      return !(tile && (tile.final || w.rough)) && !this.#gone(keyOf(w));
    });
    for (const missing of [true, false])
      for (const wanted of this.#queue) {
        if (this.#running.size >= MOST_AT_ONCE) return;
        if (!missing && [...this.#running.values()].filter((r) => r.exact).length >= MOST_EXACT_AT_ONCE) return;
        const key = keyOf(wanted);
        if (!this.#running.has(key) && missing === (this.#tiles.get(key) === undefined))
          void this.#start(wanted, key, !missing);
      }
  }

  async #start(wanted: Wanted, key: string, exact: boolean): Promise<void> {
    const request = new AbortController();
    this.#running.set(key, { request, exact });
    try {
      const { rows, keys, sampled, data, final } = await this.#fetch(paramsOf(wanted, exact), request.signal);
      if (request.signal.aborted) return;
      const tile = { level: wanted.at.level, rows, keys, sampled, final: exact || !sampled || !!final, data, ...span(data) };
      this.#tiles.set(key, tile, data.length * PIXEL);
      this.#failures.delete(key);
      this.#loaded(tile, wanted.map);
    } catch (error) {
      if (request.signal.aborted) return;
      this.#failures.set(key, (this.#failures.get(key) ?? 0) + 1);
      this.#failed(error);
    }
    if (this.#running.get(key)?.request === request) this.#running.delete(key);
    if (this.#failures.has(key)) {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#next(), RETRY_AFTER);
    } else this.#next();
  }
}

/** Smallest and largest finite number. */
export function span(data: Float32Array): { low: number; high: number } {
  let low = Infinity, high = -Infinity;
  for (const value of data) {
    if (value < low && value > -Infinity) low = value;
    if (value > high && value < Infinity) high = value;
  }
  return { low, high };
}

const differences = new WeakMap<Tile, WeakMap<Tile, Tile>>();

/** a - b of two tiles of one place. A pair hidden in both stays hidden; a weight hidden in one counts as 0 there. */
export function difference(a: Tile, b: Tile, weights: boolean): Tile {
  const known = differences.get(a)?.get(b);
  if (known) return known;
  const data = new Float32Array(a.data.length);
  for (let i = 0; i < data.length; i++) {
    const x = a.data[i], y = b.data[i], hidden = Number.isNaN(x) && Number.isNaN(y);
    data[i] = weights && !hidden ? (x || 0) - (y || 0) : x - y;
  }
  const tile = { ...a, sampled: Math.max(a.sampled, b.sampled), data, ...span(data) };
  if (!differences.has(a)) differences.set(a, new WeakMap());
  differences.get(a)!.set(b, tile);
  return tile;
}
