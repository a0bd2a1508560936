// Which requests a saved page can answer: what is in view, for hovering, choosing words and zooming out.
import type { Axis, Context, Picture } from "../context";
import { topLevel } from "../map/viewport";
import { sameTokens } from "../panels/data";
import { ALONG, BLOCK, Lines, placeOf } from "../panels/lines";
import { sharesOf, type Shares } from "../panels/shares";
import { ROWS } from "../panels/statistics";
import { pagesOf } from "../panels/virtual";
import type { Place, TileParams } from "../protocol";
import { ask, encodeFrame, recordedKey, RequestError, type Transport } from "../transport";
import { PAGE } from "../words";
import { inTurn } from "./numbers";

const TILE = 256;
const MOST_TILES = 40; // of 350 kB each
const MOST_CELLS = 4096, MOST_CHOICES = 300, MOST_CHOICES_OF_ALL = 800, MOST_PAGES = 8;

type Wish = [op: string, params: object];
type Seen = Pick<Picture, "rows" | "keys">;
export type Told = (done: number, all: number) => void;

/** Tiles of one head over the view: all coarser levels, and finer ones while they are few. */
function tiles(context: Context, place: Place, { rows, keys }: Seen, whole: boolean): Wish[] {
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

/** The other heads of a short text whose maps have the same tokens. */
function otherHeads(context: Context): Place[] {
  const place = placeOf(context), call = context.call();
  return context.run().calls
    .filter(({ rows, keys }) => rows.length * keys.length <= MOST_CELLS && rows.side === call.rows.side && keys.side === call.keys.side)
    .flatMap(({ id, heads }) => Array.from({ length: heads }, (_, head) => ({ ...place, call: id, head })))
    .filter(({ call, head }) => call !== place.call || head !== place.head);
}

/** What a page asks for before anything is chosen. */
function wishesOf(context: Context, picture: Seen, others: readonly Place[]): Wish[] {
  const place = placeOf(context), { run, item } = place, call = context.call(), wishes: Wish[] = [["open", {}], ["overview", { run, item }]];
  for (const [axis, range] of [["row", picture.rows], ["key", picture.keys]] as const) {
    const side = context.side(axis);
    if (side.named) for (const page of new Set([0, ...pagesOf(range[0], range[1], PAGE)]))
      wishes.push(["words", { run, side: side.id, start: page * PAGE, stop: Math.min(side.tokens, (page + 1) * PAGE) }]);
  }
  wishes.push(...tiles(context, place, picture, false));
  const [r0, r1] = picture.rows, [k0, k1] = picture.keys;
  if ((r1 - r0) * (k1 - k0) <= MOST_CELLS)
    for (let row = r0; row < r1; row++) for (let key = k0; key < k1; key++) wishes.push(["cell", { ...place, row, key }]);
  for (const other of others) wishes.push(...tiles(context, other, picture, true));
  for (const page of new Set([0, ...pagesOf(...picture.rows, ROWS).slice(0, 4)]))
    wishes.push(["rows", { ...place, start: page * ROWS, stop: Math.min(call.rows.length, (page + 1) * ROWS) }]);
  return wishes;
}

interface Choice { call: string; head: number; axis: Axis; tokens: number[] }

/** What is chosen and every word in view, in the shown head; in the other heads of a short text as far as they are few. */
function choices(context: Context, { rows, keys }: Seen, others: readonly Place[]): Choice[] {
  const { call, head, axis, tokens } = context.store.get(), out: Choice[] = [];
  for (const axis of sameTokens(context.call()) ? (["row"] as const) : (["row", "key"] as const)) {
    const [start, stop] = axis === "row" ? rows : keys, named = context.side(axis).named;
    if (stop - start > MOST_CHOICES) continue;
    const words = named ? context.wordsOf(axis).between(start, stop) : Array.from({ length: stop - start }, (_, i) => ({ first: start + i, end: start + i + 1 }));
    for (const { first, end } of words) out.push({ call, head, axis, tokens: Array.from({ length: end - first }, (_, i) => first + i) });
  }
  const chosen: Choice[] = tokens.length ? [{ call, head, axis, tokens: [...tokens] }] : [];
  const elsewhere = out.length * others.length <= MOST_CHOICES_OF_ALL ? [...chosen, ...out] : chosen;
  return [...chosen, ...out, ...others.flatMap(({ call, head }) => elsewhere.map((one) => ({ ...one, call, head })))];
}

/** Asks what the text panel asks when these tokens are chosen; the text around the view is shaded, too. */
async function choose(context: Context, choice: Choice, { rows, keys }: Seen): Promise<Shares> {
  const state = { ...context.store.get(), ...choice };
  const chosen = { ...context, store: { ...context.store, get: () => state } }, lines = new Lines(chosen);
  const shares = await sharesOf(chosen, lines);
  const { rows: { length }, keys: { length: across } } = context.call();
  const near = pagesOf(Math.max(0, Math.min(rows[0], keys[0]) - BLOCK), Math.max(rows[1], keys[1]) + BLOCK, BLOCK).slice(0, 8);
  for (const direction of shares.directions)
    for (const block of near) if (block * BLOCK < (ALONG[direction] === "key" ? across : length)) await lines.load(direction, block);
  return shares;
}

function base64(bytes: ArrayBuffer): string {
  const all = new Uint8Array(bytes), parts: string[] = [];
  for (let at = 0; at < all.length; at += 0x6000) parts.push(btoa(String.fromCharCode(...all.subarray(at, at + 0x6000))));
  return parts.join("");
}

/** What answers the requests of a saved page: `told` hears how far it is. */
export async function record(context: Context, picture: Seen, told: Told, signal: AbortSignal): Promise<Record<string, string>> {
  const table: Record<string, string> = {}, { store, transport, manifest } = context;
  const request: Transport["request"] = async (op, params) => {
    let reply = await transport.request(op, params, signal);
    if (typeof reply.header["error"] === "string") throw new RequestError(reply.header["error"]);
    if (op === "open") {
      const { run, call, head, item, compare } = store.get();
      const runs = manifest.runs.filter(({ id }) => id === run || id === compare?.run);
      reply = { ...reply, header: { ...reply.header, runs, shown: { run, call, head, item }, findings: [], step: false } };
    }
    // Exact tiles answer requests for quick ones.
    table[recordedKey(op, op === "tile" ? { ...params, exact: false } : params)] = base64(encodeFrame(reply));
    return reply;
  };
  const asking: Context = { ...context, ask: (op, params) => ask({ kind: transport.kind, request }, op, params) };
  const others = otherHeads(context), pages = new Set<string>();
  const name = async (shares: Shares): Promise<void> => {
    for (const direction of shares.directions) for (const { first } of shares[direction]) {
      const side = context.side(ALONG[direction]), start = Math.floor(first / PAGE) * PAGE, known = `${start} ${side.id}`;
      if (!side.named || pages.has(known) || pages.size >= MOST_PAGES) continue;
      pages.add(known);
      await request("words", { run: context.run().id, side: side.id, start, stop: Math.min(side.tokens, start + PAGE) });
    }
  };
  const jobs = [
    ...wishesOf(context, picture, others).map(([op, params]) => () => request(op, params)),
    ...choices(context, picture, others).map((one) => () => choose(asking, one, picture).then(name)),
  ];
  let done = 0;
  await inTurn(jobs, async (job) => {
    await job();
    if (++done % 16 === 0) told(done, jobs.length);
  }, signal);
  return table;
}
