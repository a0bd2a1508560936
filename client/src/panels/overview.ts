// All heads as small maps: layers as groups of buttons, or all heads in the order of a number.
import { paletteOf } from "../colours";
import type { Context, Panel } from "../context";
import { choice, h } from "../dom";
import { goTo } from "../map/controls";
import type { Answer, Call, HeadSummary } from "../protocol";
import { arrowMove, decimal, groupsOf, headName, headNumber, layerName, overviewOf, STATISTICS, whenShown, type Statistic } from "./data";
import { sortedPlaces } from "./sorting";

type Overview = Answer<"overview">;
interface Tile { place: number; button: HTMLButtonElement; canvas: HTMLCanvasElement; call: Call; about: HeadSummary }

const MANY = 128; // heads from which on small maps go without their names

/** How many columns to use for `heads` where `room` fit: a divisor of their number if there is a wide one. */
export function columnsFor(heads: number, room: number): number {
  const most = Math.max(1, Math.min(heads, room));
  for (let columns = most; columns > most / 2; columns--) if (heads % columns === 0) return columns;
  return most;
}

const share = (about: HeadSummary): string => (about.score === null ? "" : ` ${decimal(about.score)}`);

function describe(context: Context, { call, about }: Tile): string {
  const parts = [
    headName(context.run(), call, about.head),
    about.role ? about.role + share(about) : "",
    about.entropy === null ? "" : `entropy ${decimal(about.entropy)} nats`,
    about.sampled ? `from ${about.sampled} rows` : "",
    ...about.alarms,
  ].filter(Boolean);
  const text = parts.join(", ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function paint(tile: Tile, { side, data }: Overview): void {
  const { accent } = paletteOf(tile.canvas);
  const image = new ImageData(side, side), start = tile.place * side * side;
  for (let i = 0; i < side * side; i++) {
    const value = data[start + i];
    image.data.set(accent, 4 * i);
    image.data[4 * i + 3] = value > 0 ? Math.max(6, 255 * Math.min(1, value)) : 0;
  }
  tile.canvas.width = tile.canvas.height = side;
  tile.canvas.getContext("2d")!.putImageData(image, 0, 0);
}

class Overviews {
  #overview: Overview | null = null;
  #tiles: Tile[] = [];
  #order: Statistic | "layer" | "role" = "layer";
  readonly #grid = h("div", { class: "heads" });
  readonly #about = h("p", { class: "quiet heads-about" });
  readonly #title = h("h2", {}, "Heads");

  readonly #el: HTMLElement;
  readonly #context: Context;

  constructor(el: HTMLElement, context: Context) {
    this.#el = el;
    this.#context = context;

    const orders: (readonly [string, string])[] = [["layer", "Layer"], ["role", "Role"], ...STATISTICS.map(([id, title]) => [id, title] as const)];
    el.append(this.#title, choice("Order", orders, "layer", (value) => {
      this.#order = value as Statistic | "layer" | "role";
      this.build();
    }), this.#about, this.#grid);
    this.#grid.addEventListener("keydown", (event) => this.#key(event));
    const tell = (event: Event): void => {
      const tile = this.#tileOf(event.target);
      if (tile) this.#about.textContent = describe(context, tile);
    };
    this.#grid.addEventListener("focusin", tell);
    this.#grid.addEventListener("pointerover", tell);
    this.#grid.addEventListener("pointerleave", () => this.mark());
    this.#grid.addEventListener("click", (event) => {
      const tile = this.#tileOf(event.target);
      if (tile) this.#choose(tile);
    });
  }

  async load(): Promise<void> {
    const { run, item } = this.#context.store.get();
    try {
      this.#overview = await overviewOf(this.#context, run, item);
    } catch (error) {
      this.#context.fail(error);
      return;
    }
    this.build();
  }

  #tileOf(target: EventTarget | null): Tile | undefined {
    const button = (target as Element | null)?.closest?.("button");
    return button ? this.#tiles.find((tile) => tile.button === button) : undefined;
  }

  #tile(place: number, call: Call): Tile {
    const about = this.#overview!.heads[place];
    const canvas = h("canvas", { width: 1, height: 1, "aria-hidden": "true" });
    const order = this.#order, number = order === "layer" || order === "role" ? about.role ?? "" : decimal(about[order]);
    const button = h("button", { type: "button", class: "head", tabindex: -1 }, canvas,
      about.alarms.length > 0 && h("span", { class: "alarm", "aria-hidden": "true" }, "!"),
      h("span", { class: "name" }, headNumber(call, about.head)),
      h("span", { class: about.role === "mixed" ? "role quiet" : "role" }, number));
    const tile = { place, button, canvas, call, about };
    button.setAttribute("aria-label", describe(this.#context, tile));
    return tile;
  }

  /** Places of the heads to show, in groups with their titles. */
  #groups(): [string, string, number[]][] {
    const run = this.#context.run(), { heads } = this.#overview!, order = this.#order;
    if (order === "role") {
      const roles = [...new Set(heads.map(({ role }) => role ?? "no role known"))].sort();
      return roles.map((name) => ["", name, heads.flatMap(({ role }, place) => ((role ?? "no role known") === name ? [place] : []))]);
    }
    if (order !== "layer")
      return [["", `By ${STATISTICS.find(([id]) => id === order)![1].toLowerCase()}, largest first`, sortedPlaces(heads.map((about) => about[order]), true)]];
    const groups = groupsOf(run);
    return groups.flatMap((group) => group.calls.map((call, at): [string, string, number[]] => [
      at === 0 && groups.length > 1 ? group.title : "",
      groups.length > 1 || !layerName(run, call).startsWith("layer") ? call.name : `Layer ${call.layer}`,
      heads.flatMap((about, place) => (about.call === call.id ? [place] : [])),
    ]));
  }

  build(): void {
    if (!this.#overview) return;
    const { heads } = this.#overview, calls = new Map(this.#context.run().calls.map((call) => [call.id, call]));
    const held = this.#tileOf(this.#el.getRootNode() instanceof ShadowRoot ? (this.#el.getRootNode() as ShadowRoot).activeElement : null);
    this.#tiles = [];
    this.#title.textContent = `${heads.length} heads`;
    this.#grid.classList.toggle("many", heads.length > MANY);
    this.#grid.replaceChildren();
    for (const [group, title, places] of this.#groups()) {
      const tiles = places.map((place) => this.#tile(place, calls.get(heads[place].call)!));
      this.#tiles.push(...tiles);
      const section = h("div", { class: "layer", role: "group", "aria-label": group ? `${group}, ${title}` : title },
        h("p", { class: "quiet", "aria-hidden": "true" }, title), h("div", { class: "tiles" }, ...tiles.map((tile) => tile.button)));
      this.#grid.append(...(group ? [h("h3", {}, group)] : []), section);
    }
    this.arrange();
    this.repaint();
    this.mark();
    if (held) this.#tiles.find((tile) => tile.place === held.place)?.button.focus();
  }

  repaint(): void {
    if (this.#overview) for (const tile of this.#tiles) paint(tile, this.#overview);
  }

  arrange(): void {
    const least = this.#grid.classList.contains("many") ? 26 : 50;
    const room = Math.floor((this.#grid.clientWidth + 4) / (least + 4));
    for (const tiles of this.#grid.querySelectorAll<HTMLElement>(".tiles"))
      tiles.style.setProperty("--columns", String(this.#order === "layer" ? columnsFor(tiles.children.length, room) : room));
  }

  #choose({ call, about }: Tile): void {
    goTo(this.#context, call.id, about.head);
    this.#context.announce(describe(this.#context, { call, about } as Tile));
  }

  mark(): void {
    const { call, head } = this.#context.store.get();
    let chosen: Tile | undefined;
    for (const tile of this.#tiles) {
      const is = tile.call.id === call && tile.about.head === head;
      tile.button.setAttribute("aria-pressed", String(is));
      tile.button.tabIndex = is ? 0 : -1;
      if (is) chosen = tile;
    }
    if (!chosen && this.#tiles.length) this.#tiles[0].button.tabIndex = 0;
    this.#about.textContent = chosen ? describe(this.#context, chosen) : "";
  }

  #key(event: KeyboardEvent): void {
    const tile = this.#tileOf(event.target);
    if (!tile || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = this.#step(tile, event.key);
    if (to === null) return;
    event.preventDefault();
    this.#choose(this.#tiles[to]);
    this.#tiles[to].button.focus();
  }

  /** Up and down go by what stands above and below, whatever the number of heads there. */
  #step(tile: Tile, key: string): number | null {
    const at = this.#tiles.indexOf(tile);
    if (key !== "ArrowUp" && key !== "ArrowDown") return arrowMove(key, at, this.#tiles.length, 1);
    const from = tile.button.getBoundingClientRect(), sign = key === "ArrowUp" ? -1 : 1;
    let best: number | null = null, least = Infinity;
    this.#tiles.forEach((other, place) => {
      const box = other.button.getBoundingClientRect(), down = sign * (box.top - from.top);
      if (down < 2) return;
      const far = down * 1000 + Math.abs(box.left - from.left);
      if (far < least) [best, least] = [place, far];
    });
    return best;
  }
}

export const overview: Panel = {
  id: "overview", title: "Heads", place: "left",
  mount(el, context) {
    const shown = new Overviews(el, context);
    const [load, end] = whenShown(el, () => void shown.load());
    const [paintAgain, endPaint] = whenShown(el, () => shown.repaint());
    const observer = new ResizeObserver(() => shown.arrange());
    observer.observe(el);
    context.root.addEventListener("theme", paintAgain);
    const ends = [
      context.store.subscribe(load, ["run", "item"]),
      context.store.subscribe(() => shown.mark(), ["call", "head"]),
    ];
    load();
    return () => {
      end();
      endPaint();
      observer.disconnect();
      context.root.removeEventListener("theme", paintAgain);
      ends.forEach((one) => one());
    };
  },
};
