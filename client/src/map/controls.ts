// Above the map: which head, what of it, with which other. Below: the legend and the buttons for zooming.
import type { Context } from "../context";
import { choice, h, press, toggles } from "../dom";
import { tokensFrom } from "../parts";
import { byId, type Call, type Run } from "../protocol";
import { runNames, twin, usualCompare } from "../runs";
import type { Compare, State } from "../store";
import { cssOf } from "../colours";
import { comparable } from "./panes";
import type { ColourScale } from "./scale";

const nameOf = (call: Call, all: readonly Call[]): string =>
  all.every((c, i) => c.layer === i && c.kind === all[0].kind) ? String(call.layer) : `${call.layer} · ${call.name}`;

const range = (n: number): [string, string][] => tokensFrom(0, n).map((i) => [String(i), String(i)]);

/** What stays valid when the call changes. */
export function goTo(context: Context, callId: string, head: number): void {
  const call = byId(context.run().calls, callId);
  if (!call) return;
  const state = context.store.get(), before = context.call();
  const patch: Partial<State> = { call: callId, head: Math.max(0, Math.min(head, call.heads - 1)) };
  if (state.item >= call.items) patch.item = 0;
  if (state.what === "bias" && call.bias === null) patch.what = "weights";
  const moved = call.rows.side !== before.rows.side || call.keys.side !== before.keys.side;
  if (moved) Object.assign(patch, { tokens: [], scale: 0, cursor: null });
  context.store.set(patch);
}

/** The next or previous head or layer, for the keys. */
export function step(context: Context, heads: number, layers: number): void {
  const { calls } = context.run(), call = context.call(), head = context.store.get().head + heads;
  const next = calls[calls.findIndex(({ id }) => id === call.id) + layers];
  if (!next || (heads && (head < 0 || head >= call.heads)))
    return context.fail(`This is the ${heads + layers < 0 ? "first" : "last"} ${heads ? "head of its layer" : "layer"}.`);
  goTo(context, next.id, head);
  context.announce(titleOf(context));
}

export const titleOf = (context: Context): string => `Layer ${context.call().layer} head ${context.store.get().head}`;

/** Rebuilt whenever what it offers changes; small enough that nothing finer is needed. */
export function controls(context: Context): { element: HTMLElement; end: () => void } {
  const element = h("div", { class: "controls", role: "toolbar", "aria-label": "What the map shows" });
  const build = (): void => {
    const focused = (element.getRootNode() as ShadowRoot).activeElement;
    const held = focused instanceof HTMLElement && element.contains(focused) ? nameIn(focused) : null;
    const { store } = context, state = store.get(), call = context.call(), run = context.run();
    const what: [string, string, string?][] = [
      ["weights", "Weights"], ["logits", "Logits", "What softmax gets: scaled products, with bias"],
    ];
    if (call.bias !== null) what.push(["bias", "Bias", call.bias]);
    element.replaceChildren(...[
      ...pickers(run, call, state.head, "Layer", (id, head) => goTo(context, id, head)),
      call.items > 1 && choice("Item", range(call.items), String(state.item), (n) => store.set({ item: Number(n) })),
      toggles("What is shown", what, state.what, (w) => store.set({ what: w as State["what"] })),
      toggles("How several pairs become one dot", [
        ["max", "Largest", "The largest of a dot's pairs"],
        ["mean", "Mean", "The mean of a dot's visible pairs"],
      ], state.pool, (p) => store.set({ pool: p as State["pool"] })),
      h("button", { "aria-pressed": String(state.compare !== null), "data-value": "compare",
        onclick: () => store.set({ compare: state.compare ? null
          : usualCompare(context.manifest.runs, run, call, state.head) }) }, "Compare"),
      state.compare && compareControls(context, state.compare, run, call),
    ].filter((part) => part instanceof Node));
    if (held) [...element.querySelectorAll<HTMLElement>("select, button")].find((e) => nameIn(e) === held)?.focus();
  };
  build();
  return { element, end: context.store.subscribe(build, ["run", "call", "head", "item", "what", "pool", "compare"]) };
}

