// What leaving parts out changes: which steps, and the columns of each. Pure.
import { logitsOf, mixed, numberText, type Scores, type Settings, type Softmax } from "./numbers";
import type { Step, Vector } from "./parts";

const ORDER = ["position", "dot", "scale", "softcap", "bias", "mask", "softmax"];
const AFTER = ["sum", "concat", "output", "residual"];

/** The parts that are left out, in the order of the steps. */
export function leftOut(scores: Scores, { scale, mask, position, shift }: Settings): string[] {
  const changed = { position: !position, scale: Math.abs(scale - scores.scale) > 1e-9, mask: !mask, shift: !shift };
  return Object.entries(changed).filter(([, is]) => is).map(([name]) => name);
}

/**
 * Whether a step is the model's ("same"), has other numbers ("new"), or would have other numbers that cannot be computed
 * here ("old"). `moved`: whether weights differ; `values`: whether the values of all keys are here.
 */
export function stateOf(id: string, out: readonly string[], scores: Scores, moved: boolean, values: boolean): "same" | "new" | "old" {
  if (AFTER.includes(id)) return !moved ? "same" : id === "sum" && values ? "new" : "old";
  const [first] = out;
  const from = first === "position" ? (scores.unplaced ? "position" : "bias") : first === "shift" ? "softmax" : first;
  if (!first || !ORDER.includes(id) || ORDER.indexOf(id) < ORDER.indexOf(from)) return "same";
  return id === "position" ? "old" : "new";
}

/** Whether some weight is another one than in the model. */
export const weightsMoved = (now: readonly number[], before: readonly number[]): boolean =>
  now.some((w, j) => !(Math.abs(w - before[j]) < 5e-7));

/** A column of all keys as the settings make it; null where they do not change it. */
export function columnOf(scores: Scores, settings: Settings, live: Softmax, step: string, column: string): number[] | null {
  const { logits, maximum, exponentials, weights } = live;
  const whole = { ...settings, mask: false };
  const products = (settings.position || !scores.unplaced ? scores.products : scores.unplaced).map((d) => d ?? NaN);
  const without = (parts: Partial<Scores>) => (): number[] => logitsOf({ ...scores, ...parts }, whole);
  const columns: Record<string, () => number[]> = {
    "dot d": () => products,
    "scale d": () => products,
    "scale s": without({ softcap: null, bias: null }),
    "softcap before": without({ softcap: null, bias: null }),
    "softcap s": without({ bias: null }),
    "bias before": without({ bias: null }),
    "bias b": () => products.map((_, j) => (settings.position || !scores.bias_of_positions ? scores.bias?.[j] ?? 0 : 0)),
    "bias s": without({}),
    "mask before": without({}),
    "mask s": () => logits,
    "softmax s": () => logits,
    "softmax s − m": () => logits.map((s) => s - maximum),
    "softmax exp": () => exponentials,
    "softmax w": () => weights,
  };
  return columns[`${step} ${column}`]?.() ?? null;
}

/** The vectors of the weighted sum with other weights, of the components that are here. */
export function summed({ vectors }: Step, weights: readonly number[], values: (number | null)[][], names: readonly string[]): Vector[] {
  const { size } = vectors[vectors.length - 1];
  const order = weights.map((w, j) => [w, j]).filter(([w]) => w > 0).sort((a, b) => b[0] - a[0]).slice(0, 3);
  const one = (name: string, found: number[]): Vector => ({
    name, kind: "value", size, values: found, length: found.length === size ? Math.hypot(...found) : NaN,
  });
  return [
    ...order.map(([w, j]) => one(`${numberText(w, 3).replace(/^0/, "")} · v of ${names[j]}`, values[j].map((v) => w * (v ?? NaN)))),
    one("o", mixed([...weights], values)),
  ];
}
