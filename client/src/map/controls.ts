// Above the map: which head, what of it, with which other. Below: the legend and the buttons for zooming.
import type { Context } from "../context";
import { choice, h, press, toggles } from "../dom";
import type { Call, Run } from "../protocol";
import type { Compare, State } from "../store";
import { cssOf } from "../colours";
import type { ColourScale } from "./scale";

const nameOf = (call: Call, all: readonly Call[]): string =>
  all.every((c, i) => c.layer === i && c.kind === all[0].kind) ? String(call.layer) : `${call.layer} · ${call.name}`;

const range = (n: number): [string, string][] => Array.from({ length: n }, (_, i) => [String(i), String(i)]);

/** What stays valid when the call changes. */
export function goTo(context: Context, callId: string, head: number): void {
  const call = context.run().calls.find((c) => c.id === callId);
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
  const { calls } = context.run(), call = context.call(), state = context.store.get();
  if (layers) {
    const next = calls[calls.indexOf(call) + layers];
    if (next) goTo(context, next.id, state.head);
  } else if (state.head + heads >= 0 && state.head + heads < call.heads) goTo(context, call.id, state.head + heads);
  context.announce(titleOf(context));
}

export const titleOf = (context: Context): string => `Layer ${context.call().layer} head ${context.store.get().head}`;

/** Another head to compare with: the next one of the call, else the same of the next call. */
function usual(context: Context): Compare {
  const { run, head } = context.store.get(), call = context.call(), { calls } = context.run();
  const next = head + 1 < call.heads ? { call: call.id, head: head + 1 } : { call: calls[0].id, head: 0 };
  return { run, ...next, mode: "side" };
}

/** Rebuilt whenever what it offers changes; small enough that nothing finer is needed. */
export function controls(context: Context): { element: HTMLElement; end: () => void } {
  const element = h("div", { class: "controls", role: "toolbar", "aria-label": "What the map shows" });
  const build = (): void => {
    const focused = (element.getRootNode() as ShadowRoot).activeElement;
    const held = focused instanceof HTMLElement && element.contains(focused) ? nameIn(focused) : null;
    const { store } = context, state = store.get(), call = context.call(), run = context.run();
    const what: [string, string, string?][] = [
      ["weights", "Weights"], ["logits", "Logits", "Products of query and key, scaled, with bias: what softmax gets"],
    ];
    if (call.bias !== null) what.push(["bias", "Bias", call.bias]);
    element.replaceChildren(...[
      choice("Layer", run.calls.map((c) => [c.id, nameOf(c, run.calls)]), call.id,
        (id) => goTo(context, id, state.head)),
      choice("Head", range(call.heads), String(state.head), (n) => goTo(context, call.id, Number(n))),
      call.items > 1 && choice("Item", range(call.items), String(state.item), (n) => store.set({ item: Number(n) })),
      toggles("What is shown", what, state.what, (w) => store.set({ what: w as State["what"] })),
      toggles("How several pairs become one dot", [
        ["max", "Largest", "The largest of the pairs in a dot"],
        ["mean", "Mean", "The mean of the visible pairs in a dot"],
      ], state.pool, (p) => store.set({ pool: p as State["pool"] })),
      h("button", { type: "button", "aria-pressed": String(state.compare !== null), "data-value": "compare",
        onclick: () => store.set({ compare: state.compare ? null : usual(context) }) }, "Compare"),
      state.compare && compareControls(context, state.compare, run),
    ].filter((part) => part instanceof Node));
    if (held) [...element.querySelectorAll<HTMLElement>("select, button")].find((e) => nameIn(e) === held)?.focus();
  };
  build();
  return { element, end: context.store.subscribe(build, ["run", "call", "head", "item", "what", "pool", "compare"]) };
}

const nameIn = (element: HTMLElement): string =>
  element.dataset["value"] ?? element.closest("label")?.textContent?.slice(0, 12) ?? "";

function compareControls(context: Context, compare: Compare, own: Run): HTMLElement {
  const { manifest, store } = context;
  const run = manifest.runs.find((r) => r.id === compare.run) ?? own;
  const call = run.calls.find((c) => c.id === compare.call) ?? run.calls[0], several = manifest.runs.length > 1;
  const put = (patch: Partial<Compare>): void => {
    const next = { ...compare, ...patch };
    const to = manifest.runs.find((r) => r.id === next.run) ?? run;
    const chosen = to.calls.find((c) => c.id === next.call) ?? to.calls[0];
    store.set({ compare: { ...next, call: chosen.id, head: Math.min(next.head, chosen.heads - 1) } });
  };
  return h("div", { class: "compare" },
    several && choice("with", manifest.runs.map((r) => [r.id, r.text.slice(0, 30) || r.model]), run.id,
      (id) => put({ run: id })),
    choice(several ? "Layer" : "with layer", run.calls.map((c) => [c.id, nameOf(c, run.calls)]), call.id,
      (id) => put({ call: id })),
    choice("Head", range(call.heads), String(compare.head), (n) => put({ head: Number(n) })),
    toggles("How two maps are compared",
      [["side", "Side by side"], ["difference", "Difference", "The first minus the second"]],
      compare.mode, (mode) => put({ mode: mode as Compare["mode"] })));
}

/** The buttons in the corner between the margins. */
export const zoomButtons = (zoom: (factor: number | null) => void): HTMLElement =>
  h("div", { class: "zoom", role: "group", "aria-label": "Zoom" },
    h("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoom(0.5) }, "−"),
    h("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoom(2) }, "+"),
    h("button", { type: "button", title: "The whole map", onclick: () => zoom(null) }, "Whole"));

type Show = (scale: ColourScale, of: string, choosable: boolean, mask: string | null) => void;

/** The colours and what they mean, with the choice between equal steps and powers of ten. Called, it shows a scale. */
export function legend(context: Context): Show & { element: HTMLElement } {
  const bar = h("canvas", { width: 160, height: 1 }), ticks = h("div", { class: "ticks" });
  const label = h("span", {}), hidden = h("span", { class: "hidden-sign" });
  const tone = toggles("Steps of the colours", [["linear", "Linear"], ["log", "Log", "Powers of ten"]], "log",
    (value) => context.store.set({ tone: value as State["tone"] }));
  const colours = h("div", { class: "scale", "aria-hidden": "true" }, bar, ticks);
  const element = h("div", { class: "legend" }, label, colours, tone, hidden);
  let shown: unknown[] = [];
  const show: Show = (scale, of, choosable, mask) => {
    const next = [scale, of, choosable, mask];
    if (next.every((part, i) => part === shown[i])) return;
    shown = next;
    label.textContent = of;
    const pen = bar.getContext("2d")!;
    for (let i = 0; i < 160; i++) {
      pen.fillStyle = cssOf(scale.colourAt(i / 159));
      pen.fillRect(i, 0, 1, 1);
    }
    ticks.replaceChildren(...scale.ticks.map(({ at, text }) => h("span", { style: `left: ${at * 100}%` }, text)));
    tone.hidden = !choosable;
    press(tone, context.store.get().tone);
    hidden.hidden = mask === null;
    hidden.title = `hidden by ${mask}`;
    hidden.replaceChildren(h("span", { class: "swatch" }), hidden.title);
  };
  return Object.assign(show, { element });
}
