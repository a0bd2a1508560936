// Numbers of all heads of the run, and of all rows of the shown head.
import type { Context, Panel } from "../context";
import { h, press, toggles } from "../dom";
import { goTo } from "../map/controls";
import { byId, type HeadSummary } from "../protocol";
import { commas, decimal, headName, headNumber, overviewOf, STATISTICS, live, type Statistic } from "./data";
import { placeOf } from "./lines";
import { short } from "./reading";
import { sortedPlaces, type Value } from "./sorting";
import { makeTable, type Column, type Table } from "./table";
import { pagesOf } from "./virtual";

/** Rows of a request. */
export const ROWS = 1024;

interface Part { el: HTMLElement; load(): Promise<void> }

function headPart(context: Context): Part {
  let heads: HeadSummary[] = [];
  const note = h("p", { class: "quiet" });
  const columns: Column[] = [
    { id: "head", title: "Head", words: true,
      text: (at) => headNumber(byId(context.run().calls, heads[at].call)!, heads[at].head)
        + (heads[at].alarms.length ? " !" : "") },
    { id: "role", title: "Role", hint: "As measured, with its score above chance", words: true,
      text: (at) => (heads[at].role ?? "–") + (heads[at].score === null ? "" : ` ${decimal(heads[at].score)}`) },
    ...STATISTICS.map(([id, title, hint]): Column =>
      ({ id, title, hint, text: (at) => (heads[at].sampled ? "≈" : "") + decimal(heads[at][id]) })),
  ];
  const table = makeTable({
    label: "Heads", columns,
    sort: (column, falling) => sortedPlaces(heads.map((about, at): Value =>
      (!column || column === "head" ? at : about[column as Statistic | "role"])), falling),
    choose: (at) => goTo(context, heads[at].call, heads[at].head),
    chosen: (at) => heads[at].call === context.store.get().call && heads[at].head === context.store.get().head,
  });
  return {
    el: h("div", { class: "fills" }, note, table.el),
    async load() {
      const { run, item } = context.store.get();
      heads = (await overviewOf(context, run, item)).heads;
      const sampled = heads.filter((about) => about.sampled).map((about) => about.sampled);
      note.textContent = "Averages over the rows of each head"
        + (sampled.length ? `; ≈: from a sample of ${commas(Math.min(...sampled))} rows.` : ", exact.");
      table.refresh();
    },
  };
}

const RECEIVED = ["received", "Received", "Weight that the token gets from all rows, as a key"] as const;
const AT = ["largest_at", "At key", "The key with the largest weight"] as const;

function rowPart(context: Context): Part {
  let pages = new Map<number, { data: Float32Array; count: number }>(), names: string[] = [], place = "",
    table: Table | null = null;
  const el = h("div", { class: "fills" }), note = h("p", { class: "quiet" }),
    length = (): number => context.call().rows.length;

  const value = (row: number, name: string): number => {
    const page = pages.get(Math.floor(row / ROWS));
    return page ? page.data[names.indexOf(name) * page.count + (row % ROWS)] : NaN;
  };
  const text = (row: number, name: string): string => {
    const number = value(row, name);
    if (!pages.has(Math.floor(row / ROWS))) return "…";
    if (Number.isNaN(number)) return "–";
    return name === AT[0] ? context.wordsOf("key").name(number) : ["entropy", "received", "distance"].includes(name)
      ? decimal(number) : short(number);
  };
  const load = async (page: number): Promise<void> => {
    const asked = place, start = page * ROWS, stop = Math.min(length(), start + ROWS);
    if (pages.has(page)) return;
    const { names: given, data } = await context.ask("rows", { ...placeOf(context), start, stop });
    await context.wordsOf("row").need(start, stop);
    if (asked !== place) return;
    names = given;
    pages.set(page, { data, count: stop - start });
  };
  const loaded = (): number[] => [...pages].sort(([a], [b]) => a - b).flatMap(([page, { count }]) =>
    Array.from({ length: count }, (_, i) => page * ROWS + i));
  const tell = (): void => {
    const all = commas(length()), here = loaded().length;
    note.textContent = `Rows of ${headName(context.run(), context.call(), context.store.get().head)}, exact; `
      + (here >= length() ? `all ${all}.`
      : table?.sorted() ? `sorted among the ${commas(here)} of ${all} that are loaded.`
        : `${all}, loaded as they come into view.`);
  };
  /** Unsorted all rows; sorted those that are loaded. */
  const sort = (column: string | null, falling: boolean): number[] => {
    if (column === null) return Array.from({ length: length() }, (_, row) => row);
    const rows = loaded();
    return sortedPlaces(rows.map((row) => (column === "row" ? row : value(row, column))),
      falling).map((at) => rows[at]);
  };
  const seen = (first: number, end: number): void => {
    tell();
    const missing = pagesOf(first, end, ROWS).filter((page) => !pages.has(page));
    if (missing.length && !table?.sorted()) Promise.all(missing.map(load)).then(() => table?.paint(), context.fail);
  };
  const make = (): Table => makeTable({
    label: "Rows", sort, seen,
    columns: [
      { id: "row", title: "Row", words: true,
        text: (row) => `${row} ${context.wordsOf("row").at(row) ? context.wordsOf("row").name(row) : ""}` },
      ...names.map((name): Column => {
        const [, title, hint] = [...STATISTICS, AT, RECEIVED].find(([id]) => id === name) ?? [name, name];
        return { id: name, title, hint, words: name === AT[0], text: (row) => text(row, name) };
      }),
    ],
    choose(row) {
      const at = value(row, AT[0]);
      context.choose("row", [row]);
      context.reveal(row, Number.isNaN(at) ? null : at);
    },
    chosen: (row) => context.store.get().axis === "row" && context.store.get().tokens.includes(row),
  });
  return {
    el,
    async load() {
      const wanted = JSON.stringify(placeOf(context));
      if (wanted !== place) {
        place = wanted;
        pages = new Map();
        table = null;
        await load(0);
        if (wanted !== place) return;
        table = make();
        el.replaceChildren(note, table.el);
      }
      const { axis, tokens } = context.store.get();
      table?.refresh();
      if (axis === "row" && tokens.length) table?.show(tokens[0]);
    },
  };
}

export const statistics: Panel = {
  id: "statistics", title: "Numbers", place: "right",
  mount(el, context) {
    const parts: Record<string, Part> = { heads: headPart(context), rows: rowPart(context) };
    let shown = "heads";
    const choose = toggles("Numbers of", [["heads", "Heads"], ["rows", "Rows"]], shown, (value) => {
      shown = value;
      press(choose, value);
      ask();
    });
    el.classList.add("fills");
    el.append(h("div", {}, choose), parts["heads"].el, parts["rows"].el);
    const [ask, end] = live(el, context, ["run", "call", "head", "item", "axis", "tokens", "panel"], () => {
      for (const name in parts) parts[name].el.hidden = name !== shown;
      return parts[shown].load();
    });
    return end;
  },
};
