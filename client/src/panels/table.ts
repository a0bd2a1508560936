// A table of any number of rows: only those in view are made; headings sort.
import { h } from "../dom";
import { rowsInView } from "./virtual";

export interface Column {
  id: string;
  title: string;
  hint?: string;
  /** The first column is the heading of its row. */
  text(row: number): string;
  /** Whether its cells are words, which stand at the left. */
  words?: boolean;
  /** The order in which the first press sorts. */
  falling?: boolean;
}

export interface TableOptions {
  label: string;
  columns: readonly Column[];
  /** Sorts by a column; null: the usual order. Returns the rows to show, in order. */
  sort(column: string | null, falling: boolean): readonly number[];
  choose(row: number): void;
  chosen(row: number): boolean;
  /** Told of the places [first, end) that are in view. */
  seen?(first: number, end: number): void;
}

const HEIGHT = 30;

export class Table {
  readonly el: HTMLElement;
  readonly #body = h("tbody", {});
  readonly #heads: HTMLTableCellElement[];
  readonly #table: HTMLTableElement;
  #order: readonly number[] = [];
  #by: { column: string; falling: boolean } | null = null;
  #active = 0;
  #frame = 0;

  readonly #options: TableOptions;

  constructor(options: TableOptions) {
    this.#options = options;

    this.#heads = options.columns.map((column) => h("th", { scope: "col", "data-column": column.id, class: column.words && "word" },
      h("button", { type: "button", title: column.hint, onclick: () => this.#press(column) }, column.title,
        h("span", { class: "sorted", "aria-hidden": "true" }))));
    this.#table = h("table", { "aria-label": options.label }, h("thead", {}, h("tr", {}, ...this.#heads)), this.#body);
    this.el = h("div", { class: "rows", tabindex: -1 }, this.#table);
    this.el.addEventListener("scroll", () => {
      this.#frame ||= requestAnimationFrame(() => {
        this.#frame = 0;
        this.paint();
      });
    });
    this.#body.addEventListener("click", (event) => {
      const row = (event.target as Element).closest<HTMLElement>("tr[data-row]");
      if (row) this.#choose(Number(row.dataset["place"]), false);
    });
    this.#body.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Sorts again and shows what there is. */
  refresh(): void {
    this.#order = this.#options.sort(this.#by?.column ?? null, this.#by?.falling ?? false);
    this.#active = Math.min(this.#active, Math.max(0, this.#order.length - 1));
    this.#table.setAttribute("aria-rowcount", String(this.#order.length + 1));
    for (const head of this.#heads) {
      const falling = this.#by?.column === head.dataset["column"] ? this.#by!.falling : null;
      head.setAttribute("aria-sort", falling === null ? "none" : falling ? "descending" : "ascending");
      head.querySelector(".sorted")!.textContent = falling === null ? "" : falling ? " ↓" : " ↑";
    }
    this.paint();
  }

  /** Whether a column is sorted by. */
  get sorted(): boolean {
    return this.#by !== null;
  }

  /** Brings a row into view. */
  show(row: number): void {
    const place = this.#order.indexOf(row);
    if (place < 0) return;
    this.#active = place;
    const top = place * HEIGHT, room = this.el.clientHeight - HEIGHT;
    if (top < this.el.scrollTop || top + HEIGHT > this.el.scrollTop + room) this.el.scrollTop = top - room / 2;
    this.paint();
  }

  paint(): void {
    const { columns } = this.#options, window = rowsInView(this.#order.length, HEIGHT, this.el.scrollTop, this.el.clientHeight || 600);
    const held = this.#body.contains((this.el.getRootNode() as ShadowRoot).activeElement);
    const spacer = (height: number): HTMLElement => h("tr", { "aria-hidden": "true" }, h("td", { colspan: columns.length, style: `height: ${height}px; padding: 0; border: 0` }));
    const rows: HTMLElement[] = [];
    if (window.before) rows.push(spacer(window.before));
    for (let place = window.first; place < window.end; place++) rows.push(this.#row(place));
    if (window.after) rows.push(spacer(window.after));
    this.#body.replaceChildren(...rows);
    if (held) this.#focus();
    this.#options.seen?.(window.first, window.end);
  }

  #row(place: number): HTMLElement {
    const { columns, chosen } = this.#options, row = this.#order[place];
    const cells = columns.map(({ text, words }, i) => (i === 0
      ? h("th", { scope: "row" }, h("button", { type: "button", tabindex: place === this.#active ? 0 : -1 }, h("bdi", {}, text(row))))
      : h("td", { class: words && "word" }, h("bdi", {}, text(row)))));
    return h("tr", { "data-row": row, "data-place": place, "aria-rowindex": place + 2, "aria-current": chosen(row) ? "true" : null }, ...cells);
  }

  #press({ id, falling = true }: Column): void {
    if (this.#by?.column !== id) this.#by = { column: id, falling };
    else if (this.#by.falling === falling) this.#by = { column: id, falling: !falling };
    else this.#by = null;
    this.#active = 0;
    this.el.scrollTop = 0;
    this.refresh();
  }

  #choose(place: number, focus: boolean): void {
    this.#active = place;
    this.#options.choose(this.#order[place]);
    this.paint();
    if (focus) this.#focus();
  }

  #focus(): void {
    this.#body.querySelector<HTMLElement>(`tr[data-place="${this.#active}"] button`)?.focus({ preventScroll: true });
  }

  #key(event: KeyboardEvent): void {
    const page = Math.max(1, Math.floor(this.el.clientHeight / HEIGHT) - 2);
    const by = ({ ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -this.#order.length, End: this.#order.length } as Record<string, number>)[event.key];
    if (by === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(this.#order.length - 1, this.#active + by));
    this.#active = place;
    const top = place * HEIGHT, room = this.el.clientHeight - 2 * HEIGHT;
    if (top < this.el.scrollTop) this.el.scrollTop = top;
    else if (top > this.el.scrollTop + room) this.el.scrollTop = top - room;
    this.paint();
    this.#focus();
  }
}
