// A second head, of this run or of another one: beside the shown one, or as difference.
import type { Context, Panel } from "../context";
import { choice, h, toggles } from "../dom";
import type { Call, HeadSummary, Run } from "../protocol";
import type { Compare } from "../store";
import { decimal, headName, layerName, overviewOf, STATISTICS, whenShown } from "./data";

const upper = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);
export const runName = (run: Run): string => [run.model, run.text.slice(0, 40)].filter(Boolean).join(" · ");

/** Whether two maps can be subtracted: the same numbers of rows and keys. */
export const sameSize = (a: Call, b: Call): boolean => a.rows.length === b.rows.length && a.keys.length === b.keys.length;

class ComparePanel {
  readonly #form = h("div", { class: "tools stacked" });
  readonly #said = h("p", {});
  readonly #numbers = h("div", { class: "scrolls" });
  #picked: Omit<Compare, "mode">;

  readonly #context: Context;

  constructor(el: HTMLElement, context: Context) {
    this.#context = context;

    const { run, call, head } = context.store.get();
    this.#picked = { run, call, head: (head + 1) % Math.max(1, context.call().heads) };
    el.append(h("h2", {}, "Compare with a second head"), this.#form, this.#said, this.#numbers);
  }

  get #run(): Run {
    return this.#context.manifest.runs.find((run) => run.id === this.#picked.run) ?? this.#context.run();
  }

  get #call(): Call {
    return this.#run.calls.find((call) => call.id === this.#picked.call) ?? this.#run.calls[0];
  }

  #pick(patch: Partial<Compare>): void {
    const { store } = this.#context, before = store.get().compare;
    this.#picked = { ...this.#picked, ...patch };
    const call = this.#call;
    this.#picked = { run: this.#run.id, call: call.id, head: Math.min(this.#picked.head, call.heads - 1) };
    const mode = patch.mode ?? before?.mode ?? null;
    if (mode) store.set({ compare: { ...this.#picked, mode: mode === "difference" && !sameSize(this.#context.call(), call) ? "side" : mode } });
    else this.refresh();
  }

  refresh(): void {
    const context = this.#context, { manifest } = context, { compare, head, item } = context.store.get();
    if (compare) this.#picked = { run: compare.run, call: compare.call, head: compare.head };
    const run = this.#run, call = this.#call, possible = sameSize(context.call(), call);
    const focused = this.#form.contains((this.#form.getRootNode() as ShadowRoot).activeElement)
      ? [...this.#form.querySelectorAll("select, button")].indexOf((this.#form.getRootNode() as ShadowRoot).activeElement!) : -1;
    const modes = toggles("How to compare", [["off", "Off"], ["side", "Side by side"], ["difference", "Difference", "The shown head less the second one"]],
      compare?.mode ?? "off", (mode) => (mode === "off" ? context.store.set({ compare: null }) : this.#pick({ mode: mode as Compare["mode"] })));
    const difference = modes.querySelector<HTMLButtonElement>("[data-value=difference]")!;
    difference.disabled = !possible;
    this.#form.replaceChildren(
      ...(manifest.runs.length > 1 ? [choice("Run", manifest.runs.map((one) => [one.id, runName(one)] as const), run.id, (id) => this.#pick({ run: id }))] : []),
      choice("Layer", run.calls.map((one) => [one.id, upper(layerName(run, one))] as const), call.id, (id) => this.#pick({ call: id })),
      choice("Head", Array.from({ length: call.heads }, (_, n) => [String(n), `Head ${n}`] as const), String(this.#picked.head), (n) => this.#pick({ head: Number(n) })),
      modes);
    if (focused >= 0) this.#form.querySelectorAll<HTMLElement>("select, button")[focused]?.focus();
    const here = headName(context.run(), context.call(), head), there = headName(run, call, this.#picked.head) + (run.id === context.run().id ? "" : ` of ${runName(run)}`);
    const why = possible ? "" : " The two maps differ in size, so there is no difference to show.";
    this.#said.textContent = (compare?.mode === "difference" ? `The map shows ${here} less ${there}.` : compare ? `${upper(here)} is shown beside ${there}.` : `Nothing is compared yet.`) + why;
    this.#numbers.replaceChildren();
    if (compare) this.#table(item).catch((error: unknown) => context.fail(error));
  }

  /** The numbers of both heads and how they differ. */
  async #table(item: number): Promise<void> {
    const context = this.#context, { run, call, head, compare } = context.store.get();
    if (!compare) return;
    const of = async (of: string, call: string, head: number): Promise<HeadSummary | undefined> =>
      (await overviewOf(context, of, item)).heads.find((one) => one.call === call && one.head === head);
    const [a, b] = await Promise.all([of(run, call, head), of(compare.run, compare.call, compare.head)]);
    if (!a || !b || context.store.get().compare !== compare) return;
    const rows = STATISTICS.filter(([id]) => a[id] !== null || b[id] !== null).map(([id, title, hint]) => h("tr", {},
      h("th", { scope: "row", title: hint }, title), h("td", {}, decimal(a[id])), h("td", {}, decimal(b[id])),
      h("td", {}, a[id] === null || b[id] === null ? "–" : (a[id]! >= b[id]! ? "+" : "−") + decimal(Math.abs(a[id]! - b[id]!)))));
    this.#numbers.replaceChildren(h("table", { "aria-label": "Numbers of both heads" },
      h("thead", {}, h("tr", {}, ...["", "Shown", "Second", "Difference"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows)),
      a.sampled || b.sampled ? h("p", { class: "quiet" }, "From samples of rows.") : "");
  }
}

export const compare: Panel = {
  id: "compare", title: "Compare", place: "right",
  mount(el, context) {
    const panel = new ComparePanel(el, context);
    const [ask, end] = whenShown(el, () => panel.refresh());
    const unsubscribe = context.store.subscribe(ask, ["run", "call", "head", "item", "compare", "panel"]);
    ask();
    return () => {
      end();
      unsubscribe();
    };
  },
};
