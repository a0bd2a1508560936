// The overview's small maps: heads that are off are crossed out, and each may show what it is worth to this text.
import type { Context } from "../context";
import { choice, h, on } from "../dom";
import { activeIn, waiting } from "../panels/data";
import { onKey } from "../panels/dialog";
import { messageOf } from "../parts";
import type { Switches } from "./index";
import { reach, signed, signedWithin, worths } from "./numbers";

type Worths = Map<string, number[]>;
const HINT = "x switches the head in focus, else the shown one, off.";
const MEANING = "Estimated rise of the loss of this text if one head alone is switched off (first order), in nats per token.";

const placeOf = (tile: HTMLElement): [string, number] => {
  const [head, ...call] = tile.dataset["head"]!.split(" ");
  return [call.join(" "), Number(head)];
};

/** Marks the tiles now and whenever the overview makes them anew. */
export function markOverview(context: Context, { off, turn, changes }: Switches): () => void {
  const { store, root } = context, section = root.querySelector<HTMLElement>("[data-panel=overview]")!;
  const names = new WeakMap<HTMLElement, string>(), asked = new Map<string, Promise<Worths>>();
  let worth: Worths | null = null, most = 0;

  const mark = (): void => {
    const { run } = store.get();
    for (const tile of section.querySelectorAll<HTMLElement>(".head[data-head]")) {
      const [call, head] = placeOf(tile), isOff = off.has(run, call, head), value = worth?.get(call)?.[head];
      if (!names.has(tile)) names.set(tile, tile.getAttribute("aria-label")!);
      tile.classList.toggle("h-off", isOff);
      tile.setAttribute("aria-keyshortcuts", "x");
      const told = names.get(tile)! + (isOff ? ", off" : "")
        + (value === undefined ? "" : `, worth ${signed(value)} nats a token`);
      tile.setAttribute("aria-label", told);
      tile.title = value === undefined ? "" : told; // of many heads the numbers are too small to be seen
      shade(tile, value, most);
    }
  };

  const scale = h("div", { class: "h-scale", hidden: true }), about = h("p", { class: "quiet small" }, HINT);
  const colour = async (how: string): Promise<void> => {
    const { run } = store.get();
    worth = null;
    mark(); // another run has other numbers
    const found = how === "worth" ? await worthsOf(run) : null;
    if (store.get().run !== run || chosen() !== how) return;
    worth = found;
    most = worth ? reach([...worth.values()].flat()) : 0;
    scale.hidden = !worth;
    scale.replaceChildren(h("span", {}, `${signed(-most)} hurts`), h("i"), h("span", {}, `helps ${signed(most)}`));
    about.textContent = worth ? `${MEANING} ${HINT}` : HINT;
    mark();
  };
  const worthsOf = (run: string): Promise<Worths> => {
    const found = asked.get(run)
      ?? context.ask("importance", { run }).then(({ data }) => worths(context.run().calls, data));
    asked.set(run, found);
    found.catch(() => asked.delete(run));
    return found;
  };
  const chooser = choice("Colour by", [["maps", "Weights"], ["worth", "Worth to this text"]], "maps",
    (how) => void recolour(how));
  const chosen = (): string => chooser.querySelector("select")!.value;
  const recolour = async (how: string): Promise<void> => {
    const end = waiting(box, context);
    try {
      await colour(how);
    } catch (error) {
      chooser.querySelector("select")!.value = "maps";
      await colour("maps");
      if (!(error instanceof DOMException)) {
        about.textContent = messageOf(error);
        context.announce(about.textContent);
      }
    }
    end();
  };
  const box = h("div", "h-box", chooser, scale, about);
  section.querySelector(".heads-about")!.before(box);

  /** Of the head in focus, else of the shown one. */
  const key = (): void => {
    const tile = activeIn(section)?.closest<HTMLElement>(".head[data-head]"), { call, head } = store.get();
    turn(...(tile ? placeOf(tile) : [call, head] as const));
    if (!tile || root.dataset["size"] === "wide") store.set({ panel: "heads" }); // else it hides the overview
  };
  const watcher = new MutationObserver(mark);
  watcher.observe(section, { childList: true, subtree: true });
  mark();
  const ends = [onKey(context, "x", key), on(changes, "change", mark), () => watcher.disconnect(), () => box.remove(),
    store.subscribe(() => void recolour(chosen()), ["run"])];
  return () => ends.forEach((end) => end());
}

/** Shows a number over the small map, coloured by its share of the scale; undefined shows the map. */
function shade(tile: HTMLElement, value: number | undefined, most: number): void {
  const known = tile.querySelector(".h-worth");
  if (value === undefined) return known?.remove();
  const text = signedWithin(value, most), kind = value < 0 ? "h-less" : "h-more";
  if (known?.textContent === text) return; // else the observer would be told of its own marks for ever
  known?.remove();
  tile.append(h("b", { class: `h-worth ${kind}`, style: `--share: ${most ? Math.abs(value) / most : 0}` }, h("span", {}, text)));
}
