// Patching: which heads carry what differs between the text and another one, as a map of layers and heads.
import type { Context } from "../context";
import { choice, h, on } from "../dom";
import { activeIn, capital, headName, waiting } from "../panels/data";
import { messageOf } from "../parts";
import type { Answer, Call } from "../protocol";
import { byHead, reach, signed, signedWithin } from "./numbers";

type Found = Answer<"patching">;
const ABOUT = "Which heads carry what differs? The output of one head in this text is put into the run of another text: 0 "
  + "changes nothing, 1 makes its prediction this text's.";
const WORDS = "The word whose probability is measured, or two: mat,hat. Left empty: what each text is continued by.";
const TOKENS = "The tokens that are patched, from 0, as 3,5-7. Texts may then differ in length. Left empty: all.";
const WHOLE = 200; // characters of a text that the page knows

const field = (name: string, title: string, placeholder: string): [HTMLInputElement, HTMLElement] => {
  const input = h("input", { type: "text", autocomplete: "off", placeholder, title });
  return [input, h("label", "choice h-field", h("span", {}, name), input)];
};

export function fillPatch(context: Context): { element: HTMLElement; end(): void } {
  const { store } = context;
  const [other, otherField] = field("Other text", "As many tokens as this text, unless tokens are chosen.", "");
  const [target, targetField] = field("Words", WORDS, "most likely");
  const [positions, positionsField] = field("Tokens", TOKENS, "all");
  const way = choice("Measured", [["gradient", "by gradient"], ["exact", "exactly, head by head"]], "gradient", () => {});
  const found = h("div", { class: "stack", "aria-live": "off" });
  const start = h("button", { type: "submit" }, "Patch the heads");
  const form = h("form", { class: "stack", "aria-label": "Compare with another text", onsubmit: (event: Event) => {
    event.preventDefault();
    void ask();
  } }, otherField, h("div", "tools", targetField, positionsField), h("div", "tools", way, start));
  const element = h("section", "stack h-patch", h("h2", {}, "What another text changes"),
    h("p", "quiet small", ABOUT), form, found);
  let asked: AbortController | null = null;

  const begin = (): void => {
    asked?.abort();
    const { text, sides } = context.run();
    element.hidden = sides.length > 1; // of an encoder-decoder it is not asked
    other.value = text.length < WHOLE ? text : "";
    found.replaceChildren();
  };
  const ask = async (): Promise<void> => {
    asked?.abort();
    asked = new AbortController();
    const { signal } = asked, by = way.querySelector("select")!.value, run = store.get().run;
    element.setAttribute("aria-busy", "true");
    found.replaceChildren(h("p", "quiet", "Measuring …"));
    const end = waiting(found, context);
    try {
      const answer = await context.ask("patching",
        { run, other: other.value, target: target.value, positions: positions.value, by }, signal);
      if (signal.aborted) return;
      found.replaceChildren(...shown(context, answer));
      context.announce(answer.sentences[0]);
    } catch (error) {
      if (!signal.aborted) found.replaceChildren(h("p", { role: "alert" }, messageOf(error)));
    } finally {
      end();
      if (!signal.aborted) element.removeAttribute("aria-busy");
    }
  };
  begin();
  const unsubscribe = store.subscribe(begin, ["run"]);
  return { element, end() {
    asked?.abort();
    unsubscribe();
  } };
}

/** The metric of both texts, the map with its scale, sentences. */
function shown(context: Context, { of, clean, corrupted, sentences, data }: Found): HTMLElement[] {
  const most = reach(data);
  return [
    h("p", "small", `Measured: ${of}. This text (clean) has ${signed(clean)}, the other (corrupted) ${signed(corrupted)}.`),
    map(context, byHead(context.run().calls, data), most),
    h("div", "h-scale", h("span", {}, `${signed(-most)} away`), h("i"), h("span", {}, `restores ${signed(most)}`)),
    h("ul", "stack small", ...sentences.map((sentence) => h("li", {}, sentence))),
  ];
}

/** A cell for each head, which shows that head's map; arrows go from one to the next. */
function map(context: Context, effects: Map<string, number[]>, most: number): HTMLElement {
  const { calls } = context.run(), columns = Math.max(...calls.map(({ heads }) => heads)), { store } = context;
  const cell = (call: Call, head: number): HTMLElement => {
    const value = effects.get(call.id)![head], share = most ? Math.abs(value) / most : 0;
    return h("td", {}, h("button", { class: `h-cell ${value < 0 ? "h-less" : "h-more"}`, tabindex: -1,
      "aria-label": `${capital(headName(context.run(), call, head))}: ${signed(value)}`, style: `--share: ${share.toFixed(3)}`,
      onclick: () => store.set({ call: call.id, head }) }, signedWithin(value, most).replace(/^(\D?)0\./, "$1.")));
  };
  const table = h("table", "h-effects", h("caption", "unseen", "What each head restores"),
    h("thead", {}, h("tr", {}, h("td", {}), ...Array.from({ length: columns }, (_, n) => h("th", { scope: "col" }, String(n))))),
    h("tbody", {}, ...calls.map((call) => h("tr", {}, h("th", { scope: "row" }, String(call.layer)),
      ...Array.from({ length: call.heads }, (_, head) => cell(call, head))))));
  const cells = [...table.querySelectorAll("button")];
  cells[0].tabIndex = 0;
  on<KeyboardEvent>(table, "keydown", (event) => {
    const at = cells.indexOf(activeIn(table) as HTMLButtonElement), { key } = event;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[key];
    const next = step === undefined || event.altKey || event.ctrlKey || event.metaKey ? undefined : cells[at + step];
    if (!next) return;
    event.preventDefault();
    for (const one of cells) one.tabIndex = one === next ? 0 : -1;
    next.focus();
  });
  return h("div", "h-wide", table);
}
