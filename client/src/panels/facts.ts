// What is known of the shown call, which numbers are exact, and what is alarming, as sentences.
import type { Panel } from "../context";
import { bdi, h } from "../dom";
import { visible } from "../map/labels";
import { byId, type Call, type HeadSummary, type Run } from "../protocol";
import { live, overviewOf } from "./data";
import { commas } from "../parts";
import { describe } from "./overview";

type Fact = [term: string, text: string];

export function factsOf(run: Run, call: Call): Fact[] {
  const { heads, kv_heads, width, rows, keys, softcap, scale } = call;
  const side = (id: string): string => byId(run.sides, id)?.name ?? id;
  return [
    ["Model", run.model],
    ["Module", call.name],
    ["Kind", call.kind === "cross" ? `cross-attention: ${side(rows.side)} looks at ${side(keys.side)}`
      : "self-attention"],
    ["Heads", heads === kv_heads ? `${heads}, each with its own keys`
      : `${heads}, of which each ${heads / kv_heads} share one of ${kv_heads} key heads`],
    ["Shapes", `${commas(rows.length)} queries × ${commas(keys.length)} keys, of ${width} components` +
      (rows.placed ? `; the first query stands at key ${rows.placed}` : "")
        + (call.items > 1 ? `; ${call.items} items` : "")],
    ["Causal", call.causal ? "yes: no row sees later tokens" : rows.placed_by_item ? "differs by item"
      : "no: a row may see later tokens"],
    ["Mask", call.mask ?? "none"],
    ["Bias", call.bias ?? "none"],
    ["Scale", Number(scale.toPrecision(6)) + (Math.abs(scale * scale * width - 1) < 1e-6 ? ` = 1 / √${width}` : "")],
    ["Softcap", softcap === null ? "none" : `${softcap} · tanh(logit / ${softcap})`],
    ["Sink", call.sink ? "yes: it takes what a row leaves of 1" : "none: the weights of a row sum to 1"],
  ];
}

const exactness = (call: Call, about: HeadSummary | undefined): string =>
  "All numbers are computed in float32 from queries and keys, and exact where the map does not say that it is sampled. " +
  "The statistics of this head are " +
  (about?.sampled ? `from ${commas(about.sampled)} of its ${commas(call.rows.length)} rows.` : "from all of its rows.");

export const facts: Panel = {
  id: "facts", title: "Call", place: "right",
  mount(el, context) {
    const { store, manifest } = context, body = h("div", "stack"), findings = h("ul", "plain");
    el.append(body, h("div", { class: "stack", hidden: !manifest.findings.length }, h("h3", {}, "Findings"),
      findings));
    findings.append(...manifest.findings.map(({ sentence, call, head, row, key }) => h("li", {}, h("button", {
      onclick: () => {
        store.set({ run: manifest.shown.run, call, head, axis: "row", tokens: [row] });
        context.reveal(row, key);
      },
    }, bdi(visible(sentence))))));
    let asked = 0;
    return live(el, context, ["run", "call", "head", "item", "panel"], async () => {
      const mine = ++asked, run = context.run(), call = context.call(), { head, item } = store.get();
      const { heads } = await overviewOf(context, run.id, item);
      if (mine !== asked) return;
      const about = heads.find((one) => one.call === call.id && one.head === head);
      body.replaceChildren(
        h("h2", {}, about ? describe(context, call, about) : ""),
        h("dl", "facts", ...factsOf(run,
          call).flatMap(([term, text]) => [h("dt", "quiet", term), h("dd", {}, bdi(text))])),
        h("h3", {}, "What is exact"), h("p", {}, exactness(call, about)));
    })[1];
  },
};
