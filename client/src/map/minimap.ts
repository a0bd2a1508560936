// The whole map, small, with the part in sight as a rectangle; pressing on it goes there.
import type { Axis } from "../context";
import { h, on } from "../dom";
import { paint, type Pane } from "./pane";
import type { ColourScale } from "./scale";
import { centreOf, isWhole, keysInSight, rowsInSight, topLevel } from "./viewport";

export class Minimap {
  readonly element = h("canvas", { class: "minimap", "aria-hidden": "true", hidden: true });
  #pane: Pane | null = null;

  constructor(go: (x: number, y: number) => void) {
    const move = (event: PointerEvent): void => {
      if (!this.#pane || !event.buttons) return;
      const box = this.element.getBoundingClientRect(), { rows, keys } = this.#pane.view;
      go(((event.clientX - box.left) / box.width) * keys, ((event.clientY - box.top) / box.height) * rows);
    };
    on<PointerEvent>(this.element, "pointerdown", (event) => {
      this.element.setPointerCapture(event.pointerId);
      move(event);
    });
    on(this.element, "pointermove", move);
  }

  /** Stands in the corner between the margins, where it covers nothing. */
  draw(
    pane: Pane, margin: Record<Axis, number>, scale: ColourScale, hatch: string, accent: string, ratio: number,
  ): void {
    this.#pane = pane;
    const { rows, keys } = pane.view, longest = Math.max(rows, keys), small = Math.min(margin.row, margin.key) - 14;
    this.element.hidden = isWhole(pane.view);
    if (this.element.hidden) return;
    const side = (length: number): number => (pane.view.square ? Math.max(12, (small * length) / longest) : small);
    const w = side(keys), t = side(rows);
    this.element.style.left = `${pane.x - margin.row + 6}px`;
    this.element.style.top = `${pane.y - margin.key + 6}px`;
    this.element.style.width = `${w}px`;
    this.element.style.height = `${t}px`;
    this.element.width = Math.round(w * ratio);
    this.element.height = Math.round(t * ratio);
    const context = this.element.getContext("2d")!;
    context.scale(ratio, ratio);
    context.fillStyle = hatch;
    context.fillRect(0, 0, w, t);
    const level = topLevel(rows, keys), tile = pane.tile({ level, row: 0, key: 0 });
    if (tile) {
      context.imageSmoothingEnabled = true;
      context.drawImage(paint(tile, scale), 0, 0, keys / 2 ** level, rows / 2 ** level, 0, 0, w, t);
    }
    const [r0, r1] = rowsInSight(pane.view), [k0, k1] = keysInSight(pane.view);
    const wide = Math.max(6, ((k1 - k0) / keys) * w), high = Math.max(6, ((r1 - r0) / rows) * t);
    const { x, y } = centreOf(pane.view);
    const left = Math.max(0, Math.min(w - wide, (x / keys) * w - wide / 2));
    const top = Math.max(0, Math.min(t - high, (y / rows) * t - high / 2));
    context.strokeStyle = accent;
    context.lineWidth = 2;
    context.strokeRect(left + 1, top + 1, wide - 2, high - 2);
  }
}
