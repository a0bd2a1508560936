// Numbers of all heads of the run, and of all rows of the shown head.
import type { Context, Panel } from "../context";
import { h, toggles } from "../dom";
import { goTo } from "../map/controls";
import type { HeadSummary } from "../protocol";
import { decimal, headName, headNumber, overviewOf, STATISTICS, whenShown } from "./data";
import { placeOf } from "./lines";
import { short } from "./reading";
import { sortedPlaces, type Value } from "./sorting";
import { Table, type Column } from "./table";
import { pagesOf } from "./virtual";

/** Rows of a request. */
export const ROWS = 1024;
const WHOLE: readonly string[] = ["largest_at"];
const ROW_TITLES: Record<string, [string, string]> = {
  entropy: ["Entropy", "In nats: 0 means that one key gets everything"],
  largest: ["Largest", "The largest weight of the row"],
  largest_at: ["At key", "The key with the largest weight"],
  distance: ["Distance", "How many tokens away the row looks, averaged by weight"],
  self: ["Self", "Weight on the token itself"],
  previous: ["Previous", "Weight on the token before"],
  first: ["First", "Weight on the first token"],
  sink: ["Sink", "Weight that the sink takes, which goes to no key"],
  received: ["Received", "Weight that the token gets from all rows, as a key"],
};

class HeadTable {
  #heads: HeadSummary[] = [];
  readonly table: Table;
  readonly note = h("p", { class: "quiet" });

  readonly #context: Context;

  constructor(context: Context) {
    this.#context = context;

    const cell = (at: number): HeadSummary => this.#heads[at];
    const columns: Column[] = [
      { id: "head", title: "Head", falling: false, text: (at) => headNumber(this.#callOf(at), cell(at).head) + (cell(at).alarms.length ? " !" : "") },
      { id: "role", title: "Role", falling: false, words: true, text: (at) => (cell(at).role ?? "–") + (cell(at).score === null ? "" : ` ${decimal(cell(at).score)}`),
        hint: "The role that was measured for this head, and its score above chance" },
      ...STATISTICS.map(([id, title, hint]): Column => ({ id, title, hint, text: (at) => (cell(at).sampled ? "≈" : "") + decimal(cell(at)[id], id === "distance" ? 1 : 2) })),
    ];
    this.table = new Table({
      label: "Heads", columns,
      sort: (column, falling) => sortedPlaces(this.#heads.map((about, at): Value => column === null || column === "head" ? at
        : column === "role" ? about.role : about[column as (typeof STATISTICS)[number][0]]), falling),
      choose: (at) => goTo(context, this.#heads[at].call, this.#heads[at].head),
      chosen: (at) => this.#heads[at].call === context.store.get().call && this.#heads[at].head === context.store.get().head,
    });
  }

  #callOf(at: number) {
    return this.#context.run().calls.find((call) => call.id === this.#heads[at].call)!;
  }

  async load(): Promise<void> {
    const { run, item } = this.#context.store.get();
    this.#heads = (await overviewOf(this.#context, run, item)).heads;
    const sampled = this.#heads.filter((about) => about.sampled);
    this.note.textContent = sampled.length
      ? `≈ marks numbers from a sample of ${Math.min(...sampled.map((about) => about.sampled)).toLocaleString("en")} rows; the others are exact.` : "All numbers are exact.";
    this.table.refresh();
  }
}

class RowTable {
  #pages = new Map<number, { data: Float32Array; count: number }>();
  #names: string[] = [];
  #place = "";
  #table: Table | null = null;
  #failed = false;
  #sweeping = false;
  readonly el = h("div", { class: "fills" });
  readonly note = h("p", { class: "quiet" });

  readonly #context: Context;

  constructor(context: Context) {
    this.#context = context;
  }

  #value(row: number, name: string): number {
    const page = this.#pages.get(Math.floor(row / ROWS));
    return page ? page.data[this.#names.indexOf(name) * page.count + (row % ROWS)] : NaN;
  }

  #text(row: number, name: string): string {
    if (!this.#pages.has(Math.floor(row / ROWS))) return "…";
    const value = this.#value(row, name);
    if (Number.isNaN(value)) return "–";
    if (WHOLE.includes(name)) return this.#context.wordsOf("key").name(value);
    return name === "entropy" || name === "received" ? value.toFixed(2) : name === "distance" ? value.toFixed(1) : short(value);
  }

