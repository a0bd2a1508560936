// What stands under the cursor, in words: below the map for eyes, spoken for those who move by keys.
import type { Context } from "../context";
import { h } from "../dom";
import { commas, partNodes, plain, type Part } from "../parts";
import type { Protocol } from "../protocol";
import { valueAt, type Pane } from "./pane";
import { write } from "./scale";
import type { Cell } from "./viewport";

type CellHeader = Protocol["cell"]["header"];
/** The number of the same cell in another map, and what that map is called. */
export interface Other {
  value: number;
  name: string;
}

const WAIT = 120; // milliseconds the cursor rests before ranks are asked for

const WHAT = { weights: "weight", logits: "logit", bias: "bias" } as const;

/** A bin's tokens [first, end) on one axis, in words. */
function span(words: Pane["rowWords"], first: number, end: number): Part[] {
  if (end - first === 1) return words.at(first) ? [{ word: words.name(first) }, ` (${first})`] : [`token ${first}`];
  const range = `${first}–${end - 1}`;
  if (!words.at(first) || !words.at(end - 1)) return [range];
  return [`${range} (`, { word: words.name(first) }, " … ", { word: words.name(end - 1) }, ")"];
}

const pooled = (pane: Pane): string => {
  const size = 2 ** pane.level, pairs = `${size} × ${size} pairs`;
  return `${pane.map.pool === "max" ? "largest" : "mean"} of ${pairs}`;
};

/** The sentence for a cell. `exact` is Python's answer for a single pair; `other` the number in the compared map. */
export function describe(pane: Pane, cell: Cell, exact: CellHeader | null, other: Other | null): Part[] {
  const size = 2 ** pane.level, row = Math.floor(cell.row / size) * size, key = Math.floor(cell.key / size) * size;
  const parts: Part[] = [size > 1 ? "Rows " : "Row ", ...span(pane.rowWords, row, Math.min(pane.view.rows, row + size)),
    size > 1 ? " on keys " : " on key ", ...span(pane.keyWords, key, Math.min(pane.view.keys, key + size)), ": "];
  const here = valueAt(pane, cell.row, cell.key), what = WHAT[pane.map.what];
  const hidden = exact ? !exact.visible : here ? Number.isNaN(here.value)
    : pane.call.causal && key > row + size - 1 + pane.call.rows.placed;
  if (hidden) return [...parts, `hidden by ${pane.call.mask ?? "the mask"}`];
  const number = exact && size === 1 ? exact[what === "weight" ? "weight" : what] : here?.value;
  if (number === undefined || number === null) return [...parts, "computing"];
  parts.push(`${what} `, { number: write(number) });
  if (size > 1) parts.push(`, ${pooled(pane)}`, here?.sampled ? ", from a sample of rows" : "");
  if (exact && size === 1) {
    if (exact.rank !== null) parts.push(`, rank ${exact.rank} of ${exact.seen}`);
    if (what === "weight" && exact.logit !== null) parts.push(`; logit ${write(exact.logit)}`);
    if (exact.bias !== null && what !== "bias" && exact.product !== null)
      parts.push(` = ${write(exact.product)} and bias ${write(exact.bias)}`);
  }
  if (other)
    parts.push(`; ${other.name}: `, { number: write(other.value) }, `, difference ${write(number - other.value)}`);
  return parts;
}

/** The line below the map. */
export class Reading {
  readonly element = h("p", { class: "reading", id: "reading" });
  readonly #context: Context;
  readonly #complain: (error: unknown) => void;
  #timer = 0;
  #request: AbortController | null = null;
  #asked = "";
  #exact: { key: string; header: CellHeader } | null = null;
  #said = "";
  #shown = "";

  constructor(context: Context, complain: (error: unknown) => void) {
    this.#context = context;
    this.#complain = complain;
  }

  /** Shows a cell, or `note` or the whole where there is none; `speak` says it to screen readers as well. */
  show(
    pane: Pane, cell: Cell | null, other: (cell: Cell) => Other | null, speak: boolean, note: string | null,
  ): void {
    if (!cell) {
      this.drop();
      this.#fill(note ? [note] : overall(pane));
      return;
    }
    const { run, call, head, item } = pane.map, params = { run, call, head, item, row: cell.row, key: cell.key };
    const key = JSON.stringify(params), known = this.#exact?.key === key ? this.#exact.header : null;
    const parts = describe(pane, cell, pane.level ? null : known, other(cell)), done = known !== null || pane.level > 0;
    this.#fill(parts);
    if (speak && done && plain(parts) !== this.#said) this.#context.announce((this.#said = plain(parts)));
    if (done || this.#asked === key) return;
    this.drop();
    this.#asked = key;
    this.#timer = setTimeout(() => {
      const request = (this.#request = new AbortController());
      this.#context.ask("cell", params, request.signal).then((header) => {
        this.#exact = { key, header };
        this.show(pane, cell, other, speak, note);
      }, (error: unknown) => {
        if (!request.signal.aborted) this.#complain(error);
      });
    }, WAIT);
  }

  drop(): void {
    clearTimeout(this.#timer);
    this.#request?.abort();
    this.#request = null;
    this.#asked = "";
  }

  #fill(parts: readonly Part[]): void {
    if (plain(parts) === this.#shown) return;
    this.#shown = plain(parts);
    this.element.replaceChildren(...partNodes(parts));
  }
}

/** What the map is, where nothing is pointed at. */
function overall(pane: Pane): Part[] {
  const { rows, keys } = pane.view;
  const kind = pane.level ? `each dot is the ${pooled(pane)}` : "each cell is one pair";
  return [`${commas(rows)} rows (queries) × ${commas(keys)} keys; ${kind}.`];
}
