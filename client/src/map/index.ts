// The map of one head, or of two, in the centre of the page: puts the parts of this folder together.
import { cssOf, paletteOf, type Palette } from "../colours";
import type { Context } from "../context";
import { h } from "../dom";
import type { Call, Run } from "../protocol";
import { addStyle } from "../styles";
import { controls, goTo, legend, titleOf } from "./controls";
import { listen } from "./input";
import { onKey } from "./keys";
import css from "./map.css";
import { drawLabels, drawMarks, type Chosen, type Ink } from "./marks";
import { Minimap } from "./minimap";
import { drawNumbers, drawTiles, hatching, valueAt, type Pane } from "./pane";
import { Reading } from "./reading";
import { makeScale, roundRange, type ColourScale } from "./scale";
import { difference, TileStore, type MapOf, type Tile, type Wanted } from "./tiles";
import {
  cellAt, centreOf, cover, including, isHidden, keysInSight, levelOf, makeView, panned, rowsInSight, topLevel, zoomed,
  type Cell, type Centre, type TileAt, type View,
} from "./viewport";

addStyle(css);

const GLIDE = 160; // milliseconds of a movement that is not made by hand
const ASK_EVERY = 60; // milliseconds between two looks at which tiles are wanted
const GAP = 18;
const CAPTION = 18;

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

/** The state of the map between two pictures. */
export class AttentionMap {
  private readonly canvas = h("canvas", { class: "picture", tabindex: "0", role: "application", "aria-roledescription": "attention map" });
  private readonly box = h("div", { class: "map" });
  private readonly sign = h("p", { class: "sign", hidden: true });
  private readonly help = h("p", { class: "unseen" },
    "Arrow keys move over the pairs, with Shift a page. Plus and minus zoom, 0 shows the whole map. Home and End go to the first and last key. " +
    "Enter chooses the row's word, Space the key's; with Shift they add. Brackets change the head, braces the layer.");
  private readonly pen: CanvasRenderingContext2D;
  private readonly reading: Reading;
  private readonly minimap: Minimap;
  private readonly legend: ReturnType<typeof legend>;
  private readonly tiles: TileStore;
  private readonly ends: (() => void)[] = [];
  private readonly ranges = new Map<string, [number, number]>();
  private panes: Pane[] = [];
  private theme: Theme | null = null;
  private scale: { key: string; value: ColourScale } | null = null;
  private shown: Centre = { x: 0, y: 0, scale: 0 };
  private glide: { from: Centre; start: number } | null = null;
  private byHand = false;
  private spoken = false;
  private pointed = 0;
  private frame = 0;
  private asked = 0;
  private askTimer = 0;

  constructor(el: HTMLElement, private readonly context: Context) {
    const { store } = context;
    this.pen = this.canvas.getContext("2d", { alpha: false })!;
    this.reading = new Reading(context);
    this.minimap = new Minimap((x, y) => this.move(() => store.set({ x, y })));
    this.legend = legend(context, (factor) => this.zoomMiddle(factor));
    this.tiles = new TileStore((params, signal) => context.ask("tile", params, signal), (tile, of) => this.arrived(tile, of),
      (error) => context.transport.kind === "recorded" || context.fail(error));
    const bar = controls(context);
    this.reading.element.id = "saccade-reading";
    this.help.id = "saccade-help";
    this.canvas.setAttribute("aria-describedby", "saccade-help saccade-reading");
    this.box.append(this.canvas, this.minimap.element, this.sign);
    el.append(bar.element, this.help, this.box, this.reading.element, this.legend.element);
    this.shown = store.get();
    context.picture = () => this.picture();
    const observer = new ResizeObserver(() => this.redraw());
    observer.observe(this.box);
    const theme = (): void => {
      this.theme = null;
      this.redraw();
    };
    context.root.addEventListener("theme", theme);
    this.ends.push(bar.end, () => observer.disconnect(), () => context.root.removeEventListener("theme", theme),
      store.subscribe((_, changed) => this.changed(changed)), this.listenToInput(), () => this.tiles.close());
    this.redraw();
  }

