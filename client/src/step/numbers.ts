// From dot products to weights, with any of scale, mask, positions and the shift left out. Pure.

/** What weights are computed from: `scores` of `saccade.step(...).as_json()`. */
export interface Scores {
  // What is null is no number: what hides keys is `visible` alone.
  products: (number | null)[];
  /** Of query and key before positions turned them; null where they are not turned. */
  unplaced: (number | null)[] | null;
  scale: number;
  softcap: number | null;
  bias: (number | null)[] | null;
  bias_of_positions: boolean;
  visible: (0 | 1)[] | null;
  sink: number | null;
}

export type Format = "float16" | "bfloat16" | "float32" | "float64";
export const FORMATS: readonly Format[] = ["float16", "bfloat16", "float32", "float64"];

export interface Settings {
  scale: number;
  mask: boolean;
  position: boolean;
  shift: boolean;
  format: Format;
}

export interface Softmax {
  /** The score of each key, -Infinity where hidden. */
  logits: number[];
  maximum: number;
  exponentials: number[];
  total: number;
  weights: number[];
}

export function logitsOf(scores: Scores, settings: Settings): number[] {
  const products = settings.position || !scores.unplaced ? scores.products : scores.unplaced;
  const biased = scores.bias && (settings.position || !scores.bias_of_positions) ? scores.bias : null;
  return products.map((product, j) => {
    if (settings.mask && scores.visible && !scores.visible[j]) return -Infinity;
    const scaled = (product ?? NaN) * settings.scale;
    const capped = scores.softcap ? scores.softcap * Math.tanh(scaled / scores.softcap) : scaled;
    return capped + (biased ? (biased[j] ?? NaN) : 0);
  });
}

/** As `settings` ask for; without the shift every number is rounded to the format, where it may overflow. */
export function softmaxOf(scores: Scores, settings: Settings): Softmax {
  const logits = logitsOf(scores, settings);
  const sink = scores.sink;
  const round = settings.shift ? (x: number): number => x : rounder(settings.format);
  let maximum = 0;
  if (settings.shift) {
    maximum = Math.max(...parts(logits), sink ?? -Infinity);
    if (!Number.isFinite(maximum)) maximum = 0;
  }
  const exponentials = logits.map((s) => round(Math.exp(round(s) - maximum)));
  let total = sink === null ? 0 : round(Math.exp(round(sink) - maximum));
  for (const e of exponentials) total += e;
  total = round(total);
  const weights = exponentials.map((e) => (settings.shift && total === 0 ? 0 : round(e / total)));
  return { logits, maximum, exponentials, total, weights };
}

/** Largest values of pieces, since a function takes no hundred thousand arguments. */
function parts(values: number[]): number[] {
  const out: number[] = [];
  for (let i = 0; i < values.length; i += 10000) out.push(Math.max(...values.slice(i, i + 10000)));
  return out;
}

/** sum_j w_j v_j of the components that are there. */
export function mixed(weights: number[], values: (number | null)[][]): number[] {
  return (values[0] ?? []).map((_, d) => weights.reduce((sum, w, j) => sum + w * (values[j][d] ?? NaN), 0));
}

/** The nearest number of a format; Infinity beyond its largest. */
export function rounder(format: Format): (x: number) => number {
  if (format === "float64") return (x) => x;
  if (format === "float32") return Math.fround;
  const [bits, least, largest] = format === "float16" ? [10, -14, 65504] : [7, -126, 3.3895313892515355e38];
  return (x) => {
    if (!Number.isFinite(x) || x === 0) return x;
    const step = 2 ** (Math.max(Math.floor(Math.log2(Math.abs(x))), least) - bits);
    const count = x / step;
    const low = Math.floor(count);
    const rest = count - low;
    const rounded = (rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low) * step;
    return Math.abs(rounded) > largest ? Math.sign(rounded) * Infinity : rounded;
  };
}

/** The keys to show, in the order of the text: those that some setting gives a large weight, and the row's own token. */
export function shownKeys(scores: Scores, own: number | null, most: number, scale: number, among: number[] | null = null): number[] {
  const count = scores.products.length;
  const held = among && new Set(among);
  if (count <= most) return scores.products.map((_, j) => j);
  const best: number[] = scores.products.map((product) => (product === null ? 1 : 0)); // what makes weights NaN is shown
  for (const mask of [true, false])
    for (const position of [true, false])
      for (const factor of [scale, 1]) {
        const { weights } = softmaxOf(scores, { scale: factor, mask, position, shift: true, format: "float64" });
        weights.forEach((w, j) => w > best[j] && (best[j] = w));
      }
  if (own !== null) best[own] = Infinity;
  const found = best.map((w, j) => [w, j] as const).filter(([, j]) => !held || held.has(j));
  return found.sort((a, b) => b[0] - a[0]).slice(0, most).map(([, j]) => j).sort((a, b) => a - b);
}

/** With so many decimals; a sign of its own for what is hidden or, as null, no number. */
export function numberText(value: number | null, digits: number): string {
  if (value === null || Number.isNaN(value)) return "NaN";
  if (value === -Infinity) return "−∞";
  if (value === Infinity) return "∞";
  if (Math.abs(value) >= 1e7) return value.toExponential(3).replace("e+", "e");
  if (digits > 3 && Number.isInteger(value)) return String(value); // an example by hand
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}
