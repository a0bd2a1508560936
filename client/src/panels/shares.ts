// The largest weights of what is chosen, as words.
import type { Context } from "../context";
import { ALONG, BLOCK, directionsOf, lengthOf, type Direction, type Lines } from "./lines";
import { tokensFrom } from "../parts";
import type { Share } from "./reading";
import { pagesOf } from "./virtual";

export interface WordShare extends Share { first: number; end: number }
export interface Shares {
  from: WordShare[];
  by: WordShare[];
  entropy: number | null;
  received: number | null;
  directions: Direction[];
}

const MOST = 12;
/** Up to here all words are summed; of a longer text those that hold the largest tokens. */
const WHOLE = 2 * BLOCK;

async function largest(context: Context, lines: Lines, direction: Direction): Promise<[WordShare[], number | null,
  number | null]> {
  const words = context.wordsOf(ALONG[direction]), length = lengthOf(context, ALONG[direction]);
  const { top, total, entropy } = await lines.load(direction, 0);
  const tokens = length > WHOLE ? top.map(([token]) => token) : tokensFrom(0, length);
  await Promise.allSettled(tokens.map((token) =>
    words.need(token, token + 1))); // without its word, a token has its number
  const spans = new Map<number, WordShare>(), weights = new Map(top);
  for (const token of tokens) {
    const word = words.at(token), first = word?.first ?? token;
    const share = spans.get(first) ?? { word: word?.label ?? words.name(token), first, end: word?.end ?? token + 1,
      weight: 0 };
    share.weight += weights.get(token) ?? 0;
    spans.set(first, share);
  }
  let shares = [...spans.values()];
  if (length > WHOLE) shares = shares.sort((a, b) => b.weight - a.weight).slice(0, MOST + 4);
  const parts = shares.filter((share) => length <= WHOLE || share.end - share.first > 1);
  const blocks = new Set(parts.flatMap((share) => pagesOf(share.first, share.end, BLOCK)));
  await Promise.all([...blocks].map((block) => lines.load(direction, block)));
  for (const share of parts) share.weight = lines.ofWord(direction, share);
  return [shares.filter((s) => s.weight > 0).sort((a, b) => b.weight - a.weight || a.first - b.first).slice(0, MOST),
    total, entropy];
}

/** What the chosen words look at and what looks at them, largest first; the exact weights of whole words. */
export async function sharesOf(context: Context, lines: Lines): Promise<Shares> {
  const directions = directionsOf(context);
  const out: Shares = { from: [], by: [], entropy: null, received: null, directions };
  await Promise.all(directions.map(async (direction) => {
    const [shares, total, entropy] = await largest(context, lines, direction);
    out[direction] = shares;
    if (direction === "from") out.entropy = entropy;
    else out.received = total;
  }));
  return out;
}

/** The words that the chosen tokens belong to, in order. */
export async function chosenWords(context: Context,
  most = 200): Promise<{ word: string; first: number; end: number }[]> {
  const { tokens, axis } = context.store.get(), words = context.wordsOf(axis);
  const out: { word: string; first: number; end: number }[] = [];
  const some = tokens.slice(0, most);
  await Promise.all(some.map((token) => words.need(token, token + 1)));
  for (const token of some) {
    const word = words.at(token);
    if (out.length && token < out[out.length - 1].end) continue;
    out.push({ word: word?.label ?? words.name(token), first: word?.first ?? token, end: word?.end ?? token + 1 });
  }
  return out;
}
