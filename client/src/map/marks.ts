// What is drawn over and beside a map: chosen rows and keys, the crosshair, where generation began, the words.
import type { Axis } from "../context";
import { fitText, layLabels, tokenText, withMarked, type Label, type LabelAxis } from "./labels";
import type { Pane } from "./pane";
import { keysInSight, rowsInSight, type Cell } from "./viewport";

/** The properties of style.css that a canvas needs. */
export const INKS = ["ink", "quiet", "line", "accent", "paper", "serif", "sans", "mono"] as const;
export type Ink = Record<(typeof INKS)[number], string>;

export const LINE = 14;
const MOST_MARKED = 60;

/** Chosen tokens of each axis of a pane. */
export type Chosen = Record<Axis, readonly number[]>;

/** Runs [start, end) of neighbouring tokens within [from, to). */
export function runsOf(tokens: readonly number[], from: number, to: number): [number, number][] {
  const out: [number, number][] = [];
  for (const token of tokens) {
    if (token < from || token >= to) continue;
    const last = out[out.length - 1];
    if (last && last[1] === token) last[1] = token + 1;
    else out.push([token, token + 1]);
  }
  return out;
}

/** Outlines of the chosen rows and keys, the lines of the cursor, and the first generated token. */
export function drawMarks(
  context: CanvasRenderingContext2D, pane: Pane, chosen: Chosen, cursor: Cell | null,
  prompts: Record<Axis, number | null>, ink: Ink,
): void {
  const { view, x, y } = pane;
  const right = Math.min(view.width, view.ox + view.keys * view.sx);
  const bottom = Math.min(view.height, view.oy + view.rows * view.sy);
  context.strokeStyle = ink.ink;
  for (const [start, end] of runsOf(chosen.row, ...rowsInSight(view)))
    outline(context, x - 2, y + view.oy + start * view.sy, right + 4, (end - start) * view.sy);
  for (const [start, end] of runsOf(chosen.key, ...keysInSight(view)))
    outline(context, x + view.ox + start * view.sx, y - 2, (end - start) * view.sx, bottom + 4);
  context.setLineDash([5, 4]);
  context.lineWidth = 1;
  context.strokeStyle = ink.quiet;
  context.beginPath();
  if (prompts.row !== null) line(context, x, y + view.oy + prompts.row * view.sy, x + right, null);
  if (prompts.key !== null) line(context, x + view.ox + prompts.key * view.sx, y, null, y + bottom);
  context.stroke();
  context.setLineDash([]);
  if (!cursor || cursor.row >= view.rows || cursor.key >= view.keys) return;
  const left = x + view.ox + cursor.key * view.sx, top = y + view.oy + cursor.row * view.sy;
  context.strokeStyle = ink.accent;
  context.globalAlpha = 0.75;
  context.beginPath();
  line(context, x, top + view.sy / 2, left - 1, null);
  line(context, left + view.sx / 2, y, null, top - 1);
  context.stroke();
  context.globalAlpha = 1;
  context.lineWidth = 2;
  const size = Math.max(5, view.sx), high = Math.max(5, view.sy);
  context.strokeRect(left + (view.sx - size) / 2, top + (view.sy - high) / 2, size, high);
}

function line(context: CanvasRenderingContext2D, x: number, y: number, toX: number | null, toY: number | null): void {
  context.moveTo(x, y);
  context.lineTo(toX ?? x, toY ?? y);
}

function outline(context: CanvasRenderingContext2D, x: number, y: number, width: number, height: number): void {
  const thin = Math.min(width, height) < 4;
  context.lineWidth = thin ? 1 : 1.5;
  context.globalAlpha = thin ? 0.6 : 1;
  context.strokeRect(x, y, width, height);
  context.globalAlpha = 1;
}

/**
 * The edge of the map and the words at both margins of a pane; `room` is the width of the row margin and the height of
 * the key margin.
 */
