// Which requests a saved page can answer: what is in view, for hovering, choosing words and zooming out.
import type { Axis, Context } from "../context";
import { TILE, topLevel } from "../map/viewport";
import { sameTokens, together } from "../panels/data";
import { ALONG, BLOCK, lengthOf, makeLines, placeOf } from "../panels/lines";
import { sharesOf, type Shares } from "../panels/shares";
import { ROWS } from "../panels/rows";
import { pagesOf } from "../panels/virtual";
import type { Call, Place } from "../protocol";
import { tokensFrom } from "../parts";
import { ask, encodeFrame, recordedKey, RequestError, type Transport } from "../transport";
import { PAGE } from "../words";
import { inTurn, type Seen } from "./numbers";

const MOST_TILES = 40; // of 350 kB each
const MOST_CELLS = 4096, MOST_TOKENS = 300, MOST_CHOICES = 800, MOST_PAGES = 8;

type Wish = [op: string, params: object];
/** Tokens of an axis that a reader of the page may choose, in one head. */
interface Choice { call: string; head: number; axis: Axis; tokens: number[] }

/** Tiles over the view: all coarser levels, and finer ones while they are few. */
function tiles(context: Context, places: readonly Place[], { rows, keys }: Seen): Wish[] {
  const { what, pool } = context.store.get(), call = context.call(), wishes: Wish[] = [];
  for (let level = topLevel(call.rows.length, call.keys.length); level >= 0; level--) {
    const size = TILE * 2 ** level, added: Wish[] = [];
    for (const row of pagesOf(...rows, size)) for (const key of pagesOf(...keys, size)) for (const place of places)
      added.push(["tile", { ...place, what, pool: level ? pool : "max", level, row, key, exact: true }]);
    if (wishes.length && wishes.length + added.length > MOST_TILES) break;
    wishes.push(...added);
  }
  return wishes;
}

/** The other heads of a short text whose maps have the same tokens. */
function otherHeads(context: Context): Place[] {
  const place = placeOf(context), call = context.call();
  return context.run().calls
    .filter(({ rows, keys }) => rows.length * keys.length <= MOST_CELLS && rows.side === call.rows.side
      && keys.side === call.keys.side)
    .flatMap(({ id, heads }) => tokensFrom(0, heads).map((head) => ({ ...place, call: id, head })))
    .filter(({ call, head }) => call !== place.call || head !== place.head);
}

/** What a page asks for before anything is chosen, and for single pairs where they are few. */
function wishesOf(context: Context, { rows, keys }: Seen, others: readonly Place[]): Wish[] {
  const place = placeOf(context), { run, item } = place, { compare } = context.store.get(), call = context.call();
  const both = [place, ...(compare ? [{ run: compare.run, call: compare.call, head: compare.head, item }] : [])];
  const wishes: Wish[] = [["open", {}], ["overview", { run, item }], ...tiles(context, both, { rows, keys })];
  for (const other of others) wishes.push(...tiles(context, [other], { rows, keys }));
  if ((rows[1] - rows[0]) * (keys[1] - keys[0]) <= MOST_CELLS)
    for (const row of tokensFrom(...rows))
      for (const key of tokensFrom(...keys)) wishes.push(["cell", { ...place, row, key }]);
  for (const [seen, { length }] of [[rows, call.rows], ...(together(call) ? [] : [[keys, call.keys]])] as [[number,
    number], Call["keys"]][])
    for (const page of new Set([0, ...pagesOf(...seen, ROWS).slice(0, 4)]))
      wishes.push(["rows", { ...place, start: page * ROWS, stop: Math.min(length, (page + 1) * ROWS) }]);
  return wishes;
}

/**
 * What is chosen and every word in view, in the shown head; in the other heads of a short text as far as they are few.
 */
