// Running text of any length: blocks of tokens, of which only those near the view hold words.
import { h } from "../dom";
import { visible } from "../map/labels";
import { commas, tokensFrom } from "../parts";
import type { Word, Words } from "../words";
import { activeIn } from "./data";
import { BLOCK } from "./lines";

export interface Block {
  words: Words;
  start: number;
  stop: number;
  prompt: number | null;
  el: HTMLElement;
  filled: boolean;
}
export interface FlowSide { words: Words; length: number; title: string; prompt: number | null }

export interface Flow {
  el: HTMLElement;
  /** Shows these sides, one after the other; with headings where there are several. */
  show(sides: readonly FlowSide[]): void;
  filled(): Block[];
  /** Brings a token into view, `calm`: only if it is not; gives its element, or null where its words do not come. */
  reveal(words: Words, token: number, calm?: boolean): Promise<HTMLElement | null>;
  close(): void;
}

const SPARE = 500; // pixels beyond the view in which words are made
const plainWord = (token: number): Word =>
  ({ text: String(token), label: `token ${token}`, first: token, end: token + 1, special: false, gap: " ",
    tokens: [] });
const breaks = (blank: string): string => blank.replace(/[^\n]/g, "");

/**
 * A word as it is shown, and the line breaks before and behind it: outside of the word, so that its frame stays on one
 * line. Each break has its sign in the word.
 */
export function broken({ text, label, special }: Word): [before: string, shown: string, behind: string] {
  const [, before, inside, behind] = /^(\s*(?=\S)|)([^]*?)(\s*)$/.exec(text)!;
  if (special || !inside) return ["", label, special ? "" : breaks(behind)];
  const lines = inside.split("\n").map(visible).join("⏎\n");
  return [breaks(before), visible(before) + lines + visible(behind), breaks(behind)];
}

/** What stands between two words: blanks and line breaks as they are. */
const gapOf = (gap: string): string => gap.replace(/[^\s]+/g, visible);

/** The step at which a token of generated text came, or null: "3", "3–5" for a word of several tokens. */
export function stepsOf(first: number, end: number, prompt: number | null): string | null {
  if (prompt === null || end <= prompt) return null;
  const from = Math.max(first, prompt) - prompt + 1, to = end - prompt;
  return from === to ? String(from) : `${from}–${to}`;
}

function made(word: Word, prompt: number | null): (HTMLElement | string)[] {
  const steps = stepsOf(word.first, word.end, prompt), [before, shown, behind] = broken(word);
  return [before, h("span", {
    class: "w" + (word.special ? " special" : ""), role: "button", tabindex: -1,
      "aria-pressed": "false",
    "data-t": word.first, "data-e": word.end, "data-s": steps, dir: word.special && "ltr",
    "aria-label": steps && `${word.label}, generated at step ${steps}`,
  }, shown), behind];
}

/** `mark` is told of every block that is made, `failed` of words that do not come. */
export function makeFlow(mark: (block: Block) => void, failed: (error: unknown) => void): Flow {
  const el = h("div", { class: "flow", role: "group",
    "aria-label": "Words of the text; arrow keys move, with Shift they choose several" });
  let blocks: Block[] = [], guessed = false, target: { words: Words; token: number; until: number } | null = null;

  const blockOf = (words: Words, token: number): Block | undefined =>
    blocks.find((block) => block.words === words && block.start <= token && token < block.stop);
  const find = (words: Words, token: number): HTMLElement | null => {
    const first = words.at(token)?.first ?? token;
    return blockOf(words, first)?.el.querySelector<HTMLElement>(`[data-t="${first}"]`) ?? null;
  };
  /** Puts a word into the middle unless it is in view. */
  const centre = (word: HTMLElement, calm: boolean): void => {
    const box = word.getBoundingClientRect(), room = el.getBoundingClientRect();
    if (!calm || box.top < room.top || box.bottom > room.bottom) el.scrollTop += (box.top
      + box.bottom - room.top - room.bottom) / 2;
  };
  const fill = async (block: Block): Promise<void> => {
    const { words, start, stop, prompt } = block;
    await words.need(start, stop);
    if (block.filled || !block.el.isConnected) return;
    const all = words.named ? words.between(start, stop).filter(({ first }) => first >= start)
      : tokensFrom(start, stop).map(plainWord);
    block.filled = all.length > 0;
    block.el.replaceChildren(
      ...(el.classList.contains("long") ? [h("span", { class: "at", "aria-hidden": "true" },
        commas(start))] : []),
      ...all.flatMap((word) => [word.first > start ? gapOf(word.gap) : "", ...made(word, prompt)]).filter(Boolean));
    block.el.style.minHeight = "";
    if (!guessed && block.filled) el.style.setProperty("--block",
      `${(block.el.offsetHeight * BLOCK) / (stop - start)}px`);
    guessed ||= block.filled;
    mark(block);
    // Blocks that are made above what was asked for must not move it away.
    const wanted = target && performance.now() < target.until && find(target.words, target.token);
    if (wanted) centre(wanted, true);
  };
  const empty = (block: Block): void => {
    if (!block.filled || block.el.contains(activeIn(el))) return;
    block.el.style.minHeight = `${block.el.offsetHeight}px`;
    block.el.replaceChildren();
    block.filled = false;
  };
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const block = blocks.find((one) => one.el === target);
      if (block && isIntersecting) fill(block).catch(failed);
      else if (block) empty(block);
    }
  }, { root: el, rootMargin: `${SPARE}px 0px` });
  const close = (): void => {
    observer.disconnect();
    [blocks, guessed] = [[], false];
    el.replaceChildren();
  };
  return {
    el, close,
    filled: () => blocks.filter((block) => block.filled),
    show(sides) {
      close();
      el.classList.toggle("long", sides.some(({ length }) => length > BLOCK));
      for (const { words, length, title, prompt } of sides) {
        if (sides.length > 1) el.append(h("p", "side quiet", title));
        for (let start = 0; start < length; start += BLOCK) {
          const stop = Math.min(length, start + BLOCK),
            part = h("div", { class: "block", dir: "auto", style: `--part: ${(stop - start) / BLOCK}` });
          blocks.push({ words, start, stop, prompt, el: part, filled: false });
          el.append(part);
          observer.observe(part);
        }
      }
    },
    async reveal(words, token, calm = false) {
      try {
        await words.need(token, token + 1);
        const block = blockOf(words, words.at(token)?.first ?? token);
        if (block) await fill(block);
      } catch (error) {
        failed(error);
      }
      const word = find(words, token);
      target = { words, token, until: performance.now() + 800 };
      if (word) centre(word, calm);
      return word;
    },
  };
}
