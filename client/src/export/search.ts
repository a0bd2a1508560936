// The search of a saved page: among the words that it holds, as Python searches the whole text.
import type { Protocol, WordTuple } from "../protocol";

const AROUND = 32; // characters on each side that a place is shown with

type Found = Protocol["search"]["header"];

/** Letter by letter, as some change their length ("İ"), and places are those of the text. */
const folded = (text: string): string => text.replace(/[^]/g, (c) => (c.toLowerCase()[1] ? c : c.toLowerCase()));

/** Where `query` stands in words that come by pages, in order; `covered`: how many tokens these words have. */
export function searchWords(pages: readonly (readonly WordTuple[])[], query: string, limit: number): Found {
  const words = [...new Map(pages.flat().map((word) => [word[2], word])).values()].sort((a, b) => a[2] - b[2]);
  const starts: number[] = [], stops: number[] = [], found: Found["found"] = [];
  let text = "", covered = 0, total = 0, from = 0, to = 0;
  words.forEach(([word, , first, end, special, gap], i) => {
    if (i) text += words[i - 1][3] === first ? gap : "\0"; // no place reaches over what is not here
    starts.push(text.length);
    if (!special) text += word;
    stops.push(text.length);
    covered += end - first;
  });
  const lower = folded(text), wanted = folded(query);
  for (let at = 0; wanted && (at = lower.indexOf(wanted, at)) >= 0; at += wanted.length) {
    const stop = at + wanted.length;
    while (stops[from] <= at && from + 1 < words.length) from++;
    for (to = Math.max(from, to); starts[to + 1] < stop;) to++;
    if (++total <= limit) found.push([from, words[from][2], words[to][3], text.slice(Math.max(0, at - AROUND), at),
      text.slice(at, stop), text.slice(stop, stop + AROUND)]);
  }
  return { total, found, covered };
}
