// Shading words of the text: what the chosen words look at, what looks at them, and the chosen words themselves.
import type { Context } from "../context";
import type { Block, Flow } from "./flow";
import { ALONG, BLOCK, directionsOf, type Direction, type Lines } from "./lines";
import { short } from "./reading";
import { pagesOf } from "./virtual";

const LEAST = 0.03, TOLD = 0.05, STRONG = 0.78;

export class Marks {
  #run = 0;

  readonly #context: Context;
  readonly #lines: Lines;
  readonly #flow: Flow;
  readonly #failed: (error: unknown) => void;

  constructor(context: Context, lines: Lines, flow: Flow, failed: (error: unknown) => void) {
    this.#context = context;
    this.#lines = lines;
    this.#flow = flow;
    this.#failed = failed;
  }

  /** Marks all words that are made; weights that are not here yet are asked for. */
  all(): void {
    this.#run++;
    for (const block of this.#flow.filled) this.block(block);
  }

  block(block: Block): void {
    this.#paint(block);
    const run = this.#run;
    for (const direction of this.#here(block))
      for (const number of this.#needed(block))
        if (!this.#lines.known(direction, number))
          this.#lines.load(direction, number).then(() => run === this.#run && block.filled && this.#paint(block), this.#failed);
  }

  #here(block: Block): Direction[] {
    return directionsOf(this.#context).filter((direction) => this.#context.wordsOf(ALONG[direction]) === block.words);
  }

  /** Blocks of weights under a block of words; the last word may reach beyond it. */
  #needed(block: Block): number[] {
    const last = block.el.lastElementChild as HTMLElement | null;
    return pagesOf(block.start, Math.max(block.stop, Number(last?.dataset["e"] ?? 0)), BLOCK);
  }

  #paint(block: Block): void {
    const context = this.#context, lines = this.#lines, { axis, tokens } = context.store.get();
    const chosen = new Set(context.wordsOf(axis) === block.words ? tokens : []);
    const here = this.#here(block);
    for (const el of block.el.querySelectorAll<HTMLElement>(".w")) {
      const word = { first: Number(el.dataset["t"]), end: Number(el.dataset["e"]) };
      let is = false;
      for (let token = word.first; token < word.end && !is; token++) is = chosen.has(token);
      const from = here.includes("from") ? lines.ofWord("from", word) : 0, by = here.includes("by") ? lines.ofWord("by", word) : 0;
      el.classList.toggle("chosen", is);
      el.classList.toggle("from", from >= LEAST);
      el.classList.toggle("strong", from >= STRONG); // what looks as well keeps its white letters
      el.classList.toggle("by", by >= LEAST);
      el.setAttribute("aria-pressed", String(is));
      el.style.setProperty("--a", String(Math.min(1, from)));
      el.style.setProperty("--b", String(Math.min(1, Math.max(0.35, by))));
      const told = from >= TOLD ? from : by >= TOLD && !is ? by : 0;
      if (told) el.dataset["n"] = short(told);
      else delete el.dataset["n"];
    }
  }
}
