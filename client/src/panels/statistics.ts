// Numbers of all heads of the run, and of all rows of the shown head.
import type { Axis, Context, Panel } from "../context";
import { h, press, toggles } from "../dom";
import { goTo } from "../map/controls";
import { byId, type HeadSummary } from "../protocol";
import { CHOICE, decimal, headName, headNumber, overviewOf, STATISTICS, live, together, type Statistic } from "./data";
import { commas } from "../parts";
import { lengthOf, placeOf } from "./lines";
import { short } from "./reading";
import { askReceived, MOST_SORTED, RowNumbers, ROWS } from "./rows";
import { sortedPlaces, type Value } from "./sorting";
import { makeTable, type Column, type Table } from "./table";
import { pagesOf } from "./virtual";

interface Part { el: HTMLElement; load(): Promise<void> }

function headPart(context: Context): Part {
  let heads: HeadSummary[] = [];
  const note = h("p", "quiet");
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
    el: h("div", "fills", note, table.el),
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

/** The rows of the shown head, or what its keys receive. */
function tokenPart(context: Context, axis: Axis): Part {
  const isRow = axis === "row", title = isRow ? "Row" : "Key";
  let numbers = new RowNumbers(0, () => Promise.reject()), place = "", table: Table | null = null, loading: RowNumbers | null = null;
  const el = h("div", "fills"), note = h("p", "quiet"), said = h("p", { class: "unseen",
    "aria-live": "polite" });

  const text = (row: number, name: string): string => {
    const number = numbers.value(row, name);
    if (!numbers.has(row)) return "…";
    if (Number.isNaN(number)) return "–";
    return name === AT[0] ? context.wordsOf("key").name(number) : ["entropy", "received", "distance"].includes(name)
      ? decimal(number) : short(number);
  };
  const tell = (): void => {
    const { length, here } = numbers, all = commas(length);
    note.textContent = !numbers.names.length ? "Of a map this long it is not known what keys receive." : `${title}s of ${headName(context.run(), context.call(), context.store.get().head)}, exact; `
      + (here >= length ? `all ${all}.`
      : loading === numbers ? `loading all to sort them: ${commas(here)} of ${all}.`
      : table?.sorted() ? `sorted among the ${commas(here)} of ${all} that are here${
        length > MOST_SORTED ? `: more than ${commas(MOST_SORTED)} are not sorted` : ""}.`
      : `${all}, loaded as they come into view.`);
  };
  /** What is sorted is sorted among all rows: those that are not here are loaded first. */
  const complete = async (): Promise<void> => {
    const mine = numbers, wanted = (): boolean => mine === numbers && table!.sorted() && el.isConnected;
    if (loading === mine || mine.here >= mine.length || mine.length > MOST_SORTED || !wanted()) return;
    loading = mine;
    tell();
    try {
      await mine.loadAll(wanted, tell);
    } catch (error) {
      if (context.transport.kind !== "recorded") context.fail(error); // a saved page has a part of the rows
    }
    if (mine !== numbers) return;
    loading = null;
    table!.refresh();
    if (table!.sorted()) said.textContent = note.textContent;
  };
  const seen = (first: number, end: number): void => {
    tell();
    const missing = table?.sorted() ? [] : pagesOf(first, end, ROWS).filter((page) => !numbers.has(page * ROWS));
    if (missing.length) Promise.all(missing.map((page) => numbers.load(page))).then(() => table?.paint(), context.fail);
  };
  const make = (): Table => makeTable({
    label: title + "s", sort: (column, falling) => numbers.order(column, falling), seen,
    pressed: () => void complete(),
    columns: [
      { id: "row", title, words: true,
        text: (row) => `${row} ${context.wordsOf(axis).at(row) ? context.wordsOf(axis).name(row) : ""}` },
      ...numbers.names.map((name): Column => {
        const [, title, hint] = [...STATISTICS, AT, RECEIVED].find(([id]) => id === name) ?? [name, name];
        return { id: name, title, hint, words: name === AT[0], text: (row) => text(row, name) };
      }),
    ],
    choose(row) {
      const at = numbers.value(row, AT[0]);
      context.choose(axis, [row]);
      context.reveal(isRow ? row : null, isRow ? at >= 0 ? at : null : row);
    },
    chosen: (row) => context.store.get().axis === axis && context.store.get().tokens.includes(row),
  });
  return {
    el,
    async load() {
      const where = placeOf(context), wanted = JSON.stringify(where);
      if (wanted !== place) {
        place = wanted;
        table = null;
        const words = context.wordsOf(axis), mine = (numbers = new RowNumbers(lengthOf(context, axis),
          async (start, stop) => {
            const params = { ...where, start, stop };
            const answer = await (isRow ? context.ask("rows", params) : askReceived(context.transport, params));
            await words.need(start, stop);
            return answer;
          }));
        await mine.load(0).catch((error: unknown) => {
          if (mine === numbers) place = "";
          throw error;
        });
        if (mine !== numbers) return;
        table = make();
        el.replaceChildren(note, said, table.el);
      }
      const state = context.store.get();
      table?.refresh();
      if (state.axis === axis && state.tokens.length) table?.show(state.tokens[0]);
    },
  };
}

export const statistics: Panel = {
  id: "statistics", title: "Numbers", place: "right",
  mount(el, context) {
    const parts: Record<string, Part> = { heads: headPart(context), rows: tokenPart(context, "row"),
      keys: tokenPart(context, "key") };
    let shown = "heads";
    const choose = toggles("Numbers of", [["heads", "Heads"], ["rows", "Rows"], ["keys", "Keys"]], shown, (value) => {
      shown = value;
      ask();
    }), keys = choose.lastElementChild!;
    el.classList.add("fills");
    el.append(h("div", {}, choose), ...Object.values(parts).map((part) => part.el));
    const [ask, end] = live(el, context, CHOICE, () => {
      if (!together(context.call())) choose.append(keys);
      else {
        keys.remove();
        if (shown === "keys") shown = "rows";
      }
      press(choose, shown);
      for (const name in parts) parts[name].el.hidden = name !== shown;
      return parts[shown].load();
    });
    return end;
  },
};
