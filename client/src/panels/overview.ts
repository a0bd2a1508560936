// All heads as small maps: layers as groups of buttons, or all heads in the order of a number.
import { paletteOf, type Rgb } from "../colours";
import type { Context, Panel } from "../context";
import { choice, h, on, paintInto } from "../dom";
import { goTo } from "../map/controls";
import { byId, type Answer, type Call, type HeadSummary } from "../protocol";
import { activeIn, capital, decimal, groupsOf, headName, headNumber, layerName, overviewOf, STATISTICS, live, unread,
  type Statistic } from "./data";
import { onKey } from "./dialog";
import { filtersOf, passes } from "./filters";
import { sortedPlaces } from "./sorting";

interface Tile { place: number; button: HTMLButtonElement; canvas: HTMLCanvasElement; call: Call; about: HeadSummary }

const MANY = 128; // heads from which on small maps go without their names

/** How many columns to use for `heads` where `room` fit: a divisor of their number if there is a wide one. */
export function columnsFor(heads: number, room: number): number {
  const most = Math.max(1, Math.min(heads, room));
  for (let columns = most; columns > most / 2; columns--) if (heads % columns === 0) return columns;
  return most;
}

/** A head in a sentence: its name, role, entropy and alarms. */
export const describe = (context: Context, call: Call, about: HeadSummary): string => capital([
  headName(context.run(), call, about.head),
  about.role && about.role + (about.score === null ? "" : ` ${decimal(about.score)}`),
  about.entropy !== null && `entropy ${decimal(about.entropy)} nats`,
  about.sampled && `from ${about.sampled} rows`, ...about.alarms,
].filter(Boolean).join(", "));

function paint({ canvas, place }: Tile, { side, data }: Answer<"overview">, [r, g, b]: Rgb): void {
  const size = side * side;
  paintInto(canvas, side, side, (pixels) => {
    for (let i = 0; i < size; i++) {
      const value = data[place * size + i];
      pixels[i] = value > 0 ? (Math.max(6, 255 * Math.min(1, value)) << 24) | (b << 16) | (g << 8) | r : 0;
    }
  });
}

/** Titles of a group and of its row, and the places of its heads. */
type Row = [group: string, title: string, places: number[]];

function rowsOf(context: Context, heads: readonly HeadSummary[], order: Statistic | "layer"): Row[] {
  if (order !== "layer")
    return [["", `By ${STATISTICS.find(([id]) => id === order)![1].toLowerCase()}, largest first`,
      sortedPlaces(heads.map((about) => about[order]), true)]];
  const run = context.run(), groups = groupsOf(run);
  return groups.flatMap((group) => group.calls.map((call): Row => [
    groups.length > 1 ? group.title : "",
    groups.length > 1 ? call.name : capital(layerName(run, call)),
    heads.flatMap((about, place) => (about.call === call.id ? [place] : [])),
  ]));
}

