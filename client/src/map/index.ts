// The map of one head, or of two, in the centre of the page: puts the parts of this folder together.
import { cssOf, mix, paletteOf, type Palette } from "../colours";
import type { Axis, Context, Picture } from "../context";
import { h, on } from "../dom";
import { tokensFrom } from "../parts";
import { byId } from "../protocol";
import { sameText } from "../runs";
import { addStyle } from "../styles";
import { controls, legend, titleOf } from "./controls";
import { listen } from "./input";
import { listenEverywhere, onKey, zoomBy } from "./keys";
import css from "./map.css";
import { drawCaption, drawLabels, drawMarks, INKS, type Chosen, type Ink } from "./marks";
import { Minimap } from "./minimap";
import { clipped, drawNumbers, drawTiles, hatching, valueAt, type Pane } from "./pane";
import { GAP, layOut, Ranges, wantedTiles, type Layout } from "./panes";
import { Reading, type Other } from "./reading";
import { makeScale, mostUnder, roundRange, roundUp, type ColourScale } from "./scale";
import { TileStore } from "./tiles";
import {
  cellAt, centreOf, cover, keysInSight, makeView, panned, rowsInSight, zoomed, type Cell, type Centre, type Extent,
  type TileAt,
  type View,
} from "./viewport";

addStyle(css);

const GLIDE = 160; // milliseconds of a movement that is not made by hand
const ASK_EVERY = 60; // milliseconds between two looks at which tiles are wanted
const SETTLED = 400; // milliseconds after a movement at which tiles that failed are asked for again
const MOST_WORDS = 131_072; // tokens in sight whose words are fetched; beyond, labels are numbers
const COMING = "computing";
const HELP =
  "Arrow keys walk over the pairs and say their numbers, Enter chooses the row's word, plus and minus zoom; a question " +
  "mark lists all keys.";

export function mountMap(el: HTMLElement, context: Context): () => void {
  const map = new AttentionMap(el, context);
  return () => map.close();
}

interface Theme {
  palette: Palette;
  ink: Ink;
  hatch: CanvasPattern;
  ground: string;
}

interface Near {
  pane: Pane;
  index: number;
  cell: Cell | null;
  /** The margin that was hit, or null for the map itself. */
  axis: Axis | null;
}

