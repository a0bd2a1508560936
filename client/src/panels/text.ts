// The text itself: its words, what the chosen ones look at and what looks at them, and the search.
import type { Axis, Context, Panel } from "../context";
import { bdi, h, on } from "../dom";
import { partNodes, plain, tokensFrom } from "../parts";
import type { Words } from "../words";
import { CHOICE, activeIn, headName, sameTokens, live } from "./data";
import { makeFlow, stepsOf, type Flow } from "./flow";
import { lengthOf, makeLines, type Direction } from "./lines";
import { markBlock } from "./marks";
import { sentence, short } from "./reading";
import { makeSearch } from "./search";
import { chosenWords, sharesOf, type Shares, type WordShare } from "./shares";

/** A word of the text on the page. */
interface At { el: HTMLElement; words: Words; first: number; end: number }
type How = "alone" | "add" | "range";

const howOf = ({ shiftKey, ctrlKey, metaKey }: MouseEvent | KeyboardEvent): How =>
  (shiftKey ? "range" : ctrlKey || metaKey ? "add" : "alone");

function wordAt(flow: Flow, target: EventTarget | null): At | null {
  const el = (target as Element).closest<HTMLElement>(".w"),
    block = flow.filled().find((one) => one.el === el?.parentElement);
  return el && block ? { el, words: block.words, first: Number(el.dataset["t"]), end: Number(el.dataset["e"]) } : null;
}

/** The word nearest to the one above or below, at least `far` px away where there is one. */
function lineAway(flow: Flow, word: At, sign: 1 | -1, far: number): number | null {
  const from = word.el.getBoundingClientRect();
  let best: number | null = null, least = Infinity;
  for (const el of flow.el.querySelectorAll<HTMLElement>(".w")) {
    const box = el.getBoundingClientRect(), down = sign * (box.top - from.top);
    const score = Math.abs(down - Math.max(far, from.height)) * 50
      + Math.abs(box.left + box.right - from.left - from.right) / 2;
    if (down > from.height / 2 && score < least && wordAt(flow, el)?.words === word.words)
      [best, least] = [Number(el.dataset["t"]), score];
  }
  return best;
}

/** Where a key leads from a word. */
function goal(flow: Flow, word: At, key: string, last: number): number {
  if (key === "Home" || key === "End") return key === "Home" ? 0 : last;
  const back = /Up|Left/.test(key), aside = back ? word.first - 1 : word.end;
  if (/Left|Right/.test(key))
    return getComputedStyle(word.el.parentElement!).direction === "ltr" ? aside : back ? word.end : word.first - 1;
  return lineAway(flow, word, back ? -1 : 1, key.startsWith("Page") ? flow.el.clientHeight * 0.9 : 0) ?? aside;
}

/** What the chosen words look at or what looks at them; a press goes there, in the map too. */
function list(context: Context, flow: Flow, shares: Shares, direction: Direction, several: boolean): HTMLElement {
  const { entropy, received } = shares, from = direction === "from";
  const total = from ? entropy !== null && `entropy ${entropy.toFixed(2)} nats`
    : received !== null && `received ${short(received)} in all`;
  const title = from ? (several ? "Look at, on average" : "Looks at")
    : several ? "Looked at by, in sum" : "Looked at by";
  const go = ({ first }: WordShare): void => {
    const chosen = context.store.get().tokens[0], row = from ? chosen : first, key = from ? first : chosen;
    context.store.set({ cursor: { row, key } });
    context.reveal(row, key);
    void flow.reveal(context.wordsOf(from ? "key" : "row"), first);
  };
  return h("section", { class: direction }, h("h3", {}, title),
    total && h("p", "quiet small number", total), h("ol", "plain",
    ...shares[direction].map((share) => h("li", {},
      h("button", { style: `--share: ${Math.min(1, share.weight)}`, onclick: () => go(share) },
      bdi(share.word), h("span", "number", short(share.weight)))))));
}

