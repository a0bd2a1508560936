// The keys of the map.
import type { Context } from "../context";
import { step } from "./controls";
import type { Cell } from "./viewport";

export interface KeyActions {
  cursor(): Cell;
  /** Moves the cursor by cells; the first time it appears where it starts. */
  step(rows: number, keys: number): void;
  zoom(factor: number | null): void;
  go(row: number, key: number): void;
  page(): Cell;
  choose(axis: "row" | "key", add: boolean): void;
}

const ARROWS: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const END = Number.MAX_SAFE_INTEGER;

/** Acts on a key; false where it means nothing here. */
export function onKey(event: KeyboardEvent, context: Context, actions: KeyActions): boolean {
  if (event.altKey || event.metaKey) return false;
  const { key, shiftKey } = event, far = event.ctrlKey, arrow = ARROWS[key];
  if (arrow) {
    const by = shiftKey || far ? actions.page() : { row: 1, key: 1 };
    actions.step(arrow[0] * by.row, arrow[1] * by.key);
    return true;
  }
  if (key === "Home" || key === "End") {
    const to = key === "Home" ? 0 : END;
    actions.go(far ? to : actions.cursor().row, to);
    return true;
  }
  if (far) return false;
  const simple: Record<string, () => void> = {
    PageUp: () => actions.step(-actions.page().row, 0), PageDown: () => actions.step(actions.page().row, 0),
    "+": () => actions.zoom(2), "=": () => actions.zoom(2), "-": () => actions.zoom(0.5), "0": () => actions.zoom(null),
    "[": () => step(context, -1, 0), "]": () => step(context, 1, 0), "{": () => step(context, 0, -1), "}": () => step(context, 0, 1),
    Enter: () => actions.choose("row", shiftKey), " ": () => actions.choose("key", shiftKey),
    Escape: () => context.store.set({ cursor: null, tokens: [] }),
  };
  const act = simple[key];
  if (act) act();
  return act !== undefined;
}