class AttentionMap {
  readonly #context: Context;
  readonly #canvas = h("canvas", {
    class: "picture", tabindex: "0", role: "application",
    "aria-describedby": "help reading",
  });
  readonly #box: HTMLElement;
  readonly #sign = h("p", { class: "sign", hidden: true });
  readonly #again = h("button", { class: "again", hidden: true, onclick: () => this.#retry() },
    "Part of the map did not come. Try again");
  readonly #pen = this.#canvas.getContext("2d", { alpha: false })!;
  readonly #reading: Reading;
  readonly #minimap: Minimap;
  readonly #legend: ReturnType<typeof legend>;
  readonly #tiles: TileStore;
  readonly #ranges = new Ranges();
  readonly #ends: (() => void)[] = [];
  readonly #complain = (error: unknown): void => {
    if (this.#context.transport.kind !== "recorded") this.#context.fail(error); // a saved page has only a part
  };
  #layout: Layout | null = null;
  #theme: Theme | null = null;
  #scale: { key: string; value: ColourScale } | null = null;
  #glide: { from: Centre; start: number } | null = null;
  #byHand = false;
  #byKey = false;
  #pointed = 0;
  #frame = 0;
  #asked = 0;
  #sampled = false;
  #askTimer = 0;
  #settleTimer = 0;

  constructor(el: HTMLElement, context: Context) {
    this.#context = context;
    const zoom = (factor: number | null): void => zoomBy(context, this.#panes[0], factor);
    this.#reading = new Reading(context, this.#complain);
    this.#minimap = new Minimap((x, y) => this.#move(() => context.store.set({ x, y })));
    this.#legend = legend(context, zoom);
    this.#tiles = new TileStore((params, signal) => context.ask("tile", params, signal), (tile, of) => {
      this.#ranges.add(Ranges.key(of), tile);
      this.#redraw();
    }, (error) => {
      this.#complain(error);
      if (this.#tiles.gaveUp) this.#redraw();
    });
    const bar = controls(context);
    this.#box = h("div", "map", this.#canvas, this.#minimap.element, this.#sign, this.#again);
    el.append(bar.element, h("p", { class: "unseen", id: "help" }, HELP), this.#box, this.#reading.element,
      this.#legend.element);
    context.picture = () => this.#picture();
    const observer = new ResizeObserver(() => this.#redraw());
    observer.observe(this.#box);
    const theme = (): void => {
      this.#theme = null;
      this.#redraw();
    };
    this.#ends.push(bar.end, () => observer.disconnect(), on(context.root, "theme", theme),
      context.store.subscribe((_, changed) => this.#changed(changed)), () => this.#tiles.close());
    this.#listen();
  }

  close(): void {
    for (const end of this.#ends.splice(0)) end();
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#askTimer);
    clearTimeout(this.#settleTimer);
    this.#reading.drop();
  }

  get #panes(): Pane[] {
    return (this.#layout ??= this.#layOut(performance.now())).panes;
  }

  #redraw(): void {
    this.#frame ||= requestAnimationFrame((now) => {
      this.#frame = 0;
      this.#draw(now);
    });
  }

  #changed(changed: ReadonlySet<string>): void {
    const moved = changed.has("x") || changed.has("y") || changed.has("scale");
    const other = changed.has("run") || changed.has("call");
    if (moved && !other && !this.#byHand && !matchMedia("(prefers-reduced-motion: reduce)").matches)
      this.#glide = { from: centreOf(this.#panes[0].view), start: performance.now() };
    if (moved) {
      clearTimeout(this.#settleTimer);
      this.#settleTimer = setTimeout(() => this.#retry(), SETTLED);
    }
    this.#redraw();
  }

  #retry(): void {
    if (!this.#tiles.gaveUp) return;
    this.#tiles.retry();
    this.#redraw();
  }

  /** A change made by hand is shown at once, without gliding there. */
  #move(change: () => void): void {
    this.#byHand = true;
    this.#glide = null;
    change();
    this.#byHand = false;
    this.#layout = null; // several steps may come before the next picture
  }

  #show(view: View): void {
    this.#move(() => this.#context.store.set(centreOf(view)));
  }

  /** What is shown now, on the way to what the store says. */
  #centre(now: number, extent: Extent): Centre {
    const target = this.#context.store.get(), part = this.#glide ? (now - this.#glide.start) / GLIDE : 1;
    if (!this.#glide || part >= 1) {
      this.#glide = null;
      return target;
    }
    const eased = 1 - (1 - Math.max(0, part)) ** 3;
    const from = makeView(extent, this.#glide.from), to = makeView(extent, target);
    const a = centreOf(from), b = centreOf(to), scale = from.sx * (to.sx / from.sx) ** eased;
    // The centre moves with the zoom, so that the point that stays does stay.
    const share = from.sx === to.sx ? eased : (1 / from.sx - 1 / scale) / (1 / from.sx - 1 / to.sx);
    this.#redraw();
    return { x: a.x + (b.x - a.x) * share, y: a.y + (b.y - a.y) * share, scale };
  }

  #layOut(now: number): Layout {
    const room = { width: this.#box.clientWidth, height: this.#box.clientHeight, ratio: devicePixelRatio || 1 };
    return layOut(this.#context, this.#tiles, this.#ranges, room, (extent) => this.#centre(now, extent));
  }

  #readTheme(): Theme {
    const { root } = this.#context, palette = paletteOf(root), style = getComputedStyle(root);
    const read = (name: string): string => style.getPropertyValue(`--${name}`).trim();
    return {
      palette, ground: read("raised"),
      hatch: hatching(this.#pen, cssOf(mix(palette.paper, palette.quiet, 0.17)), read("paper"), devicePixelRatio || 1),
      ink: Object.fromEntries(INKS.map((name) => [name, read(name)])) as unknown as Ink,
    };
  }

  /** The colours of all panes: one scale, so that they compare. */
  #scaleFor({ panes, subtracted }: Layout, palette: Palette): ColourScale {
    const { what, tone } = this.#context.store.get();
    const maps = subtracted ? [Ranges.key(panes[0].map, subtracted)] : panes.map((pane) => Ranges.key(pane.map));
    const range = roundRange(...this.#ranges.over(maps));
    const keys = Math.max(...panes.map((pane) => pane.view.keys));
    const top = tone === "linear" && !subtracted ? this.#top(panes) : 1;
    const key = JSON.stringify([what, tone, subtracted !== null, range, keys, palette, top]);
    if (this.#scale?.key !== key)
      this.#scale = { key, value: makeScale(palette, what, tone, keys, range, subtracted !== null, top) };
    return this.#scale.value;
  }

  /**
   * What few means in view so far are above at this zoom, as a round number: those of the first rows are means of few
   * keys. Weights of single pairs reach to 1.
   */
  #top(panes: readonly Pane[]): number {
    const names = panes.filter(({ map, level }) => level && map.pool === "mean").map(({ map, level, view, tile }) => {
      const name = `${level} ${Ranges.key(map)}`;
      for (const at of cover(view, level)) {
        const found = tile(at);
        if (found) this.#ranges.add(name, { low: 0, high: mostUnder(found) });
      }
      return name;
    });
    const top = names.length ? this.#ranges.over(names)[1] : 1;
    return top > 0 ? roundUp(top) : 1;
  }

  #draw(now: number): void {
    const { clientWidth: width, clientHeight: height } = this.#box, ratio = devicePixelRatio || 1, pen = this.#pen;
    if (width < 50 || height < 50) return;
    const wide = Math.round(width * ratio), high = Math.round(height * ratio);
    if (this.#canvas.width !== wide || this.#canvas.height !== high)
      Object.assign(this.#canvas, { width: wide, height: high });
    const theme = (this.#theme ??= this.#readTheme()), layout = (this.#layout = this.#layOut(now));
    const scale = this.#scaleFor(layout, theme.palette), { panes } = layout, { cursor } = this.#context.store.get();
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.fillStyle = theme.ink.paper;
    pen.fillRect(0, 0, wide, high);
    let missing = 0, sampled = 0;
    for (const pane of panes) {
      const chosen = this.#chosenIn(pane);
      pen.setTransform(1, 0, 0, 1, 0, 0);
      clipped(pen, pane, ratio, () => {
        const lack = drawTiles(pen, pane, scale, theme.hatch, theme.ground, ratio);
        missing += lack.missing;
        sampled = Math.max(sampled, lack.sampled);
        pen.scale(ratio, ratio);
        drawNumbers(pen, pane, scale, theme.palette, theme.ink, this.#context.store.get().tone);
        drawMarks(pen, pane, chosen, cursor, this.#prompts(pane), theme.ink);
      });
      pen.scale(ratio, ratio);
      drawLabels(pen, pane, chosen, cursor, theme.ink, layout.margin);
      drawCaption(pen, pane, panes.length > 1 ? pane.y - layout.margin.key - 9 : 10, theme.ink);
    }
    this.#minimap.draw(panes[0], layout.margin, scale, cssOf(theme.palette.hidden), theme.ink.accent, ratio);
    this.#sampled = sampled > 0;
    this.#tell(layout, scale, missing, sampled);
    this.#askSoon(now);
  }

  /** Chosen tokens as rows and as keys of a pane: in self-attention a token is both. */
  #chosenIn({ call, map }: Pane): Chosen {
    const { axis, tokens } = this.#context.store.get(), { side, placed } = call.rows, both = side === call.keys.side;
    if (map.run !== this.#context.run().id && !this.#sameText(map.run)) return { row: [], key: [] };
    return {
      row: axis === "row" ? tokens : both ? tokens.map((t) => t - placed) : [],
      key: axis === "key" ? tokens : both ? tokens.map((t) => t + placed) : [],
    };
  }

  /** Whether another run has the text of the shown one: two checkpoints. */
  #sameText(run: string): boolean {
    const other = byId(this.#context.manifest.runs, run);
    return other !== undefined && sameText(other, this.#context.run());
  }

  #prompts({ map, call }: Pane): Record<Axis, number | null> {
    const sides = byId(this.#context.manifest.runs, map.run)?.sides;
    const of = (id: string): number | null => byId(sides, id)?.prompt ?? null, row = of(call.rows.side);
    return { row: row === null ? null : row - call.rows.placed, key: of(call.keys.side) };
  }

  /** Everything around the canvas that follows from the picture. */
  #tell({ panes, subtracted, note }: Layout, scale: ColourScale, missing: number, sampled: number): void {
    const state = this.#context.store.get(), { call } = panes[0],
      pane = panes[Math.min(this.#pointed, panes.length - 1)];
    const rows = Math.max(2, Math.round(2 ** pane.level / (sampled || 1)));
    const coming = this.#tiles.busy || !this.#asked;
    this.#sign.textContent = missing ? (coming ? COMING : "coarser than asked")
      : `from 1 row in ${rows}${coming ? "; " + COMING : ""}`;
    this.#again.hidden = !this.#tiles.gaveUp || this.#context.transport.kind === "recorded";
    this.#sign.hidden = (!missing && !sampled) || !this.#again.hidden;
    const of = { weights: "weight", logits: "logit", bias: `bias ${call.bias ?? ""}` }[state.what];
    const mask = call.mask ?? (call.causal ? "causality" : null);
    this.#legend(scale, subtracted ? "difference" : of, state.what === "weights", mask);
    const name = subtracted ? panes[0].caption.replace("−", "minus") : titleOf(this.#context);
    this.#canvas.setAttribute("aria-label", `Attention map, ${name}`);
    const own = subtracted ? { ...pane, tile: (at: TileAt) => this.#tiles.get(pane.map, at) } : pane;
    this.#reading.show(own, state.cursor, this.#otherValue(pane), this.#byKey, note);
  }

  /** The same cell in the map that is compared with. */
  #otherValue(pane: Pane): (cell: Cell) => Other | null {
    const { panes, subtracted, subtractedName } = this.#layout!;
    const there: Pane | undefined = subtracted
      ? { ...pane, map: subtracted, tile: (at) => this.#tiles.get(subtracted, at) } : panes.find((p) => p !== pane);
    return (cell) => {
      if (!there || cell.row >= there.view.rows || cell.key >= there.view.keys) return null;
      const found = valueAt(there, cell.row, cell.key, pane.level);
      const name = subtracted ? subtractedName : there.caption;
      return found && !Number.isNaN(found.value) ? { value: found.value, name: name.replace("Layer", "layer") } : null;
    };
  }

  /** Looks now and then at which tiles and words are wanted. */
  #askSoon(now: number): void {
    this.#askTimer ||= setTimeout(() => {
      this.#askTimer = 0;
      this.#asked = performance.now();
      const layout = this.#layout ?? this.#layOut(this.#asked);
      this.#tiles.want(wantedTiles(layout));
      for (const { rowWords, keyWords, view } of layout.panes)
        for (const [words, [start, stop]] of [[rowWords, rowsInSight(view)], [keyWords, keysInSight(view)]] as const)
          if (words.named && stop - start <= MOST_WORDS)
            words.need(start, stop).then((news) => news && this.#redraw(), this.#complain);
      if (!this.#tiles.busy && this.#sign.textContent!.endsWith(COMING)) this.#redraw();
    }, Math.max(0, this.#asked + ASK_EVERY - now));
  }

  #near(x: number, y: number): Near {
    const panes = this.#panes, inside = GAP / 2;
    const found = panes.findIndex((p) => x < p.x + p.view.width + inside && y < p.y + p.view.height + inside);
    const index = found < 0 ? panes.length - 1 : found, pane = panes[index], px = x - pane.x, py = y - pane.y;
    const cell = cellAt(pane.view, Math.max(0, px), Math.max(0, py));
    return { pane, index, cell, axis: px < 0 && py >= 0 ? "row" : py < 0 && px >= 0 ? "key" : null };
  }

  #listen(): void {
    const { store, transport } = this.#context, canvas = this.#canvas;
    listen(canvas, {
      pan: (dx, dy) => this.#show(panned(this.#panes[0].view, dx, dy)),
      zoom: (x, y, factor) => {
        const { pane } = this.#near(x, y);
        this.#show(zoomed(pane.view, Math.max(0, x - pane.x), Math.max(0, y - pane.y), factor));
      },
      point: (x, y) => {
        const near = this.#near(x, y);
        this.#pointed = near.index;
        this.#byKey = false;
        store.set({ cursor: near.axis ? null : near.cell });
      },
      leave: () => store.set({ cursor: null }),
      choose: (x, y, add, other) => {
        const { cell, axis, pane } = this.#near(x, y);
        if (cell && (pane.map.run === this.#context.run().id || this.#sameText(pane.map.run)))
          this.#choose(axis ?? (other ? "key" : "row"), cell, add);
      },
      takesWheel: () => transport.kind !== "widget" || (canvas.getRootNode() as ShadowRoot).activeElement === canvas,
    });
    const target = {
      context: this.#context, pane: () => this.#panes[0], show: (view: View) => this.#show(view),
      choose: (axis: Axis, cell: Cell, add: boolean) => this.#choose(axis, cell, add),
      walked: () => {
        this.#byKey = true;
        this.#pointed = 0;
      },
    };
    this.#ends.push(...listenEverywhere(this.#context, () => this.#panes[0]));
    on<KeyboardEvent>(canvas, "keydown", (event) => onKey(event, target) && event.preventDefault());
  }

  #choose(axis: Axis, cell: Cell, add: boolean): void {
    const context = this.#context, token = cell[axis], words = context.wordsOf(axis), word = words.at(token);
    const length = (axis === "row" ? context.call().rows : context.call().keys).length;
    const first = word ? Math.max(0, word.first) : token, end = word ? Math.min(length, word.end) : token + 1;
    context.choose(axis, tokensFrom(first, end), add);
    context.announce(`${words.name(token)}, ${axis}: ${context.store.get().tokens.length} tokens are chosen.`);
  }

  #picture(): Picture {
    const { view } = this.#panes[0];
    return {
      rows: rowsInSight(view), keys: keysInSight(view), canvas: this.#canvas, scale: this.#scale!.value,
      sampled: this.#sampled,
    };
  }
}
