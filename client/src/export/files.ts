// What is in view as files.
import { cssOf, paletteOf } from "../colours";
import type { Context, Picture } from "../context";
import { h, paintInto } from "../dom";
import { tokenText } from "../map/labels";
import { colourInto, type ColourScale } from "../map/scale";
import { capital, headName } from "../panels/data";
import { commas } from "../parts";
import { byId } from "../protocol";
import { toHash } from "../store";
import { csvOf } from "./csv";
import { differenceOf, levelFor, numbersInView, type Seen } from "./numbers";
import { savedPage } from "./page";
import { record } from "./record";
import { MOST_CELLS, svgOf } from "./svg";

/** `told` hears how far a file is: done of all. */
export interface Work { picture: Picture; told: (done: number, all: number) => void; signal: AbortSignal }

/** Hands a file to the browser, from where the client is: a notebook, too. */
function download(context: Context, part: BlobPart, type: string, ending: string): void {
  const { head, what } = context.store.get(), url = URL.createObjectURL(new Blob([part], { type })),
    link = h("a");
  link.href = url;
  const name = `saccade-${context.call().name}-head-${head}${what === "weights" ? "" : `-${what}`}`;
  link.download = name.replace(/[^\w.-]+/g, "-") + ending;
  context.root.append(link);
  link.click();
  link.remove();
  window.setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function titleOf(context: Context, less: boolean): string {
  const run = context.run(), { head, what, compare } = context.store.get(),
    other = byId(context.manifest.runs, compare?.run);
  const call = less && byId(other?.calls, compare?.call);
  return `${run.model}: ${headName(run, context.call(), head)}` +
    (call ? ` less ${headName(other!, call, compare!.head)}${other === run ? "" : ` of ${other!.model}`}` : "")
      + `, ${what}`;
}

/** "Rows 0 to 60, keys 0 to 60; each cell is the largest of 4 × 4 pairs, from a sample of rows." */
export function describeView(context: Context, { rows, keys, sampled }: Seen & { sampled: boolean }): string {
  const size = 2 ** levelFor(rows, keys), kind = context.store.get().pool === "max" ? "largest" : "mean";
  const [a, b] = [rows, keys].map(([start, end]) => `${commas(start)} to ${commas(end - 1)}`);
  const cell = size > 1 ? `the ${kind} of ${size} × ${size} pairs` : "one pair";
  return `Rows ${a}, keys ${b}; each cell is ${cell} of tokens${sampled ? ", from a sample of rows" : ""}.`;
}

export async function saveCsv(context: Context, { picture, signal }: Work): Promise<void> {
  const numbers = await numbersInView(context, picture, (words, token) => (words.at(token) ? words.name(token) : ""),
    signal);
  const { rows, keys } = context.call(), { what, pool } = context.store.get();
  // Spreadsheets take a file for UTF-8 by its first sign.
  download(context, "\ufeff" + csvOf(numbers, [rows.length, keys.length], what, pool).join(""),
    "text/csv;charset=utf-8", ".csv");
}

const imageOf = (values: Float32Array, across: number, down: number, scale: ColourScale): string =>
  paintInto(h("canvas"), across, down, (pixels) => colourInto(pixels, values, scale)).toDataURL();

export async function saveSvg(context: Context, { picture, signal }: Work): Promise<void> {
  const numbers = await numbersInView(context, picture,
    (words, token) => tokenText(words.at(token), token) || String(token), signal);
  const { what, compare } = context.store.get(), { across, down, second } = numbers, { scale } = picture;
  const less = compare?.mode === "difference" && second !== null,
    values = less ? differenceOf(numbers.values, second, what === "weights") : numbers.values;
  download(context, svgOf({
    ...numbers, values, scale, palette: paletteOf(context.root), title: titleOf(context, less), subtitle: describeView(context, { ...picture, sampled: numbers.sampled }),
    legend: less ? `difference of ${what}` : what,
      image: across * down > MOST_CELLS ? imageOf(values, across, down, scale) : null,
  }), "image/svg+xml", ".svg");
}

/** The picture of a sample says so below: what stands around the map on the page is not in it. */
function captioned(context: Context, picture: Picture): HTMLCanvasElement {
  const { canvas, sampled } = picture, { width, height } = canvas, { paper, ink } = paletteOf(context.root);
  if (!sampled) return canvas;
  const size = 12 * (devicePixelRatio || 1), copy = h("canvas", { width, height: height + 2 * size }),
    pen = copy.getContext("2d")!;
  pen.fillStyle = cssOf(paper);
  pen.fillRect(0, 0, width, copy.height);
  pen.drawImage(canvas, 0, 0);
  pen.fillStyle = cssOf(ink);
  pen.font = `${size}px sans-serif`;
  pen.fillText("From a sample of rows", size, height + size);
  return copy;
}

export async function savePng(context: Context, { picture }: Work): Promise<void> {
  const canvas = captioned(context, picture), blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve));
  if (!blob) throw new Error("The browser could not make a PNG of the map.");
  download(context, blob, "image/png", ".png");
}

export async function saveHtml(context: Context, { picture, told, signal }: Work): Promise<void> {
  const client = await context.transport.source!(), title = capital(titleOf(context, false));
  const table = await record(context, picture, told, signal);
  download(context, savedPage(title, client, { hash: toHash({ ...context.store.get(), panel: "text" }), table }),
    "text/html", ".html");
}