function choices(context: Context, { rows, keys }: Seen, others: readonly Place[]): Choice[] {
  const { call, head, axis, tokens } = context.store.get(), out: Choice[] = [],
    chosen: Choice[] = tokens.length ? [{ call, head, axis, tokens: [...tokens] }] : [];
  for (const axis of sameTokens(context.call()) ? (["row"] as const) : (["row", "key"] as const)) {
    const [start, stop] = axis === "row" ? rows : keys,
      all = tokensFrom(start, stop).map((first) => ({ first, end: first + 1 }));
    const words = context.side(axis).named ? context.wordsOf(axis).between(start, stop) : all;
    if (all.length <= MOST_TOKENS)
      for (const { first, end } of words) out.push({ call, head, axis, tokens: tokensFrom(first, end) });
  }
  const elsewhere = out.length * others.length <= MOST_CHOICES ? [...chosen, ...out] : chosen;
  return [...chosen, ...out, ...others.flatMap(({ call, head }) => elsewhere.map((one) => ({ ...one, call, head })))];
}

/** Asks what the text panel asks when these tokens are chosen; the text around the view is shaded, too. */
async function choose(context: Context, choice: Choice, { rows, keys }: Seen): Promise<Shares> {
  const state = { ...context.store.get(), ...choice };
  const chosen = { ...context, store: { ...context.store, get: () => state } }, lines = makeLines(chosen),
    shares = await sharesOf(chosen, lines);
  const near = pagesOf(Math.max(0, Math.min(rows[0], keys[0]) - BLOCK), Math.max(rows[1], keys[1]) + BLOCK,
    BLOCK).slice(0, 8);
  for (const direction of shares.directions)
    for (const block of near)
      if (block * BLOCK < lengthOf(context, ALONG[direction])) await lines.load(direction, block);
  return shares;
}

function base64(bytes: ArrayBuffer): string {
  let text = "";
  for (let at = 0; at < bytes.byteLength; at += 0x6000)
    text += String.fromCharCode(...new Uint8Array(bytes.slice(at, at + 0x6000)));
  return btoa(text);
}

/** What answers the requests of a saved page: `told` hears how far it is. */
export async function record(context: Context, seen: Seen, told: (done: number, all: number) => void,
  signal: AbortSignal): Promise<Record<string, string>> {
  const table: Record<string, string> = {}, { store, transport, manifest } = context,
    { run, call, head, item, compare } = store.get();
  const request: Transport["request"] = async (op, params) => {
    const reply = await transport.request(op, params, signal);
    if (typeof reply.header["error"] === "string") throw new RequestError(reply.header["error"]);
    if (op === "open") reply.header = {
      ...reply.header, runs: manifest.runs.filter(({ id }) => id === run || id === compare?.run),
        shown: { run, call, head, item }, findings: [], step: false,
    };
    if (op === "tile") reply.header["final"] = true;
    // Exact tiles answer requests for quick ones.
    table[recordedKey(op, op === "tile" ? { ...params, exact: false } : params)] = base64(encodeFrame(reply));
    return reply;
  };
  const pages = new Set<string>();
  const words = async (axis: Axis, token: number): Promise<void> => {
    const { id, named, tokens } = context.side(axis), start = Math.floor(token / PAGE) * PAGE, key = `${start} ${id}`;
    if (!named || pages.has(key) || pages.size >= MOST_PAGES) return;
    pages.add(key);
    await request("words", { run, side: id, start, stop: Math.min(tokens, start + PAGE) });
  };
  for (const [axis, [start, stop]] of [["row", seen.rows], ["key", seen.keys]] as const) {
    for (const page of [0, ...pagesOf(start, stop, PAGE)]) await words(axis, page * PAGE);
    if (stop - start <= MOST_TOKENS) await context.wordsOf(axis).need(start, stop);
  }
  const asking: Context = { ...context, ask: (op, params) => ask({ kind: transport.kind, request }, op, params) },
    others = otherHeads(context);
  const jobs: (() => Promise<unknown>)[] = [
    ...wishesOf(context, seen, others).map(([op, params]) => () => request(op, params)),
    ...choices(context, seen, others).map((one) => async () => {
      const shares = await choose(asking, one, seen);
      for (const direction of shares.directions)
        for (const { first } of shares[direction]) await words(ALONG[direction], first);
    }),
  ];
  let done = 0;
  await inTurn(jobs, async (job) => {
    await job();
    if (++done % 16 === 0) told(done, jobs.length);
  }, signal);
  return table;
}
