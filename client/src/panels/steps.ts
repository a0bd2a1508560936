// Attention step by step: the numbers of the shown head for one row, as sections to read.
import type { Context, Panel } from "../context";
import { h } from "../dom";
import { capital, headName, sameTokens, whenShown } from "./data";
import { placeOf } from "./lines";

type Json = Record<string, unknown>;

/** Any value in one line: the first numbers of a list, the fields of an object. */
function line(value: unknown): string {
  if (Array.isArray(value)) return `[${value.slice(0, 8).map(line).join(", ")}${value.length > 8 ? `, … ${value.length} in all` : ""}]`;
  if (value && typeof value === "object") return Object.entries(value).map(([key, one]) => `${key} ${line(one)}`).join("; ");
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value ?? "none");
}

/** Texts as they are, numbers by name. */
const section = (step: Json): HTMLElement => h("section", {}, h("h3", {}, line(step["name"] ?? step["id"])),
  ...Object.entries(step).filter(([key, value]) => key !== "id" && key !== "name" && key !== "mathml" && value !== null && line(value) !== "[]" && value !== "")
    .map(([key, value]) => (key === "formula" ? h("p", {}, h("code", {}, line(value))) : h("p", {}, typeof value === "string" ? value : `${key} ${line(value)}`))));

/** The row to show: the chosen word's last token, else the cursor's row, else the last one. */
export function rowToShow(context: Context): number {
  const { axis, tokens, cursor } = context.store.get(), { rows } = context.call(), chosen = tokens[tokens.length - 1];
  if (chosen < rows.length && (axis === "row" || sameTokens(context.call()))) return chosen;
  return cursor ? cursor.row : rows.length - 1;
}

export const steps: Panel = {
  id: "step", title: "Step", place: "right",
  wanted: (manifest) => manifest.step,
  mount(el, context) {
    const title = h("h2", {}), body = h("div", {});
    el.append(title, body);
    let asked: AbortController | null = null;
    const [ask, end] = whenShown(el, async () => {
      asked?.abort();
      asked = new AbortController();
      const { signal } = asked, row = rowToShow(context), words = context.wordsOf("row");
      body.replaceChildren();
      await words.need(row, row + 1);
      title.textContent = `${words.name(row)}: ${capital(headName(context.run(), context.call(), context.store.get().head))}, step by step`;
      const { data: _, ...answer } = await context.ask("step", { ...placeOf(context), row }, signal);
      const all = Array.isArray(answer["steps"]) ? (answer["steps"] as Json[]) : [answer];
      if (!signal.aborted) body.replaceChildren(...all.map(section));
    }, context);
    const unsubscribe = context.store.subscribe(ask, ["run", "call", "head", "item", "axis", "tokens", "panel"]);
    ask();
    return () => {
      end();
      asked?.abort();
      unsubscribe();
    };
  },
};
