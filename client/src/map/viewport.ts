// Where tokens are on the screen. Lengths are CSS pixels of the plot, without margins; x runs over keys, y over rows.

/** The room for a map of `rows` x `keys` tokens. Square: cells are; else each axis fits its own length. */
export interface Extent {
  width: number;
  height: number;
  rows: number;
  keys: number;
  square: boolean;
}

/** Key token k starts at ox + k * sx, row token i at oy + i * sy. */
export interface View extends Extent {
  sx: number;
  sy: number;
  ox: number;
  oy: number;
}

/** What the store holds of a view; scale 0 is the whole map. */
export interface Centre {
  x: number;
  y: number;
  scale: number;
}

export interface Cell {
  row: number;
  key: number;
}

/** Side of a cell, in pixels: at most, and at most where the whole map is shown. */
export const LARGEST_CELL = 64;
const LARGEST_WHOLE = 40;
export const TILE = 256;

const clamp = (value: number, low: number, high: number): number => Math.max(low, Math.min(high, value));

function fits(extent: Extent): { sx: number; sy: number } {
  const sx = Math.min(LARGEST_WHOLE, extent.width / extent.keys);
  const sy = Math.min(LARGEST_WHOLE, extent.height / extent.rows);
  const both = Math.min(sx, sy);
  return extent.square ? { sx: both, sy: both } : { sx, sy };
}

/** Where an axis starts: within the plot if it is shorter, else so that it fills the plot. */
const origin = (centre: number, scale: number, length: number, room: number): number =>
  length * scale <= room ? 0 : clamp(room / 2 - centre * scale, room - length * scale, 0);

export function makeView(extent: Extent, { x, y, scale }: Centre): View {
  const fit = fits(extent), ratio = fit.sy / fit.sx;
  const sx = clamp(scale || fit.sx, fit.sx, Math.max(fit.sx, LARGEST_CELL / Math.max(1, ratio)));
  const sy = sx * ratio;
  return {
    ...extent, sx, sy, ox: origin(x, sx, extent.keys, extent.width), oy: origin(y, sy, extent.rows, extent.height),
  };
}

/** The middle of what is in sight of the map, in tokens: a whole map may be smaller than its plot. */
export const middleOf = ({ ox, oy, sx, sy, keys, rows, width, height }: View): { x: number; y: number } => ({
  x: (Math.min(width, ox + keys * sx) / 2 - ox) / sx, y: (Math.min(height, oy + rows * sy) / 2 - oy) / sy,
});

export const isWhole = (view: View): boolean => view.sx <= fits(view).sx * 1.001;

/** The centre of a view as the store holds it. */
export function centreOf(view: View): Centre {
  return {
    x: (view.width / 2 - view.ox) / view.sx, y: (view.height / 2 - view.oy) / view.sy, scale: isWhole(view) ? 0
      : view.sx,
  };
}

/** The view after a zoom by `factor` that keeps the point (px, py) where it is. */
export function zoomed(view: View, px: number, py: number, factor: number): View {
  const key = (px - view.ox) / view.sx, row = (py - view.oy) / view.sy;
  const { sx, sy } = makeView(view, { x: 0, y: 0, scale: Math.max(1e-9, view.sx * factor) });
  return makeView(view, { x: key + (view.width / 2 - px) / sx, y: row + (view.height / 2 - py) / sy, scale: sx });
}

/** The view after dragging the map by (dx, dy) pixels. */
export const panned = (view: View, dx: number, dy: number): View => makeView(view, {
  x: (view.width / 2 - view.ox - dx) / view.sx, y: (view.height / 2 - view.oy - dy) / view.sy, scale: view.sx,
});

/** The view that has a cell inside, moved as little as possible. */
export function including(view: View, cell: Cell): View {
  const shift = (start: number, size: number, room: number): number =>
    start < 0 ? -start : start + size > room ? room - start - size : 0;
  return panned(view, shift(view.ox + cell.key * view.sx, view.sx, view.width),
    shift(view.oy + cell.row * view.sy, view.sy, view.height));
}

/** The cell under a point of the plot, or null outside of the map. */
export function cellAt(view: View, px: number, py: number): Cell | null {
  const key = Math.floor((px - view.ox) / view.sx), row = Math.floor((py - view.oy) / view.sy);
  const inPlot = px >= 0 && py >= 0 && px < view.width && py < view.height;
  return inPlot && row >= 0 && key >= 0 && row < view.rows && key < view.keys ? { row, key } : null;
}

/** The tokens [start, end) of an axis that are in sight. */
export function inSight(offset: number, scale: number, length: number, room: number): [number, number] {
  return [clamp(Math.floor(-offset / scale), 0, length), clamp(Math.ceil((room - offset) / scale), 0, length)];
}

export const rowsInSight = (view: View): [number, number] => inSight(view.oy, view.sy, view.rows, view.height);
export const keysInSight = (view: View): [number, number] => inSight(view.ox, view.sx, view.keys, view.width);

/** The level at which one tile holds the whole map. */
export const topLevel = (rows: number, keys: number): number =>
  Math.max(0, Math.ceil(Math.log2(Math.max(rows, keys) / TILE)));

/** The level whose bins (2 ** level tokens) are nearest to one device pixel. */
export function levelOf(view: View, pixelRatio: number): number {
  const tokens = 1 / (Math.max(view.sx, view.sy) * pixelRatio);
  return clamp(Math.round(Math.log2(tokens)), 0, topLevel(view.rows, view.keys));
}

export interface TileAt {
  level: number;
  row: number;
  key: number;
}

/** The tiles of a level that are in sight, nearest to the centre of the plot first. */
export function cover(view: View, level: number): TileAt[] {
  const size = TILE * 2 ** level;
  const [r0, r1] = rowsInSight(view), [k0, k1] = keysInSight(view);
  const found: [number, TileAt][] = [];
  for (let row = Math.floor(r0 / size); row * size < r1; row++)
    for (let key = Math.floor(k0 / size); key * size < k1; key++) {
      const dx = view.ox + (key + 0.5) * size * view.sx - view.width / 2;
      const dy = view.oy + (row + 0.5) * size * view.sy - view.height / 2;
      found.push([dx * dx + dy * dy, { level, row, key }]);
    }
  return found.sort((a, b) => a[0] - b[0]).map(([, at]) => at);
}

/** Whether causality hides every pair of a tile; `placed` is the position of row 0 among the keys. */
export const isHidden = (at: TileAt, placed: number): boolean => {
  const size = TILE * 2 ** at.level;
  return at.key * size > (at.row + 1) * size - 1 + placed;
};
