// The keyboard's cursor: it walks over the cells that are drawn, so that every value can be reached and heard.
import type { Context } from "../context";
import { onKey as onKeyOf } from "../panels/dialog";
import { step as stepHead } from "./controls";
import type { Pane } from "./pane";
import { centreOf, including, keysInSight, makeView, middleOf, rowsInSight, zoomed, type Cell, type View } from "./viewport";

const ARROWS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
};
const END = Number.MAX_SAFE_INTEGER;

export interface KeyTarget {
  context: Context;
  /** The pane that the cursor walks on. */
  pane(): Pane;
  /** Shows a view at once. */
  show(view: View): void;
  /** Says that the cursor was moved by a key. */
  walked(): void;
  choose(axis: "row" | "key", cell: Cell, add: boolean): void;
}

/** Where the cursor is, or begins: the middle of what is in sight, on a pair that causality does not hide. */
function cursorOf({ context, pane }: KeyTarget): Cell {
  const { cursor } = context.store.get(), { view, call } = pane();
  if (cursor) return cursor;
  const [r0, r1] = rowsInSight(view), [k0, k1] = keysInSight(view), row = Math.floor((r0 + r1) / 2);
  const last = call.causal ? Math.min(k1 - 1, row + call.rows.placed) : k1 - 1;
  return { row, key: Math.max(k0, Math.min(Math.floor((k0 + k1) / 2), last)) };
}

function go(target: KeyTarget, row: number, key: number): void {
  const { view } = target.pane();
  const { store } = target.context, before = store.get().cursor, cell = { row: Math.max(0, Math.min(view.rows - 1, row)), key: Math.max(0, Math.min(view.keys - 1, key)) };
  target.walked();
  store.set({ cursor: cell });
  target.show(including(view, cell));
  if (before?.row === cell.row && before.key === cell.key) target.context.fail("The map ends here.");
}

/** Moves by drawn cells, or by pages, of which a little stays in sight; the first time the cursor only appears. */
function walk(target: KeyTarget, [rows, keys]: [number, number], page: boolean): void {
  const started = target.context.store.get().cursor !== null, at = cursorOf(target), { view, level } = target.pane();
  const bin = 2 ** level, leap = (room: number, scale: number): number =>
    !started ? 0 : page ? Math.max(bin, Math.floor((0.9 * room) / scale / bin) * bin) : bin;
  go(target, at.row + rows * leap(view.height, view.sy), at.key + keys * leap(view.width, view.sx));
}

/** Zooms around the cursor, or the middle of what is in sight; null: the whole map. */
export function zoomBy(context: Context, pane: Pane, factor: number | null): void {
  const { store } = context, { view } = pane, before = store.get(), { cursor } = before;
  if (factor === null) store.set({ scale: 0 });
  else if (cursor) {
    const at = (offset: number, scale: number, token: number, room: number): number =>
      Math.max(0, Math.min(room, offset + (token + 0.5) * scale));
    store.set(centreOf(zoomed(view, at(view.ox, view.sx, cursor.key, view.width),
      at(view.oy, view.sy, cursor.row, view.height), factor)));
  } else store.set(centreOf(makeView(view, { ...middleOf(view), scale: view.sx * factor })));
  if (before === store.get()) context.fail(factor! > 1 ? "Cells get no larger." : "This is the whole map.");
}

/** Keys that act wherever the focus is, outside of fields: heads, layers, and the factor of a zoom. */
const EVERYWHERE: readonly (readonly [string, number, number, (number | null)?])[] = [
  ["[", -1, 0], ["]", 1, 0], ["{", 0, -1], ["}", 0, 1], ["+", 0, 0, 2], ["=", 0, 0, 2], ["-", 0, 0, 0.5], ["0", 0, 0, null],
];

/** Listens to them; returns what ends that. */
export const listenEverywhere = (context: Context, pane: () => Pane): (() => void)[] =>
  EVERYWHERE.map(([key, heads, layers, factor]) => onKeyOf(context, key, () =>
    (factor === undefined ? stepHead(context, heads, layers) : zoomBy(context, pane(), factor))));

/** Acts on a key; false where it means nothing here. */
export function onKey(event: KeyboardEvent, target: KeyTarget): boolean {
  if (event.altKey || event.metaKey) return false;
  const { key, shiftKey } = event, far = event.ctrlKey, { context } = target;
  const end = (to: number) => (): void => go(target, far ? to : cursorOf(target).row, to);
  const actions: Record<string, () => void> = {
    Home: end(0), End: end(END), PageUp: () => walk(target, [-1, 0], true), PageDown: () => walk(target, [1, 0], true),
    Enter: () => target.choose("row", cursorOf(target), shiftKey),
    " ": () => target.choose("key", cursorOf(target), shiftKey),
    Escape: () => context.store.set({ cursor: null, tokens: [] }),
  };
  const arrow = ARROWS[key];
  const known = far && key !== "Home" && key !== "End" ? undefined : actions[key];
  const act = arrow ? () => walk(target, arrow, shiftKey || far) : known;
  act?.();
  return act !== undefined;
}
