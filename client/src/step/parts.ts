// What steps are shown with: formulas, vectors as cells, keys as bars.
import { h } from "../dom";
import { numberText } from "./numbers";

/** A formula as a tree of MathML: [tag, child, ...]. */
export type Tree = [string, ...(Tree | string)[]];

export interface Vector {
  name: string;
  kind: "query" | "key" | "value" | "";
  size: number;
  length: number;
  values: (number | null)[];
}

export interface Column {
  name: string;
  values: (number | null)[];
}

export interface Step {
  id: string;
  name: string;
  formula: string;
  mathml: Tree;
  shapes: string;
  says: string;
  without: string;
  switch: string | null;
  vectors: Vector[];
  columns: Column[];
  facts: [string, number | null][];
}

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TAGS = new Set(["math", "mrow", "mi", "mn", "mo", "mtext", "msub", "msup", "msqrt"]);

/** The formulas of a step, one element each, so that a narrow screen can break between them. */
export function formulas(tree: Tree): Element[] {
  const row = tree[1] as Tree;
  const groups: Tree[] = [["mrow"]];
  for (const child of row.slice(1)) {
    if (Array.isArray(child) && child[0] === "mtext" && child[1] === "\u2003") groups.push(["mrow"]);
    else groups[groups.length - 1].push(child);
  }
  return groups.map((group) => formula(["math", group]));
}

/** The formula as elements; a tag that is none of MathML's few is a row. */
function formula(tree: Tree): Element {
  const [tag, ...children] = tree;
  const element = document.createElementNS(MATHML, TAGS.has(tag) ? tag : "mrow");
  for (const child of children) element.append(typeof child === "string" ? child : formula(child));
  return element;
}

/** The components of a vector as cells, dark where they are large; two signs are told apart by shape as well. */
export function cells(values: (number | null)[], kind: string, largest?: number): HTMLElement {
  const most = largest ?? Math.max(...values.map((v) => Math.abs(v ?? 0)), 1e-9);
  const strip = h("span", { class: `cells ${kind || "s-plain"}`, "aria-hidden": "true" });
  for (const value of values) strip.append(cell(value, most));
  return strip;
}

export function cell(value: number | null, most: number): HTMLElement {
  const share = Math.min(1, Math.abs(value ?? 0) / most);
  return h("i", { class: value === null ? "broken" : value < 0 ? "minus" : "", style: `--share: ${share.toFixed(3)}` });
}

/** A vector with its name, its first components as numbers, and how many are folded. */
export function vectorRow(vector: Vector, digits: number, most: number): HTMLElement {
  const shown = vector.values.slice(0, most);
  const folded = vector.size - shown.length;
  return h("div", "vector",
    h("span", { class: `name ${vector.kind || "s-plain"}` }, vector.name),
    cells(vector.values, vector.kind),
    h("span", "components", shown.map((v) => numberText(v, digits)).join("  "),
      folded > 0 && h("span", "folded", `  and ${folded.toLocaleString("en")} more${Number.isNaN(vector.length) ? "" : `, norm ${numberText(vector.length, digits)}`}`)));
}

/** A label of a key: its place where there are many, and its text, cut to what fits. */
export function keyName(labels: readonly string[], j: number): HTMLElement {
  const text = labels[j] ?? "";
  return h("span", { class: "key-name", title: text },
    labels.length > 2 && h("small", {}, String(j)), h("bdi", {}, [...text].length > 18 ? `${[...text].slice(0, 17).join("")}…` : text));
}
