// Numbers of heads that are off, without a page: changes of words, scales, and how they are written.
import type { Call } from "../protocol";
import type { Word } from "../words";

/** What is told of a word. `before` and `after` are log-probabilities; null: nothing comes before it to predict it from. */
export interface Change { before: number | null; after: number | null; change: number | null }

/** The change of a word, over its tokens: log-probabilities add up; the change of states is their mean. */
export function changeOf(data: ArrayLike<number>, predicted: boolean, { first, end }: Pick<Word, "first" | "end">): Change {
  const length = predicted ? data.length / 2 : data.length;
  let before = 0, after = 0, counted = 0;
  for (let token = first; token < Math.min(end, length); token++) {
    if (Number.isNaN(data[token])) continue;
    before += data[token];
    after += predicted ? data[length + token] : 0;
    counted++;
  }
  if (!counted) return { before: null, after: null, change: null };
  return predicted ? { before, after, change: after - before } : { before: null, after: null, change: before / counted };
}

/** The end of a scale that holds these numbers: 1, 2 or 5 times a power of ten, of what is not NaN; 0 where all are 0. */
export function reach(values: Iterable<number | null>): number {
  let most = 0;
  for (const value of values) if (value !== null && Number.isFinite(value)) most = Math.max(most, Math.abs(value));
  if (most === 0) return 0;
  const ten = 10 ** Math.floor(Math.log10(most)), steps = [1, 2, 5, 10];
  return ten * (steps.find((step) => step * ten >= most * (1 - 1e-9)) ?? 10);
}

/** With its sign, and a minus that is as wide as a plus. */
export function signed(value: number | null, digits = 2): string {
  if (value === null || !Number.isFinite(value)) return "–";
  const text = written(Math.abs(value), digits);
  return Number(text) === 0 ? text : (value < 0 ? "−" : "+") + text;
}

/** Two decimals or as many as show two digits, at most four. */
function written(value: number, digits: number): string {
  const more = value > 0 && value < 0.1 ? Math.min(4, digits - 1 - Math.floor(Math.log10(value))) : digits;
  return value >= 100 ? value.toFixed(0) : value.toFixed(Math.max(digits, more));
}

/** As many decimals as show the hundredth part of a scale's end, at most four: small next to it is 0. */
export const signedWithin = (value: number, most: number): string => {
  const text = Math.abs(value).toFixed(most > 0 ? Math.max(0, Math.min(4, 1 - Math.floor(Math.log10(most)))) : 0);
  return Number(text) === 0 ? text : (value < 0 ? "−" : "+") + text;
};

/** A probability as percent: 34 %, 3.4 %, 0.34 %, < 0.01 %. */
export function percent(share: number): string {
  const value = 100 * share;
  if (value < 0.01) return value > 0 ? "< 0.01 %" : "0 %";
  return `${value >= 9.95 ? value.toFixed(0) : value >= 0.995 ? value.toFixed(1) : value.toFixed(2)} %`;
}

/** "−0.81 nats: from 4.0 % to 1.8 %". */
export function tellChange({ before, after, change }: Change, masked = false): string {
  if (change === null) return masked ? "none of the tokens that were masked" : "no token comes before it to predict it from";
  if (before === null || after === null) return `last hidden states change by ${percent(change)}`;
  return `${signed(change)} nats: from ${percent(Math.exp(before))} to ${percent(Math.exp(after))}`;
}

/** A row of the table of losses: name, with all heads, without some, change. */
export type LossRow = [name: string, before: string, after: string, change: string];

/** Loss and perplexity of both, as the table has them. */
export function lossRows([before, after]: readonly [number | null, number | null]): LossRow[] {
  const row = (name: string, of: (loss: number) => number): LossRow => {
    const [a, b] = [before, after].map((loss) => (loss === null ? null : of(loss)));
    const text = (value: number | null): string => (value === null ? "–" : written(value, 2));
    return [name, text(a), text(b), a === null || b === null ? "–" : signed(b - a)];
  };
  return [row("Loss, nats a token", (loss) => loss), row("Perplexity", Math.exp)];
}

/** Numbers of all heads in the order of the calls, by call and head. */
export function byHead(calls: readonly Call[], numbers: ArrayLike<number>): Map<string, number[]> {
  let at = 0;
  return new Map(calls.map(({ id, heads }) => [id, Array.from({ length: heads }, () => numbers[at++])]));
}

/** What switching each head off adds to the loss, to first order, by call and head. */
export const worths = (calls: readonly Call[], slopes: ArrayLike<number>): Map<string, number[]> =>
  byHead(calls, Array.from(slopes, (slope) => -slope));

/** Heads that are off, by run; in the order in which they were switched off. */
export class OffHeads {
  readonly #runs = new Map<string, [string, number][]>();

  of(run: string): readonly [string, number][] {
    return this.#runs.get(run) ?? [];
  }

  has(run: string, call: string, head: number): boolean {
    return this.of(run).some(([c, n]) => c === call && n === head);
  }

  /** Switches a head off, or on again; says whether it is off now. */
  turn(run: string, call: string, head: number): boolean {
    const rest = this.of(run).filter(([c, n]) => c !== call || n !== head), off = rest.length === this.of(run).length;
    this.#runs.set(run, off ? [...rest, [call, head]] : rest);
    return off;
  }

  clear(run: string): void {
    this.#runs.delete(run);
  }
}
