// Running text of any length: blocks of tokens, of which only those near the view hold words.
import { h } from "../dom";
import type { Word, Words } from "../words";
import { BLOCK } from "./lines";

export interface Block { words: Words; place: number; start: number; stop: number; el: HTMLElement; numbered: boolean; filled: boolean }
type Mark = (block: Block) => void;

/** The word as the text shows it: what cannot be seen is shown by its label. */
const shown = (word: Word): string => (word.special || !word.text.trim() ? word.label : word.text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, "\ufffd"));

/** The text between two words: blanks and line ends as they are, at least where the text has any. */
const gapOf = (word: Word): string => word.gap.replace(/\n{3,}/g, "\n\n").replace(/[\u0000-\u0008\u000b-\u001f]/g, "");

/** The step at which a token of generated text came, or null: "3", "3–5" for a word of several tokens. */
export function stepsOf(first: number, end: number, prompt: number | null): string | null {
  if (prompt === null || end <= prompt) return null;
  const from = Math.max(first, prompt) - prompt + 1, to = end - prompt;
  return from === to ? String(from) : `${from}–${to}`;
}

export class Flow {
  readonly el: HTMLElement;
  #blocks: Block[] = [];
  readonly #observer: IntersectionObserver;
  readonly #ends: (() => void)[] = [];
  #guessed = false;
  #target: { words: Words; token: number; until: number } | null = null;

  readonly #mark: Mark;
  readonly #failed: (error: unknown) => void;

  constructor(mark: Mark, failed: (error: unknown) => void) {
    this.#mark = mark;
    this.#failed = failed;

    this.el = h("div", { class: "flow", tabindex: -1 });
    this.#observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const block = this.#blocks.find((one) => one.el === target);
        if (block && isIntersecting) this.#fill(block).catch(this.#failed);
        else if (block) this.#empty(block);
      }
    }, { root: this.el, rootMargin: "500px 0px" });
  }

  /** Shows these sides, one after the other; with headings where there are several. */
  show(sides: readonly { words: Words; length: number; title: string; prompt: number | null }[]): void {
    this.clear();
    for (const { words, length, title, prompt } of sides) {
      if (sides.length > 1) this.el.append(h("h3", { class: "side" }, title));
      for (let start = 0, place = 0; start < length; start += BLOCK, place++) {
        const stop = Math.min(length, start + BLOCK);
        const el = h("div", { class: "block", dir: "auto", style: `--part: ${(stop - start) / BLOCK}`, "data-prompt": prompt });
        this.#blocks.push({ words, place, start, stop, el, numbered: length > BLOCK, filled: false });
        this.el.append(el);
        this.#observer.observe(el);
      }
      this.#ends.push(words.onload(() => this.#retry(words)));
    }
  }

  get filled(): Block[] {
    return this.#blocks.filter((block) => block.filled);
  }

  #blockOf(words: Words, token: number): Block | undefined {
    return this.#blocks.find((block) => block.words === words && block.start <= token && token < block.stop);
  }

  /** The element of the word of a token, if it is made. */
  find(words: Words, token: number): HTMLElement | undefined {
    const first = words.at(token)?.first ?? token;
    return this.#blockOf(words, first)?.el.querySelector<HTMLElement>(`[data-t="${first}"]`) ?? undefined;
  }

  /** Brings a token into view and gives its element; null where its words do not come. */
  async reveal(words: Words, token: number, calm = false): Promise<HTMLElement | null> {
    const filled = async (): Promise<void> => {
      await words.need(token, token + 1);
      const block = this.#blockOf(words, words.at(token)?.first ?? token);
      if (block) await this.#fill(block);
    };
    await filled().catch(this.#failed);
    const el = this.find(words, token);
    if (!el) return null;
    if (!calm || !this.#sees(el)) {
      this.#target = { words, token, until: performance.now() + 800 };
      this.#centre(el);
    }
    return el;
  }

  #sees(el: HTMLElement): boolean {
    const box = el.getBoundingClientRect(), room = this.el.getBoundingClientRect();
    return box.top >= room.top && box.bottom <= room.bottom;
  }

  #centre(el: HTMLElement): void {
    const box = el.getBoundingClientRect(), room = this.el.getBoundingClientRect();
    this.el.scrollTop += box.top - room.top - room.height / 2 + box.height / 2;
  }

  async #fill(block: Block): Promise<void> {
    if (block.filled) return;
    await block.words.need(block.start, block.stop);
    if (block.filled || !block.el.isConnected) return;
    const words = block.words.named
      ? block.words.between(block.start, block.stop).filter((word) => word.first >= block.start)
      : Array.from({ length: block.stop - block.start }, (_, i) => plainWord(block.start + i));
    if (!words.length && block.words.named) return;
    block.filled = true;
    const prompt = block.el.dataset["prompt"];
    block.el.replaceChildren(...this.#made(block, words, prompt === undefined ? null : Number(prompt)));
    block.el.style.minHeight = "";
    if (!this.#guessed) {
      this.#guessed = true;
      this.el.style.setProperty("--block", `${(block.el.offsetHeight * BLOCK) / (block.stop - block.start)}px`);
    }
    this.#mark(block);
    const target = this.#target;
    const wanted = target && performance.now() < target.until ? this.find(target.words, target.token) : undefined;
    if (wanted && !this.#sees(wanted)) this.#centre(wanted);
  }

  #made(block: Block, words: readonly Word[], prompt: number | null): (Node | string)[] {
    const out: (Node | string)[] = [];
    if (block.numbered) out.push(h("span", { class: "at", "aria-hidden": "true" }, block.start.toLocaleString("en")));
    for (const word of words) {
      if (word.gap && word.first > block.start) out.push(gapOf(word));
      const steps = stepsOf(word.first, word.end, prompt);
      const kind = ["w", word.special && "special", steps && "made", shown(word).length > 20 && "endless"].filter(Boolean).join(" ");
      out.push(h("span", {
        class: kind, role: "button", tabindex: -1, "aria-pressed": "false", "data-t": word.first, "data-e": word.end,
        "data-s": steps, dir: word.special ? "ltr" : null, title: steps && `Generated at step ${steps}`,
        "aria-label": steps && `${word.label}, generated at step ${steps}`,
      }, shown(word)));
    }
    return out;
  }

  #empty(block: Block): void {
    if (!block.filled || block.el.contains((this.el.getRootNode() as ShadowRoot).activeElement)) return;
    block.el.style.minHeight = `${block.el.offsetHeight}px`;
    block.el.replaceChildren();
    block.filled = false;
  }

  #retry(words: Words): void {
    const room = this.el.getBoundingClientRect();
    for (const block of this.#blocks) {
      if (block.filled || block.words !== words) continue;
      const box = block.el.getBoundingClientRect();
      if (box.bottom > room.top - 500 && box.top < room.bottom + 500 && room.height) this.#fill(block).catch(this.#failed);
    }
  }

  clear(): void {
    this.#observer.disconnect();
    this.#ends.splice(0).forEach((end) => end());
    this.#blocks = [];
    this.#guessed = false;
    this.el.replaceChildren();
  }
}

const plainWord = (token: number): Word =>
  ({ text: String(token), label: `token ${token}`, first: token, end: token + 1, special: false, gap: " ", tokens: [] });
