// The text, each word coloured by what the heads that are off change about its probability.
import type { Context } from "../context";
import { h, on } from "../dom";
import { tokensFrom } from "../parts";
import { byId, type Answer } from "../protocol";
import type { Word } from "../words";
import { changeOf, reach, tellChange, type Change } from "./numbers";

export interface ColouredText {
  element: HTMLElement;
  /** The last token of the chosen word of the side that is read, else of the text, and the word's label. */
  chosen(): Promise<{ row: number; word: string }>;
  /** Colours the words; resolves to the end of the scale, 0 where nothing changes. */
  show(found: Answer<"heads">, coloured: boolean): Promise<number>;
  end(): void;
}

export function makeText(context: Context, said: (text: string) => void): ColouredText {
  const { store } = context, element = h("div", { class: "h-text", role: "group", dir: "auto",
    "aria-label": "The text, coloured by the change of each word" });
  let side = "", shown: { word: Word; el: HTMLElement; told: string }[] = [];

  /** The side that is read: a text has one, an encoder-decoder predicts its target. */
  const sideOf = (): string => {
    const { sides } = context.run();
    return (byId(sides, "target") ?? sides[0]).id;
  };
  const load = async (): Promise<Word[]> => {
    const run = context.run(), about = byId(run.sides, sideOf())!, words = context.words.side(run.id, about.id);
    await words.need(0, about.tokens);
    return words.between(0, about.tokens);
  };
  const at = (target: EventTarget | null): number =>
    shown.findIndex(({ el }) => el === (target as Element).closest(".h-word"));
  const tell = (place: number): void => said(shown[place] ? shown[place].told : "");
  const choose = (place: number): void => {
    const { word } = shown[place], axis = context.side("row").id === side ? "row" : "key";
    const { placed } = context.call().rows, shift = axis === "row" ? placed : 0;
    if (context.side(axis).id === side) context.choose(axis, tokensFrom(word.first - shift, word.end - shift));
  };
  const move = (place: number): void => {
    const next = shown[Math.max(0, Math.min(shown.length - 1, place))];
    for (const { el } of shown) el.tabIndex = el === next.el ? 0 : -1;
    next.el.focus();
  };
  const ends = [
    on(element, "pointerover", ({ target }) => tell(at(target))),
    on(element, "focusin", ({ target }) => tell(at(target))),
    on<MouseEvent>(element, "click", ({ target }) => {
      const place = at(target);
      if (place < 0) return;
      move(place);
      choose(place);
    }),
    on<KeyboardEvent>(element, "keydown", (event) => {
      const place = at(event.target), { key } = event;
      const to = { ArrowRight: place + 1, ArrowDown: place + 1, ArrowLeft: place - 1, ArrowUp: place - 1, Home: 0,
        End: shown.length - 1 }[key];
      if (place < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
      if (to !== undefined) move(to);
      else if (key === "Enter" || key === " ") choose(place);
      else return;
      event.preventDefault();
    }),
  ];

  return {
    element,
    async chosen() {
      const { axis, tokens } = store.get(), words = await load(), last = words[words.length - 1];
      const shift = axis === "row" ? context.call().rows.placed : 0;
      const token = context.side(axis).id === sideOf() ? tokens[tokens.length - 1] : undefined;
      const word = token === undefined ? last : words.find(({ end }) => end > token + shift) ?? last;
      return word ? { row: word.end - 1, word: word.label }
        : { row: byId(context.run().sides, sideOf())!.tokens - 1, word: "the text" };
    },
    async show(found, coloured) {
      side = found.side;
      const words = await load(), predicted = found.loss !== null, changes = words.map((word) => changeOf(found.data, predicted, word));
      const most = coloured ? reach(changes.map(({ change }) => change)) : 0, { row } = await this.chosen();
      const focused = at((element.getRootNode() as ShadowRoot).activeElement ?? element);
      shown = words.map((word, i) => {
        const told = `${word.label}: ${tellChange(changes[i], found.masked)}`;
        return { word, told, el: wordElement(word, changes[i], most, told, row) };
      });
      element.replaceChildren(...shown.flatMap(({ word, el }) => [word.gap, el]));
      const current = Math.max(0, shown.findIndex(({ word: { first, end } }) => first <= row && row < end));
      said("");
      if (focused >= 0) move(focused); // which tells of it again
      else if (shown.length) shown[current].el.tabIndex = 0;
      return most;
    },
    end: () => ends.forEach((end) => end()),
  };
}

/** Direction shows in the edge, too: above for more likely words, below for less likely ones. */
function wordElement({ label, special, text, first, end }: Word, { before, change }: Change, most: number, told: string,
  row: number): HTMLElement {
  const share = most && change !== null ? Math.abs(change) / most : 0;
  const kind = `h-word ${change !== null && change < 0 ? "h-less" : "h-more"}${share > 0.1 && before !== null ? " h-told" : ""}`;
  return h("span", { class: special ? `${kind} special` : kind, role: "button", tabindex: -1, "aria-label": told,
    "aria-current": String(first <= row && row < end), style: `--share: ${share.toFixed(3)}` }, special ? label : text);
}
