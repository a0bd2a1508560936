// A table of any number of rows: only those in view are made; headings sort.
import { h, on } from "../dom";
import { activeIn } from "./data";
import { rowsInView } from "./virtual";

export interface Column {
  id: string;
  title: string;
  hint?: string | undefined;
  /** The first column is the heading of its row. */
  text(row: number): string;
  /** Whether its cells are words, which stand at the left and sort from A to Z. */
  words?: boolean;
}

export interface TableOptions {
  label: string;
  columns: readonly Column[];
  /** The rows to show, in order: sorted by a column, or as they are for null. */
  sort(column: string | null, falling: boolean): readonly number[];
  choose(row: number): void;
  chosen(row: number): boolean;
  /** Told that a heading was pressed. */
  pressed?(): void;
  /** Told of the rows at the places [first, end) that are in view. */
  seen?(first: number, end: number): void;
}

export interface Table {
  el: HTMLElement;
  /** Sorts again and shows what there is. */
  refresh(): void;
  paint(): void;
  /** Brings a row into view. */
  show(row: number): void;
  /** Whether it is sorted by a column. */
  sorted(): boolean;
}

const HEIGHT = 30;

export function makeTable({ label, columns, sort, choose, chosen, seen, pressed }: TableOptions): Table {
  let order: readonly number[] = [], by: { id: string; falling: boolean } | null = null, active = 0, frame = 0;
  const heads = columns.map((column) => h("th",
    { scope: "col", "data-column": column.id, class: column.words && "word" },
    h("button", { title: column.hint, onclick: () => press(column) }, column.title)));
  const body = h("tbody", {}), table = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...heads)), body);
  const el = h("div", { class: "rows", tabindex: -1, onscroll: () => (frame ||= requestAnimationFrame(paint)) }, table);

  const spacer = (height: number): HTMLElement =>
    h("tr", { "aria-hidden": "true" }, h("td", { colspan: columns.length, style: `height: ${height}px; border: 0` }));
  const made = (place: number): HTMLElement => {
    const row = order[place];
    return h("tr", { "data-row": row, "data-place": place, "aria-rowindex": place + 2,
      "aria-current": chosen(row) && "true" },
      ...columns.map(({ text, words }, i) => (i
        ? h("td", { class: words && "word" }, h("bdi", {}, text(row)))
        : h("th", { scope: "row" }, h("button", { tabindex: place === active ? 0 : -1 }, h("bdi", {}, text(row)))))));
  };
  const focus = (): void =>
    body.querySelector<HTMLElement>(`[data-place="${active}"] button`)?.focus({ preventScroll: true });
  const paint = (): void => {
    frame = 0;
    const { first, end, before, after } = rowsInView(order.length, HEIGHT, el.scrollTop, el.clientHeight || 600);
    const held = body.contains(activeIn(body));
    body.replaceChildren(...(before ? [spacer(before)] : []),
      ...order.slice(first, end).map((_, i) => made(first + i)), ...(after ? [spacer(after)] : []));
    if (held) focus();
    seen?.(first, end);
  };
  const refresh = (): void => {
    order = sort(by?.id ?? null, by?.falling ?? false);
    active = Math.min(active, Math.max(0, order.length - 1));
    table.setAttribute("aria-rowcount", String(order.length + 1));
    heads.forEach((head, i) => {
      const falling = by?.id === columns[i].id ? by.falling : null;
      head.setAttribute("aria-sort", falling === null ? "none" : falling ? "descending" : "ascending");
      head.firstElementChild!.textContent = columns[i].title + (falling === null ? "" : falling ? " ↓" : " ↑");
    });
    paint();
  };
  const press = ({ id, words = false }: Column): void => {
    by = by?.id !== id ? { id, falling: !words } : by.falling !== words ? { id, falling: words } : null;
    active = el.scrollTop = 0;
    refresh();
    pressed?.();
  };
  const bring = (place: number): void => {
    active = place;
    const top = place * HEIGHT, room = el.clientHeight - 2 * HEIGHT;
    if (top < el.scrollTop || top > el.scrollTop + room) el.scrollTop = top < el.scrollTop ? top : top - room;
    paint();
  };
  on(body, "click", ({ target }) => {
    const row = (target as Element).closest<HTMLElement>("[data-row]");
    if (!row) return;
    active = Number(row.dataset["place"]);
    choose(order[active]);
    paint();
  });
  on<KeyboardEvent>(body, "keydown", (event) => {
    const { key, altKey, ctrlKey, metaKey } = event, page = Math.max(1, Math.floor(el.clientHeight / HEIGHT) - 2),
      all = order.length;
    const by = ({ ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -all, End: all } as Record<string,
      number>)[key];
    if (by === undefined || altKey || ctrlKey || metaKey) return;
    event.preventDefault();
    bring(Math.max(0, Math.min(all - 1, active + by)));
    focus();
  });
  return {
    el, refresh, paint, sorted: () => by !== null,
    show(row) {
      const place = order.indexOf(row);
      if (place >= 0) bring(place);
    },
  };
}