export function drawLabels(
  context: CanvasRenderingContext2D, pane: Pane, chosen: Chosen, cursor: Cell | null, ink: Ink,
  room: Record<Axis, number>,
): void {
  const { view } = pane;
  const rows: LabelAxis = { offset: view.oy, scale: view.sy, length: view.rows, room: view.height, line: LINE };
  const keys: LabelAxis = { offset: view.ox, scale: view.sx, length: view.keys, room: view.width, line: LINE };
  context.lineWidth = 1;
  context.strokeStyle = ink.line;
  context.strokeRect(pane.x - 0.5, pane.y - 0.5, Math.min(view.width, view.ox + view.keys * view.sx) + 1,
    Math.min(view.height, view.oy + view.rows * view.sy) + 1);
  context.direction = "ltr"; // the margins stay where they are; the letters of a word keep their own order
  context.textBaseline = "middle";
  for (const [axis, where, words] of [["row", rows, pane.rowWords], ["key", keys, pane.keyWords]] as const) {
    const marks = [...(cursor ? [axis === "row" ? cursor.row : cursor.key] : []), ...visibleOf(chosen[axis], where)];
    const marked = marks.filter((t) => t < where.length).map((t): Label => {
      const word = words.at(t), text = where.scale < LINE && word ? word.label : tokenText(word, t);
      const number = text && where.scale >= LINE / 3 ? "" : String(t);
      return { token: t, end: t + 1, text, number, at: where.offset + (t + 0.5) * where.scale };
    });
    const strong = new Set(marked.map((one) => one.token));
    for (const label of withMarked(layLabels(where, words), marked, LINE)) {
      if (label.at < 0 || label.at > where.room) continue;
      context.save();
      if (axis === "row") context.translate(pane.x - 6, pane.y + label.at);
      else {
        context.translate(pane.x + label.at, pane.y - 6);
        context.rotate(-Math.PI / 2);
      }
      const special = words.at(label.token)?.special ?? false;
      drawLabel(context, label, axis, room[axis] - 12, strong.has(label.token), special, ink);
      context.restore();
    }
  }
}

const visibleOf = (tokens: readonly number[], axis: LabelAxis): number[] =>
  tokens.filter((t) => axis.offset + (t + 1) * axis.scale > 0 && axis.offset + t * axis.scale < axis.room)
    .slice(0, MOST_MARKED);

const fitted = new Map<string, string>();

function fit(context: CanvasRenderingContext2D, text: string, width: number): string {
  const key = `${context.font}|${Math.round(width)}|${text}`;
  let known = fitted.get(key);
  if (known === undefined) {
    if (fitted.size > 20000) fitted.clear();
    known = fitText(text, width, (part) => context.measureText(part).width);
    fitted.set(key, known);
  }
  return known;
}

/** Draws at the origin: row labels end there, key labels begin there. */
function drawLabel(
  context: CanvasRenderingContext2D, label: Label, axis: Axis, room: number, strong: boolean, special: boolean,
  ink: Ink,
): void {
  const number = { font: `10px ${ink.sans}`, text: label.number, width: 0 };
  if (number.text) {
    context.font = number.font;
    number.width = context.measureText(number.text).width + (label.text ? 5 : 0);
  }
  context.font = special ? `11px ${ink.mono}` : `${strong ? "600 " : ""}13px ${ink.serif}`;
  const cut = label.text && fit(context, label.text, room - number.width);
  const text = cut.length < 4 && cut.endsWith("…") && number.text ? "" : cut; // a letter or two tell nothing
  const width = text ? context.measureText(text).width : 0;
  const start = axis === "row" ? -width - number.width : 0;
  context.textAlign = "left";
  context.fillStyle = strong ? ink.accent : special ? ink.quiet : ink.ink;
  if (text) context.fillText(text, start + number.width, 0);
  if (!number.text) return;
  context.font = number.font;
  context.fillStyle = strong ? ink.accent : ink.quiet;
  context.fillText(number.text, start, 0);
}

/** The name of a pane above it, at height `y`. */
export function drawCaption(context: CanvasRenderingContext2D, pane: Pane, y: number, ink: Ink): void {
  if (!pane.caption) return;
  context.font = `600 13px ${ink.sans}`;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = ink.ink;
  context.fillText(fit(context, pane.caption, pane.view.width), pane.x, y);
}