export const overview: Panel = {
  id: "overview", title: "Heads", place: "left",
  mount(el, context) {
    const { store } = context, title = h("h2", {}, "Heads"), said = h("p", "quiet heads-about"),
      grid = h("div", {});
    let answer: Answer<"overview"> | null = null, tiles: Tile[] = [], order: Statistic | "layer" = "layer",
      filter = "";

    const tileOf = (target: EventTarget | null): Tile | undefined =>
      tiles.find(({ button }) => button.contains(target as Node | null));
    const tell = (tile: Tile | undefined): void =>
      void (said.textContent = tile ? describe(context, tile.call, tile.about) : "");
    const repaint = (): void => {
      const { accent } = paletteOf(grid);
      for (const tile of tiles) paint(tile, answer!, accent);
    };

    const arrange = (): void => {
      const room = Math.floor((grid.clientWidth + 4) / (grid.className ? 30 : 54));
      for (const part of grid.querySelectorAll<HTMLElement>(".tiles"))
        part.style.setProperty("--columns", String(order === "layer" ? columnsFor(part.children.length, room) : room));
    };
    const mark = (): void => {
      const { call, head } = store.get(), chosen = tiles.find((tile) => tile.call.id === call
        && tile.about.head === head);
      for (const tile of tiles) {
        tile.button.setAttribute("aria-pressed", String(tile === chosen));
        tile.button.tabIndex = tile === (chosen ?? tiles[0]) ? 0 : -1;
      }
      tell(chosen);
    };
    const make = (place: number): Tile => {
      const about = answer!.heads[place], call = byId(context.run().calls, about.call)!;
      const canvas = h("canvas", { width: 1, height: 1, "aria-hidden": "true" });
      const button = h("button", { class: "head", "data-head": `${about.head} ${call.id}`, tabindex: -1, "aria-label": describe(context, call, about) }, canvas,
        about.alarms.length > 0 && h("span", "alarm", "!"),
        about.entropy !== null && h("i", "quiet", decimal(about.entropy)),
        h("span", "name quiet", headNumber(call, about.head)),
        h("span", { class: about.role === "mixed" ? "role quiet" : "role" },
          order === "layer" ? about.role : decimal(about[order])));
      return { place, button, canvas, call, about };
    };
    const build = (): void => {
      const held = tileOf(activeIn(grid)), { heads } = answer!;
      let last = "";
      tiles = [];
      const count = heads.filter((about) => passes(about, filter)).length;
      title.textContent = `${filter && `${count} of `}${heads.length} heads`;
      title.append(h("small", { class: "quiet" }, " and their entropy in nats"));
      grid.className = count > MANY ? "many" : "";
      grid.replaceChildren(...rowsOf(context, heads, order).flatMap(([group, name, places]) => {
        const row = places.filter((place) => passes(heads[place], filter)).map(make);
        if (!row.length) return [];
        tiles.push(...row);
        const heading = group !== last && h("h3", {}, (last = group));
        return [heading, h("div", { class: "layer", role: "group", "aria-label": `${group} ${name}` },
          h("p", "quiet small", name),
            h("div", "tiles", ...row.map(({ button }) => button)))].filter((part) => part !== false);
      }));
      arrange();
      repaint();
      mark();
      tiles.find(({ place }) => place === held?.place)?.button.focus();
    };
    const choose = (tile: Tile): void => {
      goTo(context, tile.call.id, tile.about.head);
      tile.button.focus();
      context.announce(describe(context, tile.call, tile.about));
    };
    const key = (event: KeyboardEvent): void => {
      const tile = tileOf(event.target as Node), { key } = event;
      if (!tile || event.altKey || event.ctrlKey || event.metaKey) return;
      const at = tiles.indexOf(tile), columns = Number(tile.button.parentElement!.style.getPropertyValue("--columns"));
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at,
        End: tiles.length - 1 - at }[key];
      if (by === undefined) return;
      event.preventDefault();
      if (tiles[at + by]) choose(tiles[at + by]);
      else context.fail("No more heads.");
    };
    on(grid, "keydown", key);
    on(grid, "click", ({ target }) => {
      const tile = tileOf(target);
      if (!tile) return;
      choose(tile);
      if (context.root.dataset["size"] === "narrow") store.set({ panel: "map" });
    });
    on(grid, "pointerleave", mark);
    on(grid, "pointerover", ({ target }) => tell(tileOf(target)));

    const orders: [string, string][] = [["layer", "Layer"],
      ...STATISTICS.map(([id, name]): [string, string] => [id, name])];
    const ordering = choice("Order", orders, "layer", (value) => {
      order = value as Statistic | "layer";
      build();
    }), tools = h("div", "tools");
    el.append(title, tools, said, grid);
    const [, end] = live(el, context, ["run", "item"], async () => {
      const { run, item } = store.get();
      answer = await overviewOf(context, run, item);
      const filters = filtersOf(answer.heads);
      if (!filters.some(([value]) => value === filter)) filter = "";
      tools.replaceChildren(ordering, choice("Show", filters, filter, (value) => {
        filter = value;
        build();
        context.announce(title.firstChild!.textContent!);
      }));
      build();
    });
    const observer = new ResizeObserver(arrange);
    observer.observe(el);
    const ends = [end, ...(context.manifest.step ? [] : [onKey(context, "x", () => context.fail(unread(context.manifest)))]), on(context.root, "theme", repaint), store.subscribe(mark, ["call", "head"]), () => observer.disconnect()];
    return () => ends.forEach((one) => one());
  },
};