function mountText(el: HTMLElement, context: Context): () => void {
  const { store, transport } = context, lines = makeLines(context);
  const reading = h("p", "told"), lists = h("div", "shares");
  // A saved page shows what it has; that the rest of the text is not shaded is no error.
  const failed = (error: unknown): void => (transport.kind === "recorded" ? undefined : context.fail(error));
  const flow = makeFlow((block) => void markBlock(context, lines, block).catch(failed), failed);
  const search = makeSearch(context);
  let shown = "", placed = "", asked = 0, anchor: At | null = null;

  /** Shows the sides of the present call; nothing moves while they are the same. */
  const sides = (): void => {
    const axes: Axis[] = sameTokens(context.call()) ? ["row"] : ["key", "row"];
    const { rows, keys } = context.call(), key = JSON.stringify([store.get().run, axes.length, rows, keys]);
    if (key === shown) return;
    shown = key;
    anchor = null;
    flow.show(axes.map((axis) => ({
      words: context.wordsOf(axis), length: lengthOf(context, axis), prompt: context.side(axis).prompt,
      title: `${context.side(axis).name} (${axis === "key" ? "keys" : "queries"})`,
    })));
    flow.el.tabIndex = 0;
  };
  const rove = (word: HTMLElement): void => {
    for (const other of flow.el.querySelectorAll("[tabindex='0']")) other.setAttribute("tabindex", "-1");
    flow.el.tabIndex = -1;
    word.tabIndex = 0;
  };
  const tell = (words: readonly { word: string; first: number; end: number }[], shares: Shares): void => {
    const others = { ...shares, by: shares.by.filter(({ first }) => !words.some((word) => word.first === first)) };
    const parts = sentence(headName(context.run(), context.call(), store.get().head), words.map(({ word }) => word),
      others);
    const steps = words.length === 1 && stepsOf(words[0].first, words[0].end, context.side(store.get().axis).prompt);
    if (steps) parts.push(` Generated at step ${steps}.`);
    reading.replaceChildren(...partNodes(parts));
    if (flow.el.contains(activeIn(flow.el))) context.announce(plain(parts));
    lists.replaceChildren(...shares.directions.map((direction) =>
      list(context, flow, shares, direction, words.length > 1)));
  };
  const refresh = async (): Promise<void> => {
    const mine = ++asked, { tokens, axis } = store.get(), choice = axis + tokens.join();
    sides();
    for (const block of flow.filled()) void markBlock(context, lines, block).catch(failed);
    if (tokens.length && choice !== placed)
      void flow.reveal(context.wordsOf(axis), tokens[0], true).then((word) => word && rove(word));
    placed = choice;
    if (!tokens.length) {
      reading.textContent = "Choose a word to see what it looks at.";
      lists.replaceChildren();
      return;
    }
    const found = await Promise.all([chosenWords(context), sharesOf(context, lines)]).catch((error: unknown) => {
      if (transport.kind !== "recorded") throw error;
      reading.textContent = "What this word looks at is not part of this saved page.";
      lists.replaceChildren();
    });
    if (found && mine === asked) tell(...found);
  };
  const choose = (word: At, how: How): void => {
    const axis: Axis = context.wordsOf("row") === word.words ? "row" : "key";
    const from = how === "range" && anchor?.words === word.words ? anchor : word,
      start = Math.min(from.first, word.first);
    if (how !== "range") anchor = word;
    context.choose(axis, tokensFrom(start, Math.min(start + 4096, Math.max(from.end, word.end))), how === "add");
    placed = axis + store.get().tokens.join(); // the text must not move under the pointer
    rove(word.el);
    const seen = context.picture()?.[axis === "row" ? "rows" : "keys"];
    if (seen && (word.first < seen[0] || word.first >= seen[1]))
      context.reveal(axis === "row" ? word.first : null, axis === "key" ? word.first : null);
  };
  /** Goes to another word and chooses it; with Shift all between, with Ctrl none. */
  const move = async (word: At | null, event: KeyboardEvent): Promise<void> => {
    const words = word?.words ?? context.wordsOf("row"),
      last = lengthOf(context, words === context.wordsOf("row") ? "row" : "key") - 1;
    const aim = word ? goal(flow, word, event.key, last) : 0, to = Math.max(0, Math.min(last, aim)), how = howOf(event);
    if (aim !== to) context.fail("The text ends here.");
    const next = await flow.reveal(words, to, true);
    if (!next) return;
    rove(next);
    next.focus({ preventScroll: true });
    if (how !== "add") choose(wordAt(flow, next)!, how);
  };
  on<MouseEvent>(flow.el, "click", (event) => {
    const word = wordAt(flow, event.target);
    if (!word) return;
    choose(word, howOf(event));
    word.el.focus({ preventScroll: true });
  });
  on<KeyboardEvent>(flow.el, "keydown", (event) => {
    const word = wordAt(flow, event.target), { key } = event;
    if (event.altKey) return;
    if (key === "Escape" && store.get().tokens.length) store.set({ tokens: [] });
    else if (word && (key === "Enter" || key === " ")) choose(word, howOf(event));
    else if (/^(Arrow|Home|End|Page)/.test(key)) void move(word, event);
    else return;
    event.preventDefault();
  });

  el.classList.add("fills");
  el.append(search.el, reading, h("p", "quiet small",
    h("span", "shade"), "what it looks at", h("span", "shade"), "what looks at it"), flow.el,
      lists);
  const [, end] = live(el, context, CHOICE, refresh);
  return () => {
    end();
    search.end();
    flow.close();
  };
}

export const text: Panel = { id: "text", title: "Text", place: "right", mount: mountText };
