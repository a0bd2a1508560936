// Attention step by step: the numbers of the shown head for one row, as sections to read.
import type { Context, Panel } from "../context";
import { h } from "../dom";
import { headName, sameTokens, whenShown } from "./data";
import { placeOf } from "./lines";

type Json = Record<string, unknown>;

const said = (value: unknown): string =>
  typeof value === "number" ? (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)))) : String(value);

/** Any value in one line: the first numbers of a list, the fields of an object. */
function line(value: unknown, most = 8): string {
  if (Array.isArray(value)) return `[${value.slice(0, most).map((one) => line(one)).join(", ")}${value.length > most ? `, … ${value.length} in all` : ""}]`;
  if (value && typeof value === "object") return Object.entries(value).map(([key, one]) => `${key} ${line(one)}`).join("; ");
  return value === null ? "none" : said(value);
}

const TOLD = ["id", "name", "formula", "says", "sentence", "shapes", "without"];

function section(step: Json): HTMLElement {
  const numbers = Object.entries(step).filter(([key, value]) => !TOLD.includes(key) && value !== null && value !== "" && !(Array.isArray(value) && !value.length));
  const text = (key: string, tag: "p" | "code" = "p"): HTMLElement | false => typeof step[key] === "string" && step[key] !== "" && h(tag, {}, step[key] as string);
  return h("section", { class: "step" }, h("h3", {}, said(step["name"] ?? step["id"] ?? "")), text("formula", "code"), text("says"), text("sentence"),
    typeof step["shapes"] === "string" && h("p", { class: "quiet" }, step["shapes"] as string),
    h("dl", { class: "facts" }, ...numbers.flatMap(([key, value]) => [h("dt", { class: "quiet" }, key), h("dd", { class: "number" }, line(value))])),
    typeof step["without"] === "string" && step["without"] !== "" && h("p", { class: "quiet" }, step["without"] as string));
}

/** The row to show: the chosen word's last token, else the cursor's row, else the last one. */
export function rowToShow(context: Context): number {
  const { axis, tokens, cursor } = context.store.get(), { rows } = context.call();
  const chosen = tokens[tokens.length - 1];
  if (chosen !== undefined && (axis === "row" || sameTokens(context.call())) && chosen < rows.length) return chosen;
  return cursor ? cursor.row : rows.length - 1;
}

export const steps: Panel = {
  id: "step", title: "Step", place: "right",
  wanted: (manifest) => manifest.step,
  mount(el, context) {
    const title = h("h2", {}), body = h("div", {});
    el.append(title, body);
    let asked: AbortController | null = null;
    const refresh = async (): Promise<void> => {
      asked?.abort();
      asked = new AbortController();
      const { signal } = asked, row = rowToShow(context), words = context.wordsOf("row");
      await words.need(row, row + 1);
      title.textContent = `Step by step: ${words.name(row)} in ${headName(context.run(), context.call(), context.store.get().head)}`;
      const { data: _, ...answer } = await context.ask("step", { ...placeOf(context), row }, signal);
      if (signal.aborted) return;
      const all = Array.isArray(answer["steps"]) ? (answer["steps"] as Json[]) : [answer];
      body.replaceChildren(...all.map(section));
    };
    const [ask, end] = whenShown(el, () => void refresh().catch((error: unknown) => {
      body.replaceChildren();
      context.fail(error);
    }));
    const unsubscribe = context.store.subscribe(ask, ["run", "call", "head", "item", "axis", "tokens", "panel"]);
    ask();
    return () => {
      end();
      asked?.abort();
      unsubscribe();
    };
  },
};
