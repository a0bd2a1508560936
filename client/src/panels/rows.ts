// Numbers of all rows of a head, by pages: as they come into view, or all of them so that they can be sorted.
import { tokensFrom } from "../parts";
import type { Answer, Place } from "../protocol";
import { RequestError, type Transport } from "../transport";
import { sortedPlaces } from "./sorting";

/** Rows of a request. */
export const ROWS = 1024;
/** Rows up to which all are loaded to be sorted: 9 float32 each. */
export const MOST_SORTED = 200_000;

/** Asks for the rows [start, stop). */
export type AskRows = (start: number, stop: number) => Promise<Pick<Answer<"rows">, "names" | "data">>;

/** What the keys [start, stop) receive from all rows, where keys are no rows; no names where it is not known. */
export async function askReceived(transport: Transport, params: Place & { start: number; stop: number }): ReturnType<AskRows> {
  const { header, buffers } = await transport.request("rows", params);
  if (header["error"]) throw new RequestError(String(header["error"]));
  return { names: header["received_keys"] ? ["received"] : [], data: new Float32Array(buffers[1] ?? 0) };
}

export class RowNumbers {
  readonly #pages = new Map<number, { data: Float32Array; count: number }>();
  readonly #ask: AskRows;
  /** Rows that are here, of `length`. */
  here = 0;
  names: string[] = [];

  constructor(readonly length: number, ask: AskRows) {
    this.#ask = ask;
  }

  has(row: number): boolean {
    return this.#pages.has(Math.floor(row / ROWS));
  }

  /** NaN where a row has none, or is not here. */
  value(row: number, name: string): number {
    const page = this.#pages.get(Math.floor(row / ROWS));
    return page ? page.data[this.names.indexOf(name) * page.count + (row % ROWS)] : NaN;
  }

  async load(page: number): Promise<void> {
    if (this.#pages.has(page)) return;
    const start = page * ROWS, stop = Math.min(this.length, start + ROWS), { names, data } = await this.#ask(start, stop);
    if (!this.#pages.has(page)) this.here += stop - start;
    this.names = names;
    this.#pages.set(page, { data, count: stop - start });
  }

  /** Loads all pages, one after the other, while `wanted`; `told` after each. Resolves to whether all are here. */
  async loadAll(wanted: () => boolean, told: () => void): Promise<boolean> {
    for (let page = 0; page * ROWS < this.length && this.length <= MOST_SORTED && wanted(); page++)
      if (!this.#pages.has(page)) {
        await this.load(page);
        told();
      }
    return this.here >= this.length;
  }

  /** All rows; sorted by a column those that are here. */
  order(column: string | null, falling: boolean): number[] {
    const rows = tokensFrom(0, this.length);
    if (column === null) return rows;
    const here = rows.filter((row) => this.has(row));
    return sortedPlaces(here.map((row) => (column === "row" ? row : this.value(row, column))), falling)
      .map((at) => here[at]);
  }
}
