// Mouse, touch and wheel, as zooming, dragging, pointing and choosing. Points are CSS pixels of the canvas.

import { on } from "../dom";

export interface Gestures {
  pan(dx: number, dy: number): void;
  zoom(x: number, y: number, factor: number): void;
  point(x: number, y: number): void;
  leave(): void;
  choose(x: number, y: number, add: boolean, other: boolean): void;
  /** Whether a wheel without Ctrl zooms; in a notebook it scrolls the page until the map has the focus. */
  takesWheel(): boolean;
}

const DRAG = 5; // pixels before a press becomes a drag

interface Pointer {
  x: number;
  y: number;
}

export function listen(canvas: HTMLElement, gestures: Gestures): void {
  const pointers = new Map<number, Pointer>();
  let start: Pointer | null = null, dragging = false;
  const at = (event: MouseEvent): Pointer => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const down = (event: PointerEvent): void => {
    if (event.button > 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    start = at(event);
    dragging = pointers.size > 1;
  };
  const move = (event: PointerEvent): void => {
    const to = at(event), from = pointers.get(event.pointerId);
    if (!from) {
      gestures.point(to.x, to.y);
      return;
    }
    if (!dragging && start && Math.hypot(to.x - start.x, to.y - start.y) < DRAG) return;
    dragging = true;
    canvas.classList.add("dragged");
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    pointers.set(event.pointerId, to);
    if (other) {
      const before = Math.hypot(from.x - other.x, from.y - other.y), after = Math.hypot(to.x - other.x, to.y - other.y);
      gestures.pan((to.x - from.x) / 2, (to.y - from.y) / 2);
      if (before > 10 && after > 10) gestures.zoom((to.x + other.x) / 2, (to.y + other.y) / 2, after / before);
    } else gestures.pan(to.x - from.x, to.y - from.y);
  };
  const up = (event: PointerEvent): void => {
    if (!pointers.delete(event.pointerId)) return;
    const to = at(event);
    if (!dragging && event.type === "pointerup") {
      gestures.point(to.x, to.y);
      gestures.choose(to.x, to.y, event.shiftKey || event.ctrlKey || event.metaKey, event.altKey);
    }
    if (!pointers.size) {
      dragging = false;
      canvas.classList.remove("dragged");
    }
  };
  const wheel = (event: WheelEvent): void => {
    if (!event.ctrlKey && !gestures.takesWheel()) return;
    event.preventDefault();
    const unit = [1, 16, 400][event.deltaMode]; // pixels of a pixel, a line, a page
    if (event.shiftKey && !event.ctrlKey) {
      gestures.pan(-(event.deltaX || event.deltaY) * unit, 0);
      return;
    }
    const { x, y } = at(event);
    // A pinch on a touchpad comes as small steps with ctrlKey.
    gestures.zoom(x, y, Math.exp(-Math.max(-120, Math.min(120, event.deltaY * unit)) * (event.ctrlKey ? 0.01 : 0.002)));
  };
  const leave = (event: PointerEvent): void => {
    if (event.pointerType === "mouse" && !pointers.size) gestures.leave();
  };
  // The canvas goes with its listeners: nothing to take off.
  for (const [name, listener] of Object.entries({
    pointerdown: down, pointermove: move, pointerup: up, pointercancel: up, pointerleave: leave,
    wheel,
  })) on(canvas, name, listener as (event: Event) => void);
}
