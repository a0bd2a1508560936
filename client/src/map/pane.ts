// One map on the canvas: its tiles, with coarser ones where finer ones are still to come.
import { cssOf, readable, type Palette } from "../colours";
import { h, paintInto } from "../dom";
import type { Call } from "../protocol";
import type { Words } from "../words";
import type { Ink } from "./marks";
import { cellText, colourInto, type ColourScale, type Tone } from "./scale";
import type { MapOf, Tile } from "./tiles";
import { cover, isHidden, keysInSight, rowsInSight, TILE, topLevel, type TileAt, type View } from "./viewport";

/** What is drawn: where (the plot's corner on the canvas, CSS pixels), which part of the map, which head. */
export interface Pane {
  x: number;
  y: number;
  view: View;
  level: number;
  map: MapOf;
  call: Call;
  caption: string;
  rowWords: Words;
  keyWords: Words;
  /** The tile of a place, or of the difference at it; undefined while it is not here. */
  tile(at: TileAt): Tile | undefined;
}

/** What a drawing could not show exactly. */
export interface Shortfall {
  /** Tiles that are missing, with or without a coarser one in their place. */
  missing: number;
  /** Rows used of each bin's rows, for the tiles that are sampled; 0 when none is. */
  sampled: number;
}

const painted = new WeakMap<Tile, { scale: ColourScale; canvas: HTMLCanvasElement }>();

/** A tile as a picture of one pixel a bin. */
export function paint(tile: Tile, scale: ColourScale): HTMLCanvasElement {
  const known = painted.get(tile);
  if (known?.scale === scale) return known.canvas;
  const canvas = known?.canvas ?? h("canvas");
  paintInto(canvas, tile.keys, tile.rows, (pixels) => colourInto(pixels, tile.data, scale));
  painted.set(tile, { scale, canvas });
  return canvas;
}

/** A hidden pair is hatched: no colour of the scale looks like it. */
export function hatching(
  context: CanvasRenderingContext2D, line: string, ground: string, ratio: number,
): CanvasPattern {
  const size = Math.round(6 * ratio), tile = h("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d")!;
  pen.fillStyle = ground;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = line;
  pen.lineWidth = ratio;
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat")!;
}

/** The tile itself or its nearest coarser stand-in, with the part of it that covers the place. */
function find(pane: Pane, at: TileAt): { tile: Tile; from: TileAt } | undefined {
  const top = topLevel(pane.view.rows, pane.view.keys);
  for (let up = 0; at.level + up <= top; up++) {
    const from = { level: at.level + up, row: at.row >> up, key: at.key >> up };
    const tile = pane.tile(from);
    if (tile) return { tile, from };
  }
  return undefined;
}

/** Draws within the plot of a pane only; the transform is the identity before, and what it was after. */
export function clipped(context: CanvasRenderingContext2D, { x, y, view }: Pane, ratio: number,
  draw: () => void): void {
  context.save();
  context.beginPath();
  context.rect(Math.round(x * ratio), Math.round(y * ratio), Math.round(view.width * ratio),
    Math.round(view.height * ratio));
  context.clip();
  draw();
  context.restore();
}

/** Draws the tiles of a pane in device pixels; the canvas's transform is the identity. */
export function drawTiles(
  context: CanvasRenderingContext2D, pane: Pane, scale: ColourScale, hatch: CanvasPattern, ground: string,
  ratio: number,
): Shortfall {
  const { view } = pane, size = TILE * 2 ** pane.level;
  const px = (key: number): number => Math.round((pane.x + view.ox + key * view.sx) * ratio);
  const py = (row: number): number => Math.round((pane.y + view.oy + row * view.sy) * ratio);
  const lack: Shortfall = { missing: 0, sampled: 0 };
  for (const at of cover(view, pane.level)) {
    const k0 = at.key * size, k1 = Math.min(view.keys, k0 + size);
    const r0 = at.row * size, r1 = Math.min(view.rows, r0 + size);
    const x = px(k0), y = py(r0), width = px(k1) - x, height = py(r1) - y;
    const hidden = pane.call.causal && isHidden(at, pane.call.rows.placed);
    const found = hidden ? undefined : find(pane, at);
    context.fillStyle = hidden || found ? hatch : ground;
    context.fillRect(x, y, width, height);
    if (!hidden && found?.from.level !== at.level) lack.missing++;
    if (!found) continue;
    if (found.tile.sampled) lack.sampled = Math.max(lack.sampled, found.tile.sampled);
    const bin = 2 ** found.from.level, left = k0 / bin - found.from.key * TILE, top = r0 / bin - found.from.row * TILE;
    const across = (k1 - k0) / bin, down = (r1 - r0) / bin;
    context.imageSmoothingEnabled = width < across; // bins smaller than a pixel are averaged, larger ones stay squares
    context.drawImage(paint(found.tile, scale), left, top, across, down, x, y, width, height);
  }
  return lack;
}

/** The number of the bin that holds a pair, from a tile that is here. */
export function valueAt(
  pane: Pane, row: number, key: number, level = pane.level,
): { value: number; sampled: number } | null {
  const size = 2 ** level, bin = { row: Math.floor(row / size), key: Math.floor(key / size) };
  const tile = pane.tile({ level, row: Math.floor(bin.row / TILE), key: Math.floor(bin.key / TILE) });
  if (!tile) return null;
  return { value: tile.data[(bin.row % TILE) * tile.keys + (bin.key % TILE)], sampled: tile.sampled };
}

/** Writes the weights into the cells, where these are large enough. */
export function drawNumbers(
  context: CanvasRenderingContext2D, pane: Pane, scale: ColourScale, { ink, paper }: Palette, { sans }: Ink, tone: Tone,
): void {
  const { view } = pane;
  if (pane.level > 0 || Math.min(view.sx, view.sy) < 34) return;
  context.font = `11px ${sans}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const [r0, r1] = rowsInSight(view), [k0, k1] = keysInSight(view);
  for (let row = r0; row < r1; row++) for (let key = k0; key < k1; key++) {
    const value = valueAt(pane, row, key, 0)?.value;
    if (value === undefined || Number.isNaN(value)) continue;
    context.fillStyle = cssOf(readable(scale.colourAt(scale.place(value)), ink, paper));
    const x = pane.x + view.ox + (key + 0.5) * view.sx, y = pane.y + view.oy + (row + 0.5) * view.sy;
    context.fillText(cellText(value, pane.map.what, tone), x, y);
  }
}