const nameIn = (element: HTMLElement): string =>
  element.dataset["value"] ?? element.closest("label")?.textContent?.slice(0, 12) ?? "";

/** The choice of a layer and a head. */
const pickers = (run: Run, call: Call, head: number, layer: string, go: (call: string, head: number) => void): Node[] =>
  [
  choice(layer, run.calls.map((c) => [c.id, nameOf(c, run.calls)]), call.id, (id) => go(id, head)),
  choice("Head", range(call.heads), String(head), (n) => go(call.id, Number(n))),
];

function compareControls(
  { manifest: { runs }, store }: Context, compare: Compare, own: Run, shown: Call,
): HTMLElement {
  const run = byId(runs, compare.run) ?? own, call = byId(run.calls, compare.call) ?? run.calls[0];
  const put = (patch: Partial<Compare>): void => {
    const next = { ...compare, ...patch }, to = byId(runs, next.run) ?? run;
    const chosen = to === run ? byId(to.calls, next.call) ?? call : twin(to, call);
    store.set({ compare: { ...next, call: chosen.id, head: Math.min(next.head, chosen.heads - 1) } });
  };
  const alike = comparable(shown, call), modes = toggles("How two maps are compared", [["side", "Side by side"],
    ["difference", "Difference", alike ? "" : "Maps of different sizes have no difference"]],
    alike ? compare.mode : "side", (mode) => put({ mode: mode as Compare["mode"] }));
  modes.querySelectorAll("button")[1].disabled = !alike;
  return h("div", "compare",
    runs.length > 1 && choice("with", runNames(runs).map((name, i) => [runs[i].id, name]), run.id, (id) => put({ run: id })),
    ...pickers(run, call, compare.head, runs.length > 1 ? "Layer" : "with layer",
      (id, head) => put({ call: id, head })),
    modes);
}

type Show = (scale: ColourScale, of: string, choosable: boolean, mask: string | null) => void;

/** The colours and what they mean, with the choice between equal steps and powers of ten. Called, it shows a scale. */
export function legend(context: Context, zoom: (factor: number | null) => void): Show & { element: HTMLElement } {
  const bar = h("div", "colours"), ticks = h("div", "ticks");
  const label = h("span", {}), hidden = h("span", "hidden-sign");
  const tone = toggles("Steps of the colours", [["linear", "Linear"], ["log", "Log"]], "log",
    (value) => context.store.set({ tone: value as State["tone"] }));
  const colours = h("div", { class: "scale", "aria-hidden": "true" }, bar, ticks);
  const buttons = h("div", { class: "zoom", role: "group", "aria-label": "Zoom" },
    h("button", { "aria-label": "Zoom out", onclick: () => zoom(0.5) }, "−"),
    h("button", { title: "The whole map", onclick: () => zoom(null) }, "Whole"),
    h("button", { "aria-label": "Zoom in", onclick: () => zoom(2) }, "+"));
  const element = h("div", "legend", label, colours, tone, hidden, buttons);
  let shown: unknown[] = [];
  const show: Show = (scale, of, choosable, mask) => {
    const next = [scale, of, choosable, mask];
    if (next.every((part, i) => part === shown[i])) return;
    shown = next;
    label.textContent = of;
    bar.style.background = `linear-gradient(90deg, ${[0, 0.5, 1].map((at) => cssOf(scale.colourAt(at))).join()})`;
    ticks.replaceChildren(...scale.ticks.map(({ at, text }) => h("span", { style: `left: ${at * 100}%` }, text)));
    tone.hidden = !choosable;
    press(tone, context.store.get().tone);
    hidden.hidden = mask === null;
    hidden.title = `hidden by ${mask}`;
    hidden.replaceChildren(h("span", "swatch"), hidden.title);
  };
  return Object.assign(show, { element });
}
