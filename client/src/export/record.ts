// Which requests a saved page can answer: what is in view, for hovering, choosing words and zooming out.
import type { Context, Picture } from "../context";
import { topLevel } from "../map/viewport";
import { sameTokens } from "../panels/data";
import { BLOCK, lineParams, placeOf } from "../panels/lines";
import { ROWS } from "../panels/statistics";
import { pagesOf } from "../panels/virtual";
import type { Place, TileParams } from "../protocol";
import { encodeFrame, recordedKey, RequestError, type Reply } from "../transport";
import { PAGE } from "../words";
import { inTurn } from "./numbers";

const TILE = 256;
const MOST_TILES = 40; // of 350 kB each
const MOST_LINES = 1200, MOST_CELLS = 2500, MOST_HEADS_CELLS = 4096;

export type Wish = [op: string, params: object];

/** Tiles of one head over the view: all coarser levels, and finer ones while they are few. */
function tiles(context: Context, place: Place, { rows, keys }: Pick<Picture, "rows" | "keys">, whole: boolean): Wish[] {
  const { what, pool, compare } = context.store.get(), call = context.call();
  const top = topLevel(call.rows.length, call.keys.length);
  const places = [place, ...(compare && !whole ? [{ run: compare.run, call: compare.call, head: compare.head, item: place.item }] : [])];
  const wishes: Wish[] = [];
  for (let level = top; level >= 0; level--) {
    const size = TILE * 2 ** level, added: Wish[] = [];
    for (let row = Math.floor(rows[0] / size); row * size < rows[1]; row++)
      for (let key = Math.floor(keys[0] / size); key * size < keys[1]; key++)
        for (const one of places)
          added.push(["tile", { ...one, what, pool: level === 0 ? "max" : pool, level, row, key, exact: true } satisfies TileParams]);
    if (wishes.length && wishes.length + added.length > MOST_TILES) break;
    wishes.push(...added);
  }
  return wishes;
}

/** Rows and columns of every word in view and of the chosen ones, as the text asks for them. */
function lines(context: Context, place: Place, { rows, keys }: Pick<Picture, "rows" | "keys">): Wish[] {
  const call = context.call(), wishes: Wish[] = [], both = sameTokens(call);
  const { axis, tokens } = context.store.get();
  const add = (axis: "row" | "key", tokens: number[], blocks: readonly number[]): void => {
    const one = (op: "row" | "column", length: number): void => {
      for (const block of new Set([0, ...blocks])) if (block * BLOCK < length) wishes.push([op, lineParams(place, tokens, block, length)]);
    };
    if (axis === "row" || both) one("row", call.keys.length);
    if (axis === "key" || both) one("column", call.rows.length);
  };
  const near = pagesOf(Math.max(0, Math.min(rows[0], keys[0]) - BLOCK), Math.max(rows[1], keys[1]) + BLOCK, BLOCK).slice(0, 8);
  if (tokens.length) add(axis, [...tokens], near);
  for (const axis of both ? (["row"] as const) : (["row", "key"] as const)) {
    const [start, stop] = axis === "row" ? rows : keys;
    if ((stop - start) * near.length > MOST_LINES) continue;
    for (const word of context.wordsOf(axis).between(start, stop))
      add(axis, Array.from({ length: word.end - word.first }, (_, i) => word.first + i), near);
    if (!context.side(axis).named) for (let token = start; token < stop; token++) add(axis, [token], near);
  }
  return wishes;
}

/** All requests to record. Words must be loaded where words are in view. */
export function wishesOf(context: Context, picture: Pick<Picture, "rows" | "keys">): Wish[] {
  const place = placeOf(context), { run, item } = place, call = context.call(), wishes: Wish[] = [["open", {}], ["overview", { run, item }]];
  for (const [axis, range] of [["row", picture.rows], ["key", picture.keys]] as const) {
    const side = context.side(axis);
    if (side.named) for (const page of new Set([0, ...pagesOf(range[0], range[1], PAGE)]))
      wishes.push(["words", { run, side: side.id, start: page * PAGE, stop: Math.min(side.tokens, (page + 1) * PAGE) }]);
  }
  wishes.push(...tiles(context, place, picture, false), ...lines(context, place, picture));
  const [r0, r1] = picture.rows, [k0, k1] = picture.keys;
  if ((r1 - r0) * (k1 - k0) <= MOST_CELLS)
    for (let row = r0; row < r1; row++) for (let key = k0; key < k1; key++) wishes.push(["cell", { ...place, row, key }]);
  for (const other of context.run().calls) {
    if (other.rows.length * other.keys.length > MOST_HEADS_CELLS || other.rows.length !== call.rows.length || other.keys.length !== call.keys.length) continue;
    for (let head = 0; head < other.heads; head++)
      if (other.id !== call.id || head !== place.head) wishes.push(...tiles(context, { ...place, call: other.id, head }, picture, true));
  }
  for (const page of new Set([0, ...pagesOf(...picture.rows, ROWS).slice(0, 4)]))
    wishes.push(["rows", { ...place, start: page * ROWS, stop: Math.min(call.rows.length, (page + 1) * ROWS) }]);
  return wishes;
}

function base64(bytes: ArrayBuffer): string {
  const all = new Uint8Array(bytes), parts: string[] = [];
  for (let at = 0; at < all.length; at += 0x6000) parts.push(btoa(String.fromCharCode(...all.subarray(at, at + 0x6000))));
  return parts.join("");
}

/** Asks for all of them; `told` hears how many are here. Exact tiles answer requests for quick ones. */
export async function record(
  context: Context, wishes: readonly Wish[], told: (done: number, all: number) => void, signal: AbortSignal,
): Promise<Record<string, string>> {
  const table: Record<string, string> = {}, { store, transport, manifest } = context;
  let done = 0;
  await inTurn(wishes, async ([op, params]) => {
    let reply: Reply = await transport.request(op, params, signal);
    if (typeof reply.header["error"] === "string") throw new RequestError(reply.header["error"]);
    if (op === "open") {
      const { run, call, head, item, compare } = store.get();
      const runs = manifest.runs.filter(({ id }) => id === run || id === compare?.run);
      reply = { ...reply, header: { ...reply.header, runs, shown: { run, call, head, item }, findings: [], step: false } };
    }
    table[recordedKey(op, op === "tile" ? { ...params, exact: false } : params)] = base64(encodeFrame(reply));
    if (++done % 16 === 0) told(done, wishes.length);
  }, signal);
  return table;
}
