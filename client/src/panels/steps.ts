// Attention step by step: the numbers of the shown head for one row, as sections to read.
import type { Panel } from "../context";
import { h } from "../dom";
import { capital, headName, live, sameTokens } from "./data";
import { placeOf } from "./lines";

/** Any value in one line: the first numbers of a list, the fields of an object. */
const line = (value: unknown): string =>
  Array.isArray(value)
    ? value.slice(0, 8).map(line).join(", ") + (value.length > 8 ? `, … ${value.length} in all` : "")
  : value && typeof value === "object" ? Object.entries(value).map(([key, one]) => `${key} ${line(one)}`).join("; ")
  : typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value ?? "");

/** Texts as they are, numbers by name. */
const section = ({ id, name, mathml: _, ...more }: Record<string, unknown>): HTMLElement =>
  h("section", { class: "stack" }, h("h3", {}, line(name ?? id)),
  ...Object.entries(more).map(([key, value]) => line(value)
    && h("p", {}, typeof value === "string" ? value : `${key}: ${line(value)}`)));

export const steps: Panel = {
  id: "step", title: "Step", place: "right",
  wanted: (manifest) => manifest.step,
  mount(el, context) {
    let asked: AbortController | null = null;
    const [, end] = live(el, context, ["run", "call", "head", "item", "axis", "tokens", "panel"], async () => {
      const { axis, tokens, cursor, head } = context.store.get(), call = context.call(), last = call.rows.length - 1;
      asked?.abort();
      asked = new AbortController();
      // The last token of what is chosen, else the row of the cursor, else the last one.
      const { signal } = asked, chosen = axis === "row" || sameTokens(call) ? tokens[tokens.length - 1] : undefined;
      const row = Math.min(last, chosen ?? cursor?.row ?? last), words = context.wordsOf("row");
      el.replaceChildren();
      await words.need(row, row + 1);
      const { data: _, ...answer } = await context.ask("step", { ...placeOf(context), row }, signal);
      const all = Array.isArray(answer["steps"]) ? (answer["steps"] as Record<string, unknown>[]) : [answer];
      if (!signal.aborted) el.replaceChildren(h("h2", {},
        `${words.name(row)}: ${capital(headName(context.run(), call, head))}`), ...all.map(section));
    });
    return () => {
      end();
      asked?.abort();
    };
  },
};
