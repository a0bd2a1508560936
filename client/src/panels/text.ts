// The text itself: its words, what the chosen ones look at and what looks at them, and the search.
import type { Axis, Context, Panel } from "../context";
import { h } from "../dom";
import type { Words } from "../words";
import { headName, sameTokens, whenShown } from "./data";
import { Flow, stepsOf } from "./flow";
import { Lines } from "./lines";
import { Marks } from "./marks";
import { partNodes, plain, sentence, short } from "./reading";
import { Search } from "./search";
import { chosenWords, sharesOf, type Shares, type WordShare } from "./shares";

interface At { el: HTMLElement; words: Words; first: number; end: number }

const lengthOf = (context: Context, axis: Axis): number => context.call()[axis === "row" ? "rows" : "keys"].length;

class TextPanel {
  readonly #search: Search | null;
  readonly #lines: Lines;
  readonly #marks: Marks;
  readonly flow: Flow;
  readonly #reading = h("p", { class: "told" });
  readonly #lists = h("div", { class: "shares" });
  #shown = "";
  #anchor: { words: Words; token: number } | null = null;
  #asked = 0;
  /** The choice that the text has been moved to; one that is made here must not move under the pointer. */
  #placed = "";

  readonly #context: Context;

  constructor(el: HTMLElement, context: Context) {
    this.#context = context;

    // A saved page shows what it has; that the rest of the text is not shaded is no error.
    const failed = (error: unknown): void => (context.transport.kind === "recorded" ? undefined : context.fail(error));
    this.#search = context.transport.kind === "recorded" ? null : new Search(context);
    this.#lines = new Lines(context);
    this.flow = new Flow((block) => this.#marks.block(block), failed);
    this.#marks = new Marks(context, this.#lines, this.flow, failed);
    this.flow.el.setAttribute("role", "group");
    this.flow.el.setAttribute("aria-label", "Words of the text; the arrow keys move from word to word, with Shift they choose several");
    this.flow.el.addEventListener("click", (event) => this.#click(event));
    this.flow.el.addEventListener("keydown", (event) => this.#key(event));
    el.append(this.#search?.el ?? "", this.#reading, h("p", { class: "shades quiet" },
      h("span", {}, h("span", { class: "shade from" }), "what it looks at"), h("span", {}, h("span", { class: "shade by" }), "what looks at it"),
    ), this.flow.el, this.#lists);
  }

  close(): void {
    this.#search?.end();
    this.flow.clear();
  }

  /** Shows the sides of the present call; nothing moves while they are the same. */
  sides(): void {
    const context = this.#context, run = context.run();
    const axes: Axis[] = sameTokens(context.call()) ? ["row"] : ["key", "row"];
    const key = JSON.stringify([run.id, axes.map((axis) => [context.side(axis).id, lengthOf(context, axis)])]);
    if (key === this.#shown) return;
    this.#shown = key;
    this.#anchor = null;
    this.flow.show(axes.map((axis) => ({
      words: context.wordsOf(axis), length: lengthOf(context, axis), prompt: context.side(axis).prompt,
      title: axis === "key" ? `${context.side(axis).name} (keys)` : `${context.side(axis).name} (queries)`,
    })));
    this.flow.el.tabIndex = 0;
  }

  async refresh(): Promise<void> {
    const run = ++this.#asked, context = this.#context;
    this.sides();
    this.#marks.all();
    const { tokens, axis } = context.store.get();
    if (!tokens.length) {
      this.#reading.textContent = "Choose a word to see what it looks at.";
      this.#lists.replaceChildren();
      return;
    }
    try {
      const choice = axis + tokens.join();
      if (choice !== this.#placed) void this.flow.reveal(context.wordsOf(axis), tokens[0], true).then((word) => word && this.#rove(word, false));
      this.#placed = choice;
      const [words, shares] = await Promise.all([chosenWords(context), sharesOf(context, this.#lines)]);
      if (run === this.#asked) this.#tell(words, shares);
    } catch (error) {
      context.fail(error);
    }
  }

  #tell(words: { word: string; first: number; end: number }[], shares: Shares): void {
    const context = this.#context, { head, axis } = context.store.get();
    const others = { ...shares, by: shares.by.filter((share) => !words.some((word) => word.first === share.first)) };
    const parts = sentence(headName(context.run(), context.call(), head), words.map((word) => word.word), others);
    const steps = words.length === 1 ? stepsOf(words[0].first, words[0].end, context.side(axis).prompt) : null;
    if (steps) parts.push(` Generated at step ${steps}.`);
    this.#reading.replaceChildren(...partNodes(parts));
    if (this.flow.el.contains((this.flow.el.getRootNode() as ShadowRoot).activeElement)) context.announce(plain(parts));
    const several = words.length > 1;
    this.#lists.replaceChildren(
      this.#list("from", several ? "Look at, on average" : "Looks at", shares),
      this.#list("by", several ? "Looked at by, in sum" : "Looked at by", shares));
  }

  #list(direction: "from" | "by", title: string, shares: Shares): HTMLElement | string {
    if (!shares.directions.includes(direction)) return "";
    const total = direction === "from"
      ? shares.entropy !== null && `entropy ${shares.entropy.toFixed(2)} nats`
      : shares.received !== null && `received ${short(shares.received)} in all`;
    const list = h("ol", {});
    for (const share of shares[direction]) list.append(h("li", {}, this.#shareButton(direction, share)));
    return h("section", { class: direction }, h("h3", {}, title), total && h("p", { class: "quiet number" }, total),
      shares[direction].length ? list : h("p", { class: "quiet" }, "Nothing."));
  }

  #shareButton(direction: "from" | "by", share: WordShare): HTMLElement {
    const context = this.#context;
    return h("button", {
      type: "button", style: `--share: ${Math.min(1, share.weight)}`,
      onclick: () => {
        const chosen = context.store.get().tokens[0];
        const row = direction === "from" ? chosen : share.first, key = direction === "from" ? share.first : chosen;
        context.store.set({ cursor: { row, key } });
        context.reveal(row, key);
        void this.flow.reveal(context.wordsOf(direction === "from" ? "key" : "row"), share.first);
      },
    }, h("bdi", {}, share.word), h("span", { class: "number" }, short(share.weight)));
  }

  #wordAt(target: EventTarget | null): At | null {
    const el = (target as Element | null)?.closest?.<HTMLElement>(".w");
    const block = el && this.flow.filled.find((one) => one.el === el.parentElement);
    return block ? { el, words: block.words, first: Number(el.dataset["t"]), end: Number(el.dataset["e"]) } : null;
  }

  #choose(el: HTMLElement, how: "alone" | "add" | "range"): void {
    const word = this.#wordAt(el), context = this.#context;
    if (!word) return;
    const axis: Axis = context.wordsOf("row") === word.words ? "row" : "key";
    const span = (a: number, b: number): number[] => Array.from({ length: Math.min(4096, b - a) }, (_, i) => a + i);
    const from = how === "range" && this.#anchor?.words === word.words ? this.#anchor.token : word.first;
    const tokens = span(Math.min(from, word.first), Math.max(word.words.at(from)?.end ?? from + 1, word.end));
    if (how !== "range") this.#anchor = { words: word.words, token: word.first };
    context.choose(axis, tokens, how === "add");
    this.#placed = axis + context.store.get().tokens.join();
    this.#rove(el, false);
    const picture = context.picture(), seen = picture?.[axis === "row" ? "rows" : "keys"];
    if (seen && (word.first < seen[0] || word.first >= seen[1])) context.reveal(axis === "row" ? word.first : null, axis === "key" ? word.first : null);
  }

  #click(event: MouseEvent): void {
    const word = this.#wordAt(event.target);
    if (!word) return;
    this.#choose(word.el, event.shiftKey ? "range" : event.ctrlKey || event.metaKey ? "add" : "alone");
    word.el.focus({ preventScroll: true });
  }

  #rove(el: HTMLElement, focus: boolean): void {
    this.flow.el.querySelectorAll("[tabindex='0']").forEach((other) => other.setAttribute("tabindex", "-1"));
    this.flow.el.tabIndex = -1;
    el.tabIndex = 0;
    if (focus) el.focus({ preventScroll: true });
  }

  #key(event: KeyboardEvent): void {
    const word = this.#wordAt(event.target);
    if (event.altKey) return;
    if (event.key === "Escape" && this.#context.store.get().tokens.length) this.#context.store.set({ tokens: [] });
    else if (word && (event.key === "Enter" || event.key === " "))
      this.#choose(word.el, event.shiftKey ? "range" : event.ctrlKey || event.metaKey ? "add" : "alone");
    else if (/^(Arrow|Home|End|Page)/.test(event.key)) void this.#move(word, event);
    else return;
    event.preventDefault();
  }

  /** Goes to another word and chooses it; with Shift all between, with Ctrl none. */
  async #move(word: At | null, event: KeyboardEvent): Promise<void> {
    const context = this.#context, words = word?.words ?? context.wordsOf("row");
    const last = lengthOf(context, words === context.wordsOf("row") ? "row" : "key") - 1;
    const token = Math.max(0, Math.min(last, word ? this.#goal(word, event.key, last) : 0));
    const el = await this.flow.reveal(words, token, true);
    if (!el) return;
    this.#rove(el, true);
    if (event.shiftKey || !(event.ctrlKey || event.metaKey)) this.#choose(el, event.shiftKey ? "range" : "alone");
  }

  #goal(word: At, key: string, last: number): number {
    if (key === "Home") return 0;
    if (key === "End") return last;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const later = (key === "ArrowRight") === (getComputedStyle(word.el.parentElement!).direction === "ltr");
      return later ? word.end : word.first - 1;
    }
    const far = key.startsWith("Page") ? this.flow.el.clientHeight * 0.9 : 0;
    return this.#lineAway(word, key.endsWith("Up") ? -1 : 1, far) ?? (key.endsWith("Up") ? word.first - 1 : word.end);
  }

  /** The word nearest to the one above or below, at least `far` px away where there is one. */
  #lineAway(word: At, sign: 1 | -1, far: number): number | null {
    const from = word.el.getBoundingClientRect();
    let best: number | null = null, least = Infinity;
    for (const block of this.flow.filled) if (block.words === word.words) for (const el of block.el.querySelectorAll<HTMLElement>(".w")) {
      const box = el.getBoundingClientRect(), down = sign * (box.top - from.top);
      const score = Math.abs(down - Math.max(far, from.height)) * 50 + Math.abs(box.left + box.width / 2 - from.left - from.width / 2);
      if (down > from.height / 2 && score < least) [best, least] = [Number(el.dataset["t"]), score];
    }
    return best;
  }
}

export const text: Panel = {
  id: "text", title: "Text", place: "right",
  mount(el, context) {
    const panel = new TextPanel(el, context);
    const [refresh, end] = whenShown(el, () => void panel.refresh());
    const ends = [context.store.subscribe(refresh, ["run", "call", "head", "item", "axis", "tokens", "panel"])];
    refresh();
    return () => {
      end();
      ends.forEach((one) => one());
      panel.close();
    };
  },
};
