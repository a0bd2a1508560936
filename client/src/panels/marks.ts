// Shading words of the text: what the chosen words look at, what looks at them, and the chosen words themselves.
import type { Context } from "../context";
import type { Block } from "./flow";
import { ALONG, BLOCK, directionsOf, type Direction, type Lines } from "./lines";
import { short } from "./reading";
import { pagesOf } from "./virtual";

const LEAST = 0.05, STRONG = 0.78;

function paint(context: Context, lines: Lines, block: Block, here: readonly Direction[]): void {
  const { axis, tokens } = context.store.get(), chosen = new Set(context.wordsOf(axis) === block.words ? tokens : []);
  for (const el of block.el.querySelectorAll<HTMLElement>(".w")) {
    const first = Number(el.dataset["t"]), end = Number(el.dataset["e"]);
    let is = false;
    for (let token = first; token < end; token++) is ||= chosen.has(token);
    const [from, by] = (["from", "by"] as const).map((direction) =>
      (here.includes(direction) ? lines.ofWord(direction, { first, end }) : 0));
    const told = from >= LEAST ? from : by >= LEAST && !is ? by : 0;
    for (const [name, has] of [["chosen", is], ["from", from >= LEAST], ["strong", from >= STRONG],
      ["by", by >= LEAST]] as const) el.classList.toggle(name, has);
    el.setAttribute("aria-pressed", String(is));
    el.style.setProperty("--a", String(Math.min(1, from)));
    el.style.setProperty("--b", String(Math.min(1, Math.max(0.35, by))));
    if (told) el.dataset["n"] = short(told);
    else delete el.dataset["n"];
  }
  thin(block);
}

/** Of numbers that would meet, leaves out the smaller. */
function thin(block: Block): void {
  const told = [...block.el.querySelectorAll<HTMLElement>("[data-n]")];
  const places = told.map((el) => [el.offsetLeft + el.offsetWidth / 2, el.offsetTop] as const);
  let kept = -1;
  told.forEach((el, i) => {
    const [x, y] = places[i], room = 7 * el.dataset["n"]!.length;
    const other = told[kept], meets = other && places[kept][1] === y && Math.abs(places[kept][0] - x) < room;
    const less = meets && Number(el.dataset["n"]) <= Number(other.dataset["n"]);
    if (meets) delete (less ? el : other).dataset["n"];
    if (!less) kept = i;
  });
}

/** Marks a block by what is known, and again when the weights under it have come; its last word may reach beyond it. */
export async function markBlock(context: Context, lines: Lines, block: Block): Promise<void> {
  const state = context.store.get(), last = block.el.lastElementChild as HTMLElement | null;
  const here = directionsOf(context).filter((direction) => context.wordsOf(ALONG[direction]) === block.words);
  const numbers = pagesOf(block.start, Math.max(block.stop, Number(last?.dataset["e"] ?? 0)), BLOCK);
  paint(context, lines, block, here);
  if (!here.some((direction) => numbers.some((number) => !lines.known(direction, number)))) return;
  await Promise.all(here.flatMap((direction) => numbers.map((number) => lines.load(direction, number))));
  const { tokens, axis } = context.store.get();
  if (block.filled && tokens === state.tokens && axis === state.axis) paint(context, lines, block, here);
}
