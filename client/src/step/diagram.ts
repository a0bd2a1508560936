// The way of one word through one head as a diagram: boxes in the order of computation, each a button to its step.
import { h } from "../dom";
import { numberText } from "./numbers";
import { cells } from "./parts";
import type { Step } from "./parts";

interface Box {
  button: HTMLButtonElement;
  picture: HTMLElement;
  /** The number that says most: a length, the largest score, the largest weight. */
  note: HTMLElement;
}

/** What changes with the switches: columns of all keys (null: as in the step), and the output. */
export interface Live {
  column(step: Step, name: string): number[] | null;
  /** Whether a step after that at `at` hides key `j`. */
  later(j: number, at: number): boolean;
  output: number[] | null;
  /** Whether a step shows the model's numbers although others are computed before it. */
  old(step: Step): boolean;
}

interface Rows {
  keys: (number | null)[][];
  unplaced_keys: (number | null)[][] | null;
  values: (number | null)[][] | null;
}

const TITLES: Record<string, string> = {
  token: "embedding", stream: "residual stream", norm: "norm", given: "q, k, v", project: "q, k, v", "head norm": "norm of q, k",
  position: "positions", dot: "dot product", scale: "scale", softcap: "soft cap", bias: "bias", mask: "mask", softmax: "softmax",
  sum: "weighted sum", concat: "concatenate", output: "output projection", residual: "residual",
};

export class Diagram {
  readonly element = h("ol", "diagram");
  private readonly nodes: Box[] = [];
  /** What is noted of a step without columns. */
  private readonly notes: string[] = [];

  constructor(
    private readonly steps: readonly Step[], private readonly keys: readonly number[], private readonly places: readonly number[],
    private readonly labels: readonly string[],
    private readonly rows: Rows, choose: (at: number) => void,
  ) {
    steps.forEach((step, at) => {
      const picture = h("span", "picture");
      const note = h("span", "most");
      const button = h("button", { type: "button", class: "node", onclick: () => choose(at) },
        h("span", "label", h("small", {}, String(at + 1)), TITLES[step.id] ?? step.name, note), picture);
      this.nodes.push({ button, picture, note });
      this.element.append(h("li", {}, button));
      this.fill(at);
      this.notes.push(note.textContent ?? "");
    });
  }

  /** Marks the step that is shown; later ones are pale. */
  choose(at: number): void {
    this.nodes.forEach(({ button }, i) => {
      button.classList.toggle("later", i > at);
      if (i === at) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
  }

  /** The chosen node's element, to be scrolled to. */
  at(index: number): HTMLElement {
    return this.nodes[index].button;
  }

  private fill(at: number): void {
    const step = this.steps[at];
    const { picture, note } = this.nodes[at];
    if (step.id === "project" || step.id === "given" || step.id === "position" || step.id === "head norm") {
      picture.replaceChildren(...this.threeWays(step));
      return;
    }
    if (step.vectors.length && step.id !== "sum") {
      const vector = step.vectors[step.vectors.length - (step.id === "output" ? 2 : 1)] ?? step.vectors[0];
      picture.replaceChildren(cells(vector.values.slice(0, 24), vector.kind));
      note.textContent = `length ${numberText(vector.length, 1)}`;
    }
  }

  /** Query, keys and values: one row, and one row for each key. */
  private threeWays(step: Step): HTMLElement[] {
    const query = step.vectors.filter((v) => v.kind === "query").pop();
    const out = [group("q", [cells((query?.values ?? []).slice(0, 8), "query")])];
    const { values } = this.rows;
    const keys = (step.id !== "position" && this.rows.unplaced_keys) || this.rows.keys;
    out.push(group("k", this.places.map((at) => cells(keys[at], "key", largest(keys, this.places)))));
    if (values && (step.id === "project" || step.id === "given"))
      out.push(group("v", this.places.map((at) => cells(values[at], "value", largest(values, this.places)))));
    return out;
  }

  /** Scores and weights as bars, and the output, as they are now. */
  update(live: Live): void {
    this.steps.forEach((step, at) => {
      const { picture, note } = this.nodes[at];
      const last = step.columns[step.columns.length - 1];
      if (last) {
        const now = live.column(step, last.name);
        const values = this.keys.map((j, i) => (now ? now[j] : (last.values[this.places[i]] ?? NaN)));
        const weights = step.id === "softmax";
        const later = this.keys.map((j) => live.later(j, at));
        picture.replaceChildren(weights ? bars(values, 1, "weight") : signed(values, later));
        note.replaceChildren(...this.largest(values.map((value, i) => (later[i] ? -Infinity : value)), weights ? 2 : 1));
      }
      const old = live.old(step);
      picture.classList.toggle("old", old);
      if (old) note.textContent = "as in the model";
      else if (!last) note.textContent = this.notes[at];
      if (step.id === "sum" && live.output) picture.replaceChildren(cells(live.output, "value"));
    });
  }

  /** The key with the largest value, and the value. */
  private largest(values: number[], digits: number): (Node | string)[] {
    if (values.some(Number.isNaN)) return ["NaN"];
    const best = values.reduce((most, value, i) => (value > values[most] ? i : most), 0);
    return [h("bdi", {}, `'${[...(this.labels[this.keys[best]] ?? "")].slice(0, 10).join("")}'`), ` ${numberText(values[best], digits)}`];
  }
}

const group = (name: string, rows: HTMLElement[]): HTMLElement =>
  h("span", "group", h("small", {}, name), h("span", "s-rows", ...rows));

const largest = (rows: (number | null)[][], places: readonly number[]): number =>
  Math.max(...places.flatMap((at) => rows[at].map((v) => Math.abs(v ?? 0))), 1e-9);

/** Upright bars, one for each key, of 0 to `most`. */
function bars(values: number[], most: number, kind: string): HTMLElement {
  const box = h("span", { class: `bars ${kind}` });
  for (const value of values) {
    const broken = !Number.isFinite(value);
    box.append(h("i", { class: broken ? "broken" : "", style: `--share: ${broken ? 1 : Math.min(1, value / most).toFixed(4)}` }));
  }
  return box;
}

/** Upright bars above and below a line; a hidden key is hatched, one that is hidden later is pale. */
function signed(values: number[], later: readonly boolean[]): HTMLElement {
  const most = Math.max(...values.filter(Number.isFinite).map(Math.abs), 1e-9);
  const box = h("span", "bars signed");
  values.forEach((value, i) => {
    const hidden = value === -Infinity;
    const share = hidden ? 0 : Number.isNaN(value) ? 1 : Math.min(1, Math.abs(value) / most);
    box.append(h("i", { class: hidden ? "hidden-key" : Number.isNaN(value) ? "broken" : `${value < 0 ? "minus" : ""}${later[i] ? " pale" : ""}`, style: `--share: ${share.toFixed(4)}` }));
  });
  return box;
}
