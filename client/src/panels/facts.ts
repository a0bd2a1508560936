// What is known of the shown call, which numbers are exact, and what is alarming, as sentences.
import type { Context, Panel } from "../context";
import { bdi, h } from "../dom";
import type { Call, HeadSummary, Run } from "../protocol";
import { capital, commas, decimal, headName, layerName, overviewOf, STATISTICS, live } from "./data";
import { describe } from "./overview";

type Fact = [term: string, text: string];

export function factsOf(run: Run, call: Call): Fact[] {
  const { heads, kv_heads, width, rows, keys, softcap, scale } = call;
  const side = (id: string): string => run.sides.find((one) => one.id === id)?.name ?? id;
  return [
    ["Model", run.model],
    ["Layer", `${layerName(run, call)}: ${call.name}`],
    ["Kind", call.kind === "cross" ? `cross-attention: ${side(rows.side)} looks at ${side(keys.side)}` : "self-attention"],
    ["Heads", heads === kv_heads ? `${heads}, each with its own keys` : `${heads}, of which each ${heads / kv_heads} share one of ${kv_heads} key heads`],
    ["Shapes", `${commas(rows.length)} queries × ${commas(keys.length)} keys, of ${width} components` +
      (rows.placed ? `; the first query stands at key ${rows.placed}` : "") + (call.items > 1 ? `; ${call.items} items` : "")],
    ["Causal", call.causal ? "yes: no row sees later tokens" : "no: a row may see later tokens"],
    ["Mask", call.mask ?? "none"],
    ["Bias", call.bias ?? "none"],
    ["Scale", Number(scale.toPrecision(6)) + (Math.abs(scale * Math.sqrt(width) - 1) < 1e-6 ? ` = 1 / √${width}` : "")],
    ["Softcap", softcap === null ? "none" : `${softcap} · tanh(logit / ${softcap})`],
    ["Sink", call.sink ? "yes: it takes what a row leaves of 1" : "none: the weights of a row sum to 1"],
  ];
}

const exactness = (call: Call, about: HeadSummary | undefined): string =>
  "Cells, rows and columns are exact, computed in float32 from queries and keys; so is the map where it does not say that it is sampled. The statistics of this head are " +
  (about?.sampled ? `from ${commas(about.sampled)} of its ${commas(call.rows.length)} rows.` : "from all of its rows.");

/** The numbers of the shown head and of the one that it is compared with. */
async function compared(context: Context): Promise<Node[]> {
  const { run, call, head, item, compare } = context.store.get();
  const other = context.manifest.runs.find(({ id }) => id === compare?.run), there = other?.calls.find(({ id }) => id === compare!.call);
  if (!compare || !other || !there) return [];
  const of = async (run: string, item: number, call: string, head: number): Promise<HeadSummary> =>
    (await overviewOf(context, run, item)).heads.find((one) => one.call === call && one.head === head)!;
  const [a, b] = await Promise.all([of(run, item, call, head), of(other.id, Math.min(item, there.items - 1), there.id, compare.head)]);
  const rows = STATISTICS.filter(([id]) => a[id] !== null && b[id] !== null).map(([id, title, hint]) => h("tr", {},
    h("th", { scope: "row", title: hint }, title),
    ...[a[id], b[id], a[id]! - b[id]!].map((value) => h("td", {}, decimal(value).replace("-", "−")))));
  return [h("h3", {}, `Compared with ${headName(other, there, compare.head)}${other.id === run ? "" : ` of ${other.model}`}`), h("table", {},
    h("thead", {}, h("tr", {}, ...["", "Shown", "Second", "Difference"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, ...rows))];
}

export const facts: Panel = {
  id: "facts", title: "Call", place: "right",
  mount(el, context) {
    const { store, manifest } = context, body = h("div", {}), findings = h("ul", { class: "plain" });
    el.append(body);
    if (manifest.findings.length) el.append(h("h3", {}, "What was found"), findings);
    findings.append(...manifest.findings.map(({ sentence, call, head, row, key }) => h("li", {}, h("button", {
      onclick: () => {
        store.set({ run: manifest.shown.run, call, head, axis: "row", tokens: [row] });
        context.reveal(row, key);
      },
    }, bdi(sentence)))));
    let asked = 0;
    return live(el, context, ["run", "call", "head", "item", "compare", "panel"], async () => {
      const mine = ++asked, run = context.run(), call = context.call(), { head, item } = store.get();
      const [{ heads }, both] = await Promise.all([overviewOf(context, run.id, item), compared(context)]);
      if (mine !== asked) return;
      const about = heads.find((one) => one.call === call.id && one.head === head);
      body.replaceChildren(
        h("h2", {}, capital(headName(run, call, head))), h("p", {}, about ? describe(context, call, about) + "." : ""),
        ...(about?.alarms ?? []).map((text) => h("p", { class: "warning" }, "! ", text)), h("div", { class: "scrolls" }, ...both),
        h("dl", { class: "facts" }, ...factsOf(run, call).flatMap(([term, text]) => [h("dt", { class: "quiet" }, term), h("dd", {}, bdi(text))])),
        h("h3", {}, "What is exact"), h("p", {}, exactness(call, about)));
    })[1];
  },
};
