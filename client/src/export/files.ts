// What is in view as files.
import { paletteOf } from "../colours";
import type { Context, Picture } from "../context";
import { tokenText } from "../map/labels";
import { colourInto, makeScale, type ColourScale } from "../map/scale";
import { span } from "../map/tiles";
import { headName } from "../panels/data";
import { toHash } from "../store";
import type { Words } from "../words";
import { csvOf } from "./csv";
import { differenceOf, levelFor, namesOf, numbersInView, type Numbers } from "./numbers";
import { savedPage } from "./page";
import { record, type Told } from "./record";
import { MOST_CELLS, svgOf } from "./svg";

export interface Work { picture: Picture; told: Told; signal: AbortSignal }

/** Hands a file to the browser, from the document that the client is in: a notebook's, too. */
export function download(context: Context, parts: BlobPart[], type: string, name: string): void {
  const document = context.root.ownerDocument, url = URL.createObjectURL(new Blob(parts, { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  context.root.append(link);
  link.click();
  link.remove();
  window.setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

export function fileName(context: Context, ending: string): string {
  const call = context.call(), { head, what, compare } = context.store.get();
  return ["saccade", call.name, `head-${head}`, what === "weights" ? "" : what, compare ? "compared" : ""].filter(Boolean).join("-")
    .replace(/[^\w.-]+/g, "-") + "." + ending;
}

const titleOf = (context: Context): string => {
  const run = context.run(), { head, what, compare, run: id } = context.store.get();
  const name = headName(run, context.call(), head), other = context.manifest.runs.find((one) => one.id === compare?.run);
  const call = other?.calls.find((one) => one.id === compare?.call);
  const less = compare?.mode === "difference" && other && call ? ` less ${headName(other, call, compare.head)}${other.id === id ? "" : ` of ${other.model}`}` : "";
  return `${run.model}: ${name}${less}, ${what}`;
};

/** "rows 0 to 60, keys 0 to 60; each cell is the largest of 4 x 4 tokens". */
export function describeView(context: Context, picture: Pick<Picture, "rows" | "keys">): string {
  const { pool } = context.store.get(), level = levelFor(picture.rows, picture.keys), size = 2 ** level;
  const range = ([start, end]: readonly [number, number]): string => `${start.toLocaleString("en")} to ${(end - 1).toLocaleString("en")}`;
  return `rows ${range(picture.rows)}, keys ${range(picture.keys)}; ` +
    (level ? `each cell is the ${pool === "max" ? "largest" : "mean"} of ${size} × ${size} tokens` : "each cell is one pair of tokens");
}

type NameOf = (words: Words, token: number) => string;
const names = async (context: Context, numbers: Numbers, nameOf: NameOf): Promise<[string[], string[]]> => [
  await namesOf(context.wordsOf("row"), numbers.row, numbers.down, numbers.level, nameOf),
  await namesOf(context.wordsOf("key"), numbers.key, numbers.across, numbers.level, nameOf),
];

export async function saveCsv(context: Context, { picture, signal }: Work): Promise<void> {
  const numbers = await numbersInView(context, picture, signal);
  const [rowNames, keyNames] = await names(context, numbers, (words, token) => (words.at(token) ? words.name(token) : ""));
  const call = context.call(), { what, pool } = context.store.get();
  const lines = csvOf({ ...numbers, rowNames, keyNames, rowsLength: call.rows.length, keysLength: call.keys.length, what, pool });
  // Spreadsheets take a file for UTF-8 by its first sign.
  download(context, ["\ufeff", ...lines], "text/csv;charset=utf-8", fileName(context, "csv"));
}

function imageOf(values: Float32Array, across: number, down: number, scale: ColourScale): string {
  const canvas = document.createElement("canvas");
  canvas.width = across;
  canvas.height = down;
  const pen = canvas.getContext("2d")!, image = pen.createImageData(across, down);
  colourInto(new Uint32Array(image.data.buffer), values, scale);
  pen.putImageData(image, 0, 0);
  return canvas.toDataURL("image/png");
}

export async function saveSvg(context: Context, { picture, signal }: Work): Promise<void> {
  const numbers = await numbersInView(context, picture, signal);
  const [rowNames, keyNames] = await names(context, numbers, (words, token) => tokenText(words.at(token), token) || String(token));
  const { what, tone, compare } = context.store.get(), { across, down } = numbers;
  const less = compare?.mode === "difference" && numbers.second !== null;
  const values = less ? differenceOf(numbers.values, numbers.second!, what === "weights") : numbers.values;
  const { low, high } = span(values), palette = paletteOf(context.root);
  const scale = makeScale(palette, what, tone, context.call().keys.length, [low, high], less);
  const svg = svgOf({
    title: titleOf(context), subtitle: describeView(context, picture), rowTitle: "queries ↓", keyTitle: "keys →",
    down, across, values, rowNames, keyNames, scale, palette, legend: less ? `difference of ${what}` : what,
    image: across * down > MOST_CELLS ? imageOf(values, across, down, scale) : null,
  });
  download(context, [svg], "image/svg+xml", fileName(context, "svg"));
}

export async function savePng(context: Context, { picture }: Work): Promise<void> {
  const blob = await new Promise<Blob | null>((resolve) => picture.canvas.toBlob(resolve, "image/png"));
  if (!blob) throw new Error("The browser could not make a PNG of the map.");
  download(context, [blob], "image/png", fileName(context, "png"));
}

export async function saveHtml(context: Context, { picture, told, signal }: Work): Promise<void> {
  const client = await context.transport.source!();
  for (const [axis, [start, stop]] of [["row", picture.rows], ["key", picture.keys]] as const)
    if (context.side(axis).named && stop - start < 4096) await context.wordsOf(axis).need(start, stop);
  const table = await record(context, picture, told, signal);
  const state = { ...context.store.get(), panel: "text" };
  download(context, [savedPage(titleOf(context), client, { hash: toHash(state), table })], "text/html", fileName(context, "html"));
}