  async #page(page: number): Promise<void> {
    const place = this.#place, length = this.#context.call().rows.length, start = page * ROWS, stop = Math.min(length, start + ROWS);
    if (this.#pages.has(page)) return;
    const { names, data } = await this.#context.ask("rows", { ...placeOf(this.#context), start, stop });
    if (place !== this.#place) return;
    this.#names = names;
    this.#pages.set(page, { data, count: stop - start });
    await this.#context.wordsOf("row").need(start, stop);
  }

  async load(): Promise<void> {
    const place = JSON.stringify(placeOf(this.#context));
    if (place !== this.#place) {
      this.#place = place;
      this.#pages = new Map();
      this.#table = null;
      this.#failed = false;
      await this.#page(0);
      if (place !== this.#place) return;
      this.#table = this.#make();
      this.el.replaceChildren(this.#table.el);
    }
    this.#table?.refresh();
    this.#tell();
    const { axis, tokens } = this.#context.store.get();
    if (axis === "row" && tokens.length) this.#table?.show(tokens[0]);
  }

  #make(): Table {
    const context = this.#context, words = context.wordsOf("row");
    const columns: Column[] = [
      { id: "row", title: "Row", falling: false, text: (row) => `${row} ${words.at(row) ? words.name(row) : ""}` },
      ...this.#names.map((name): Column => ({ id: name, title: ROW_TITLES[name]?.[0] ?? name, hint: ROW_TITLES[name]?.[1] ?? "", words: WHOLE.includes(name), text: (row) => this.#text(row, name) })),
    ];
    return new Table({
      label: "Rows", columns,
      sort: (column, falling) => this.#sorted(column, falling),
      choose: (row) => {
        context.choose("row", [row]);
        const at = this.#value(row, "largest_at");
        context.reveal(row, Number.isNaN(at) ? null : at);
      },
      chosen: (row) => context.store.get().axis === "row" && context.store.get().tokens.includes(row),
      seen: (first, end) => this.#seen(first, end),
    });
  }

  /** Unsorted all rows; sorted those that are loaded. */
  #sorted(column: string | null, falling: boolean): number[] {
    const length = this.#context.call().rows.length;
    this.#tell(column !== null);
    if (column === null) return Array.from({ length }, (_, row) => row);
    const rows = [...this.#pages.keys()].sort((a, b) => a - b)
      .flatMap((page) => Array.from({ length: this.#pages.get(page)!.count }, (_, i) => page * ROWS + i));
    return sortedPlaces(rows.map((row): Value => (column === "row" ? row : this.#value(row, column))), falling).map((at) => rows[at]);
  }

  #tell(sorted = this.#table?.sorted ?? false): void {
    const all = this.#context.call().rows.length, here = [...this.#pages.values()].reduce((sum, { count }) => sum + count, 0);
    const total = all.toLocaleString("en");
    if (here >= all) this.note.replaceChildren(`All ${total} rows, exact.`);
    else if (!sorted) this.note.replaceChildren(`${total} rows, exact; they load as they come into view.`);
    else this.note.replaceChildren(`Sorted among ${here.toLocaleString("en")} of ${total} rows, those loaded so far. `,
      h("button", { type: "button", disabled: this.#sweeping, onclick: () => void this.#sweep() }, this.#sweeping ? "Loading…" : "Load all"));
  }

  async #sweep(): Promise<void> {
    const place = this.#place, pages = Math.ceil(this.#context.call().rows.length / ROWS);
    this.#sweeping = true;
    try {
      for (let page = 0; page < pages && place === this.#place; page++) {
        await this.#page(page);
        if (page % 8 === 7) this.#tell();
      }
    } catch (error) {
      this.#context.fail(error);
    }
    this.#sweeping = false;
    this.#table?.refresh();
  }

  #seen(first: number, end: number): void {
    if (!this.#table || this.#table.sorted || this.#failed) return;
    const missing = pagesOf(first, end, ROWS).filter((page) => !this.#pages.has(page));
    if (missing.length)
      Promise.all(missing.map((page) => this.#page(page))).then(() => {
        this.#table?.paint();
        this.#tell();
      }, (error: unknown) => {
        this.#failed = true;
        this.#context.fail(error);
      });
  }
}

export const statistics: Panel = {
  id: "statistics", title: "Numbers", place: "right",
  mount(el, context) {
    const heads = new HeadTable(context), rows = new RowTable(context);
    let shown = "heads";
    const title = h("h2", {});
    const choose = toggles("Numbers of", [["heads", "Heads"], ["rows", "Rows"]], shown, (value) => {
      shown = value;
      for (const button of choose.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset["value"] === value));
      ask();
    });
    const headPart = h("div", { class: "fills" }, heads.note, heads.table.el), rowPart = h("div", { class: "fills" }, rows.note, rows.el);
    el.append(h("div", { class: "tools" }, choose), title, headPart, rowPart);
    const refresh = async (): Promise<void> => {
      headPart.hidden = shown !== "heads";
      rowPart.hidden = shown !== "rows";
      const name = headName(context.run(), context.call(), context.store.get().head);
      title.textContent = shown === "heads" ? "Averages over the rows of each head" : `Rows of ${name}`;
      await (shown === "heads" ? heads : rows).load().catch((error: unknown) => context.fail(error));
    };
    const [ask, end] = whenShown(el, () => void refresh());
    const ends = [context.store.subscribe(ask, ["run", "call", "head", "item", "axis", "tokens", "panel"])];
    ask();
    return () => {
      end();
      ends.forEach((one) => one());
    };
  },
};