  close(): void {
    for (const end of this.ends.splice(0)) end();
    cancelAnimationFrame(this.frame);
    window.clearTimeout(this.askTimer);
    this.reading.drop();
  }

  /** Draws at the next frame. */
  redraw(): void {
    if (!this.frame) this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      this.draw(now);
    });
  }

  private changed(changed: ReadonlySet<string>): void {
    const moved = changed.has("x") || changed.has("y") || changed.has("scale");
    const other = changed.has("run") || changed.has("call");
    if (moved && !this.byHand && !other && !matchMedia("(prefers-reduced-motion: reduce)").matches)
      this.glide = { from: centreOf(this.panes[0]?.view ?? makeView(this.extent(1, 1, 1, 1, true), this.shown)), start: performance.now() };
    this.redraw();
  }

  /** A change made by hand: shown at once, without gliding there. */
  private move(change: () => void): void {
    this.byHand = true;
    this.glide = null;
    change();
    this.byHand = false;
  }

  private extent(width: number, height: number, rows: number, keys: number, square: boolean) {
    return { width: Math.max(1, width), height: Math.max(1, height), rows, keys, square };
  }

  /** Where the picture is now, on its way to what the store says. */
  private centre(now: number, target: Centre, view: (centre: Centre) => View): Centre {
    if (!this.glide) return target;
    const part = (now - this.glide.start) / GLIDE;
    if (part >= 1) {
      this.glide = null;
      return target;
    }
    const eased = 1 - (1 - part) ** 3, from = view(this.glide.from), to = view(target), a = centreOf(from), b = centreOf(to);
    this.redraw();
    return {
      x: a.x + (b.x - a.x) * eased, y: a.y + (b.y - a.y) * eased, scale: from.sx * (to.sx / from.sx) ** eased,
    };
  }

  private source(run: Run, call: Call, head: number): Omit<Pane, "x" | "y" | "view" | "level" | "labelRows" | "labelKeys" | "tile"> {
    const { item, what, pool } = this.context.store.get();
    return {
      map: { run: run.id, call: call.id, head, item: Math.min(item, call.items - 1), what, pool }, call,
      caption: `Layer ${call.layer} head ${head}`,
      rowWords: this.context.words.side(run.id, call.rows.side).from(call.rows.placed), keyWords: this.context.words.side(run.id, call.keys.side),
    };
  }

  /** Why two maps have no difference, or null. */
  private whyNoDifference(a: Call, b: Call): string | null {
    return a.rows.length === b.rows.length && a.keys.length === b.keys.length ? null
      : "Maps of different length have no difference; they are shown side by side.";
  }

  /** The panes of what the store says, laid out on the canvas. */
  private layOut(now: number): Pane[] {
    const { context } = this, state = context.store.get(), { compare } = state;
    const width = this.box.clientWidth, height = this.box.clientHeight, ratio = devicePixelRatio || 1;
    const margin = this.margins(width, height);
    const first = this.source(context.run(), context.call(), state.head);
    const otherRun = compare && context.manifest.runs.find((r) => r.id === compare.run);
    const otherCall = otherRun && otherRun.calls.find((c) => c.id === compare.call);
    const second = otherRun && otherCall && compare ? this.source(otherRun, otherCall, compare.head) : null;
    const subtract = second !== null && compare?.mode === "difference" && !this.whyNoDifference(first.call, second.call);
    const beside = second !== null && !subtract ? [first, second] : [first];
    const stacked = beside.length > 1 && width < height * 0.9, top = beside.length > 1 ? CAPTION : 0;
    const room = {
      width: stacked ? width : width / beside.length, height: stacked ? height / beside.length : height,
    };
    return beside.map((source, i) => {
      const x = (stacked ? 0 : room.width * i) + margin.row, y = (stacked ? room.height * i : 0) + margin.key + top;
      const extent = this.extent(room.width - margin.row - GAP, room.height - margin.key - GAP / 2 - top,
        source.call.rows.length, source.call.keys.length, source.call.kind === "self");
      const view = makeView(extent, this.centre(now, state, (centre) => makeView(extent, centre)));
      const tile = (at: TileAt): Tile | undefined => this.tiles.get(source.map, at);
      const both = (at: TileAt): Tile | undefined => {
        const a = tile(at), b = a && this.tiles.get(second!.map, at);
        if (!a || !b) return undefined;
        const result = difference(a, b, state.what === "weights");
        this.widen(this.rangeKey([first.map, second!.map]), result);
        return result;
      };
      return {
        ...source, x, y, view, level: levelOf(view, ratio), labelRows: true, labelKeys: true, tile: subtract ? both : tile,
        caption: subtract ? `${source.caption} − ${second!.caption}` : beside.length > 1 ? source.caption : "",
      };
    });
  }

  private margins(width: number, height: number): { row: number; key: number } {
    return { row: Math.max(58, Math.min(120, width * 0.13)), key: Math.max(54, Math.min(104, height * 0.15)) };
  }

  private rangeKey(maps: readonly MapOf[]): string {
    return maps.map((m) => [m.run, m.call, m.head, m.item, m.what].join("|")).join(" - ");
  }

  private widen(key: string, { low, high }: { low: number; high: number }): void {
    const [a, b] = this.ranges.get(key) ?? [Infinity, -Infinity];
    if (low >= a && high <= b) return;
    this.ranges.set(key, [Math.min(a, low), Math.max(b, high)]);
    this.redraw();
  }

  private arrived(tile: Tile, of: MapOf): void {
    this.widen(this.rangeKey([of]), tile);
    this.redraw();
  }

  private get subtracting(): boolean {
    return this.panes.length === 1 && this.context.store.get().compare?.mode === "difference" && this.panes[0].caption !== "";
  }

  private otherMap(): MapOf | null {
    const { compare } = this.context.store.get(), pane = this.panes[0];
    return compare && pane ? { ...pane.map, run: compare.run, call: compare.call, head: compare.head } : null;
  }

  /** The colours of all panes: one scale, so that they compare. */
  private scaleFor(theme: Theme): ColourScale {
    const { what, tone } = this.context.store.get(), compared = this.subtracting, other = this.otherMap();
    const maps = this.panes.map((pane) => pane.map);
    const known = (compared && other ? [this.rangeKey([maps[0], other])] : maps.map((m) => this.rangeKey([m])))
      .map((key) => this.ranges.get(key)).filter((r) => r !== undefined);
    const range = roundRange(Math.min(...known.map((r) => r[0])), Math.max(...known.map((r) => r[1])));
    const keys = Math.max(...this.panes.map((pane) => pane.view.keys));
    const key = JSON.stringify([what, tone, compared, range, keys, theme.palette]);
    if (this.scale?.key !== key) this.scale = { key, value: makeScale(theme.palette, what, tone, keys, range, compared) };
    return this.scale.value;
  }

  private readTheme(): Theme {
    const style = getComputedStyle(this.context.root), read = (name: string): string => style.getPropertyValue(name).trim();
    return {
      palette: paletteOf(this.context.root), ground: read("--raised"),
      hatch: hatching(this.pen, read("--line"), read("--paper"), devicePixelRatio || 1),
      ink: { ink: read("--ink"), quiet: read("--quiet"), accent: read("--accent"), paper: read("--paper"), serif: read("--serif"), sans: read("--sans") },
    };
  }

  private draw(now: number): void {
    const width = this.box.clientWidth, height = this.box.clientHeight, ratio = devicePixelRatio || 1, { pen, context } = this;
    if (width < 50 || height < 50) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const theme = (this.theme ??= this.readTheme()), state = context.store.get();
    this.panes = this.layOut(now);
    this.shown = centreOf(this.panes[0].view);
    const scale = this.scaleFor(theme), margin = this.margins(width, height);
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.fillStyle = theme.ink.paper;
    pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
    let missing = 0, sampled = 0;
    this.panes.forEach((pane, i) => {
      pen.save();
      pen.beginPath();
      pen.rect(Math.round(pane.x * ratio), Math.round(pane.y * ratio), Math.round(pane.view.width * ratio), Math.round(pane.view.height * ratio));
      pen.clip();
      const lack = drawTiles(pen, pane, scale, theme.hatch, theme.ground, ratio);
      missing += lack.missing;
      sampled = Math.max(sampled, lack.sampled);
      pen.restore();
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      drawNumbers(pen, pane, scale, theme.ink.ink, theme.ink.paper);
      const chosen = this.chosenIn(pane), cursor = i === this.pointed || this.panes.length > 1 ? state.cursor : null;
      drawMarks(pen, pane, chosen, cursor, this.prompts(pane), theme.ink);
      drawLabels(pen, pane, chosen, cursor, theme.ink, margin);
      if (pane.caption) this.caption(pane, theme.ink, margin.key);
      pen.setTransform(1, 0, 0, 1, 0, 0);
    });
    this.minimap.draw(this.panes[0], scale, cssOf(theme.palette.hidden), theme.ink.accent, ratio);
    this.tell(scale, missing, sampled);
    this.askSoon(now);
  }

  private caption(pane: Pane, ink: Ink, margin: number): void {
    this.pen.font = `600 13px ${ink.sans}`;
    this.pen.textAlign = "left";
    this.pen.textBaseline = "middle";
    this.pen.fillStyle = ink.ink;
    this.pen.fillText(pane.caption, pane.x, this.panes.length > 1 ? pane.y - margin - CAPTION / 2 : 10);
  }

  /** Chosen tokens as rows and as keys of a pane: in self-attention a token is both. */
  private chosenIn(pane: Pane): Chosen {
    const { axis, tokens } = this.context.store.get(), { call } = pane;
    const { side, placed } = call.rows, both = side === call.keys.side;
    return {
      row: axis === "row" ? tokens : both ? tokens.map((t) => t - placed) : [],
      key: axis === "key" ? tokens : both ? tokens.map((t) => t + placed) : [],
    };
  }

  private prompts(pane: Pane): { row: number | null; key: number | null } {
    const sides = this.context.manifest.runs.find((r) => r.id === pane.map.run)?.sides ?? [];
    const of = (id: string): number | null => sides.find((s) => s.id === id)?.prompt ?? null;
    const row = of(pane.call.rows.side);
    return { row: row === null ? null : row - pane.call.rows.placed, key: of(pane.call.keys.side) };
  }

  /** Everything around the canvas that follows from the picture. */
  private tell(scale: ColourScale, missing: number, sampled: number): void {
    const { context } = this, state = context.store.get(), pane = this.panes[Math.min(this.pointed, this.panes.length - 1)];
    const rows = 2 ** pane.level;
    this.sign.textContent = missing ? "computing" : `from 1 row in ${Math.max(2, Math.round(rows / sampled))}; computing`;
    this.sign.hidden = !missing && !sampled;
    if (missing && !this.tiles.busy && this.asked) this.sign.textContent = "coarser: the rest is not here";
    const first = this.panes[0];
    const of = (this.subtracting ? "difference of " : "") + { weights: "weight", logits: "logit", bias: `bias: ${first.call.bias ?? ""}` }[state.what];
    this.legend.show(scale, of, state.what === "weights", first.call.mask ?? (first.call.causal ? "causality" : null));
    const name = this.subtracting ? first.caption : titleOf(context);
    this.canvas.setAttribute("aria-label", `Attention map, ${name.replace("−", "minus")}`);
    this.reading.show(pane, state.cursor, this.otherValue(pane), this.spoken);
    if (!state.cursor && state.compare?.mode === "difference" && this.panes.length > 1)
      this.reading.element.textContent = this.whyNoDifference(this.panes[0].call, this.panes[1].call) ?? "";
  }

  private otherValue(pane: Pane): ((cell: Cell) => { value: number; name: string } | null) | null {
    const other = this.otherMap();
    if (!other) return null;
    const beside = this.panes.length > 1 ? this.panes[1 - this.panes.indexOf(pane)] : null;
    const there: Pane = beside ?? { ...pane, map: other, tile: (at) => this.tiles.get(other, at) };
    return (cell) => {
      if (cell.row >= there.view.rows || cell.key >= there.view.keys) return null;
      const found = valueAt(there, cell.row, cell.key);
      const call = this.context.manifest.runs.find((r) => r.id === there.map.run)?.calls.find((c) => c.id === there.map.call);
      return found && !Number.isNaN(found.value) ? { value: found.value, name: `layer ${call?.layer ?? "?"} head ${there.map.head}` } : null;
    };
  }

  /** Looks now and then at which tiles are wanted: the whole map first, then what is in sight. */
  private askSoon(now: number): void {
    if (this.askTimer) return;
    const wait = Math.max(0, this.asked + ASK_EVERY - now);
    this.askTimer = window.setTimeout(() => {
      this.askTimer = 0;
      this.asked = performance.now();
      this.ask();
    }, wait);
  }

  private ask(): void {
    const rough: Wanted[] = [], wanted: Wanted[] = [], other = this.subtracting ? this.otherMap() : null;
    for (const pane of this.panes) {
      const maps = other ? [pane.map, other] : [pane.map];
      const top = topLevel(pane.view.rows, pane.view.keys);
      for (const map of maps) rough.push({ map, at: { level: top, row: 0, key: 0 }, rough: pane.level !== top });
      for (const at of cover(pane.view, pane.level)) {
        if (pane.call.causal && isHidden(at, pane.call.rows.placed)) continue;
        for (const map of maps) if (at.level !== top) wanted.push({ map, at });
      }
      this.askWords(pane);
    }
    this.tiles.want([...rough, ...wanted]);
  }

  private askWords(pane: Pane): void {
    for (const [words, [start, stop]] of [[pane.rowWords, rowsInSight(pane.view)], [pane.keyWords, keysInSight(pane.view)]] as const)
      if (words.named && stop - start <= MOST_WORDS) words.need(start, stop).then((news) => {
        if (news) this.redraw();
      }, (error: unknown) => {
        if (this.context.transport.kind !== "recorded") this.context.fail(error);
      });
  }

  /** The pane at a point of the canvas, and the point within its plot. */
  private paneAt(x: number, y: number): { pane: Pane; index: number; x: number; y: number } {
    let index = this.panes.findIndex((p) => x < p.x + p.view.width + GAP / 2 && y < p.y + p.view.height + GAP / 2);
    if (index < 0) index = this.panes.length - 1;
    const pane = this.panes[index];
    return { pane, index, x: x - pane.x, y: y - pane.y };
  }

  private cellNear(x: number, y: number): { pane: Pane; index: number; cell: Cell | null; axis: "row" | "key" | null } {
    const at = this.paneAt(x, y), { view } = at.pane;
    const cell = cellAt(view, Math.max(0, at.x), Math.max(0, at.y));
    return { ...at, cell, axis: at.x < 0 && at.y >= 0 ? "row" : at.y < 0 && at.x >= 0 ? "key" : null };
  }

  private listenToInput(): () => void {
    const { store } = this.context;
    const view = (next: View): void => this.move(() => store.set(centreOf(next)));
    const pointer = listen(this.canvas, {
      pan: (dx, dy) => view(panned(this.panes[0].view, dx, dy)),
      zoom: (x, y, factor) => {
        const at = this.paneAt(x, y);
        view(zoomed(at.pane.view, Math.max(0, at.x), Math.max(0, at.y), factor));
        this.panes = this.layOut(performance.now()); // several steps may come before the next picture
      },
      point: (x, y) => {
        const near = this.cellNear(x, y);
        this.pointed = near.index;
        this.spoken = false;
        store.set({ cursor: near.axis ? null : near.cell });
      },
      leave: () => store.set({ cursor: null }),
      choose: (x, y, add, other) => this.choose(this.cellNear(x, y), add, other),
      takesWheel: () => this.context.transport.kind !== "widget" || (this.canvas.getRootNode() as ShadowRoot).activeElement === this.canvas,
    });
    const key = (event: KeyboardEvent): void => {
      if (onKey(event, this.context, {
        cursor: () => this.startOfCursor(), step: (dr, dk) => this.stepCursor(dr, dk), zoom: (factor) => this.zoomMiddle(factor),
        go: (row, key) => this.cursorTo(row, key), page: () => this.page(),
        choose: (axis, add) => this.chooseWord(axis, this.startOfCursor(), add),
      })) event.preventDefault();
    };
    this.canvas.addEventListener("keydown", key);
    return () => {
      pointer();
      this.canvas.removeEventListener("keydown", key);
    };
  }

  private choose(near: { pane: Pane; cell: Cell | null; axis: "row" | "key" | null }, add: boolean, other: boolean): void {
    if (!near.cell) return;
    const own = near.pane.map.run === this.context.run().id;
    if (!own) {
      this.context.announce("Words of the other text are chosen after switching to its run.");
      return;
    }
    this.chooseWord(near.axis ?? (other ? "key" : "row"), near.cell, add);
  }

  private chooseWord(axis: "row" | "key", cell: Cell, add: boolean): void {
    const { context } = this, token = cell[axis], call = context.call();
    const words = context.wordsOf(axis), word = words.at(token), length = (axis === "row" ? call.rows : call.keys).length;
    const first = word ? Math.max(0, word.first) : token, end = word ? Math.min(length, word.end) : token + 1;
    context.choose(axis, Array.from({ length: end - first }, (_, i) => first + i), add);
    context.announce(`${axis === "row" ? "Row" : "Key"} ${words.name(token)} chosen; ${context.store.get().tokens.length} tokens together.`);
  }

  private picture(): ReturnType<Context["picture"]> {
    const view = this.panes[0]?.view;
    return view ? { rows: rowsInSight(view), keys: keysInSight(view), canvas: this.canvas } : null;
  }

  // The keyboard's cursor

  private startOfCursor(): Cell {
    const { cursor } = this.context.store.get(), { view } = this.panes[0];
    if (cursor) return cursor;
    const [r0, r1] = rowsInSight(view), [k0, k1] = keysInSight(view);
    const row = Math.floor((r0 + r1) / 2), last = this.panes[0].call.causal ? Math.min(k1 - 1, row + this.panes[0].call.rows.placed) : k1 - 1;
    return { row, key: Math.max(k0, Math.min(Math.floor((k0 + k1) / 2), last)) };
  }

  /** One page in cells, less a little that stays in sight. */
  private page(): Cell {
    const { view, level } = this.panes[0], size = 2 ** level;
    return { row: Math.max(1, Math.floor((0.9 * view.height) / view.sy / size)), key: Math.max(1, Math.floor((0.9 * view.width) / view.sx / size)) };
  }

  private stepCursor(rows: number, keys: number): void {
    const { cursor } = this.context.store.get(), at = this.startOfCursor(), size = 2 ** this.panes[0].level;
    if (cursor) this.cursorTo(at.row + rows * size, at.key + keys * size);
    else this.cursorTo(at.row, at.key);
  }

  private cursorTo(row: number, key: number): void {
    const { view } = this.panes[0];
    const cell = { row: Math.max(0, Math.min(view.rows - 1, row)), key: Math.max(0, Math.min(view.keys - 1, key)) };
    this.spoken = true;
    this.pointed = 0;
    this.context.store.set({ cursor: cell });
    this.move(() => this.context.store.set(centreOf(including(view, cell))));
  }

  /** Zooms around the cursor, or the middle of the plot; null: the whole map. */
  private zoomMiddle(factor: number | null): void {
    const { store } = this.context, pane = this.panes[0];
    if (!pane) return;
    if (factor === null) return store.set({ scale: 0 });
    const { view } = pane, { cursor } = store.get();
    const at = (offset: number, scale: number, token: number | undefined, room: number): number =>
      token === undefined ? room / 2 : Math.max(0, Math.min(room, offset + (token + 0.5) * scale));
    store.set(centreOf(zoomed(view, at(view.ox, view.sx, cursor?.key, view.width), at(view.oy, view.sy, cursor?.row, view.height), factor)));
    return undefined;
  }
}

const MOST_WORDS = 131_072; // tokens in sight whose words are fetched; beyond, labels are numbers
export { goTo };
