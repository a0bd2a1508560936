// What is known of the shown call, which numbers are exact, and what is alarming, as sentences.
import type { Context, Panel } from "../context";
import { h } from "../dom";
import type { Call, HeadSummary, Run } from "../protocol";
import { decimal, headName, layerName, overviewOf, STATISTICS, whenShown } from "./data";

type Fact = [term: string, text: string];

const count = (n: number, name: string): string => `${n.toLocaleString("en")} ${name}${n === 1 ? "" : "s"}`;
const side = (run: Run, id: string): string => run.sides.find((one) => one.id === id)?.name ?? id;

export function factsOf(run: Run, call: Call): Fact[] {
  const shared = call.heads / call.kv_heads;
  const facts: (Fact | null)[] = [
    ["Model", run.model],
    ["Layer", layerName(run, call)],
    ["Module", call.name],
    ["Kind", call.kind === "cross" ? `Cross-attention: ${side(run, call.rows.side)} looks at ${side(run, call.keys.side)}` : "Self-attention"],
    ["Heads", call.heads === call.kv_heads ? `${call.heads}, each with its own keys`
      : `${call.heads} query heads, ${call.kv_heads} key heads: ${shared} share one`],
    ["Width", `${call.width} components of each query and key`],
    ["Rows", `${count(call.rows.length, "query token")}${call.rows.placed ? `, the first at key ${call.rows.placed}` : ""}`],
    ["Keys", count(call.keys.length, "key token")],
    call.items > 1 ? ["Items", count(call.items, "item")] : null,
    ["Looks ahead", call.causal ? "No: a row sees its own token and those before it (causal)" : "Yes: a row may see later tokens"],
    ["Mask", call.mask ?? "None"],
    ["Bias", call.bias ?? "None"],
    ["Scale", `${Number(call.scale.toPrecision(6))}${Math.abs(call.scale * Math.sqrt(call.width) - 1) < 1e-6 ? ` = 1 / √${call.width}` : ""}`],
    ["Softcap", call.softcap === null ? "None" : `${call.softcap}: logits are ${call.softcap} · tanh(logit / ${call.softcap})`],
    ["Sink", call.sink ? "Yes: weights of a row and of the sink sum to 1" : "None: weights of a row sum to 1"],
  ];
  return facts.filter((fact) => fact !== null);
}

/** Which numbers are exact, in sentences. */
function exactness(call: Call, about: HeadSummary | undefined): string[] {
  const rows = call.rows.length.toLocaleString("en");
  return [
    "Weights of single cells, rows and columns are computed from the model’s queries and keys, exact to float32.",
    "A tile of the map that covers many tokens shows the largest or the mean weight of each bin; while it loads, it may come from a sample of rows, and the map says so.",
    about?.sampled ? `The statistics of this head are from a sample of ${about.sampled.toLocaleString("en")} of its ${rows} rows.`
      : `The statistics of this head are from all of its ${rows} rows.`,
  ];
}

/** The numbers of the shown head and of the one that it is compared with. */
async function compared(context: Context): Promise<Node[]> {
  const { run, call, head, item, compare } = context.store.get();
  if (!compare) return [];
  const other = context.manifest.runs.find((one) => one.id === compare.run)!, there = other.calls.find((one) => one.id === compare.call)!;
  const of = async (run: string, item: number, call: string, head: number): Promise<HeadSummary | undefined> =>
    (await overviewOf(context, run, item)).heads.find((one) => one.call === call && one.head === head);
  const [a, b] = await Promise.all([of(run, item, call, head), of(compare.run, Math.min(item, there.items - 1), compare.call, compare.head)]);
  if (!a || !b) return [];
  const rows = STATISTICS.filter(([id]) => a[id] !== null && b[id] !== null).map(([id, title, hint]) => h("tr", {},
    h("th", { scope: "row", title: hint }, title),
    ...[a[id], b[id], a[id]! - b[id]!].map((value) => h("td", {}, decimal(value).replace("-", "−")))));
  const name = headName(other, there, compare.head) + (other.id === run ? "" : ` of ${other.model}`);
  return [h("h3", {}, `Compared with ${name}`), h("table", {},
    h("thead", {}, h("tr", {}, ...["", "Shown", "Second", "Difference"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, ...rows))];
}

export const facts: Panel = {
  id: "facts", title: "Call", place: "right",
  mount(el, context: Context) {
    const title = h("h2", {}), list = h("dl", { class: "facts" }), sure = h("div", { class: "sentences" }), alarms = h("div", { class: "sentences" });
    const findings = h("ul", { class: "findings" }), comparison = h("div", { class: "scrolls" });
    el.append(title, alarms, comparison, list, h("h3", {}, "What is exact"), sure);
    if (context.manifest.findings.length) el.append(h("h3", {}, "What was found"), findings);
    for (const finding of context.manifest.findings)
      findings.append(h("li", {}, h("button", {
        type: "button", onclick: () => {
          const run = context.manifest.shown.run;
          context.store.set({ run, call: finding.call, head: finding.head, axis: "row", tokens: [finding.row] });
          context.reveal(finding.row, finding.key);
        },
      }, h("bdi", {}, finding.sentence))));
    let asked = 0;
    const refresh = async (): Promise<void> => {
      const mine = ++asked;
      const run = context.run(), call = context.call(), { head, item } = context.store.get();
      const name = headName(run, call, head);
      title.textContent = name.charAt(0).toUpperCase() + name.slice(1);
      list.replaceChildren(...factsOf(run, call).flatMap(([term, text]) => [h("dt", { class: "quiet" }, term), h("dd", {}, h("bdi", {}, text))]));
      const [{ heads }, both] = await Promise.all([overviewOf(context, run.id, item), compared(context)]);
      if (mine !== asked) return;
      const about = heads.find((one) => one.call === call.id && one.head === head);
      sure.replaceChildren(...exactness(call, about).map((text) => h("p", {}, text)));
      comparison.replaceChildren(...both);
      const role = about?.role ? [h("p", {}, `Role: ${about.role}${about.score === null ? "" : `, ${decimal(about.score)} above chance`}.`)] : [];
      alarms.replaceChildren(...role, ...(about?.alarms ?? []).map((text) => h("p", { class: "warning" }, h("span", { "aria-hidden": "true" }, "! "), text)));
    };
    const [ask, end] = whenShown(el, () => void refresh().catch((error: unknown) => context.fail(error)));
    const unsubscribe = context.store.subscribe(ask, ["run", "call", "head", "item", "compare", "panel"]);
    ask();
    return () => {
      end();
      unsubscribe();
    };
  },
};
