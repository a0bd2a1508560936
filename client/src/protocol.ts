// The requests of protocol version 1. Row i of a map is query token i, column j is key token j.

export type What = "weights" | "logits" | "bias";
export type Pool = "max" | "mean";

/** One sequence of tokens of a run; `prompt`: tokens from this one on were generated. */
export interface Side {
  id: string;
  name: string;
  tokens: number;
  words: number;
  named: boolean;
  prompt: number | null;
}

/** One call of attention: a map per head and item, (rows.length, keys.length). */
export interface Call {
  id: string;
  name: string;
  layer: number;
  kind: "self" | "cross";
  heads: number;
  kv_heads: number;
  width: number;
  items: number;
  /** `placed`: the key at which row 0 of the first item stands; `placed_by_item` where items differ. */
  rows: { side: string; length: number; placed: number; placed_by_item?: number[] };
  keys: { side: string; length: number };
  causal: boolean;
  mask: string | null;
  bias: string | null;
  scale: number;
  softcap: number | null;
  sink: boolean;
}

export interface Run {
  id: string;
  model: string;
  text: string;
  /** Of the whole text, of which `text` is the beginning. */
  digest?: string;
  /** The context that the model was trained on, where the text is longer. */
  beyond?: number | null;
  sides: Side[];
  calls: Call[];
}

export interface Finding {
  sentence: string;
  call: string;
  head: number;
  row: number;
  key: number;
}

export interface Manifest {
  version: number;
  title: string;
  saccade: string;
  runs: Run[];
  shown: { run: string; call: string; head: number; item: number };
  findings: Finding[];
  step: boolean;
  /** Why the model does not read the text again, where it does not. */
  why_not?: string | null;
}

/** The one with an id, if there is any. */
export const byId = <T extends { id: string }>(all: readonly T[] | undefined, id: string | undefined): T | undefined =>
  all?.find((one) => one.id === id);

const standing = new WeakMap<Call, Call[]>();

/** A call as one of its items has it: rows of items may stand at different keys. */
export function callOf(call: Call, item: number): Call {
  const placed = call.rows.placed_by_item?.[item];
  if (placed === undefined) return call;
  const known = standing.get(call) ?? [];
  standing.set(call, known);
  return (known[item] ??= { ...call, rows: { ...call.rows, placed } });
}

/** [text, label, first_token, end_token, special, gap_before (the text between it and the word before), token texts] */
export type WordTuple = [string, string, number, number, 0 | 1, string, string[]];

export interface HeadSummary {
  call: string;
  head: number;
  role: string | null;
  decided_by: string | null;
  score: number | null;
  sampled: number;
  entropy: number | null;
  evenness: number | null;
  largest: number | null;
  distance: number | null;
  self: number | null;
  previous: number | null;
  next: number | null;
  first: number | null;
  sink: number | null;
  alarms: string[];
}

export interface Place {
  run: string;
  call: string;
  head: number;
  item: number;
}

export interface TileParams extends Place {
  what: What;
  pool: Pool;
  level: number;
  row: number;
  key: number;
  exact: boolean;
}

export interface LineParams extends Place {
  tokens: number[];
  start: number;
  stop: number;
  top: number;
}

/** Every request: its parameters and the header of its reply. */
export interface Protocol {
  open: { params: Record<string, never>; header: Manifest };
  words: {
    params: { run: string; side: string; start: number; stop: number };
    header: { words: WordTuple[] };
  };
  overview: { params: { run: string; item: number }; header: { side: number; heads: HeadSummary[] } };
  /** `sampled`: as few rows of each bin were used, 0: all; `final`: of a saved page, which has no better one. */
  tile: { params: TileParams; header: { rows: number; keys: number; sampled: number; final?: boolean } };
  row: { params: LineParams; header: { top: [number, number][]; entropy: number | null; sum: number | null } };
  column: { params: LineParams; header: { top: [number, number][]; received: number | null } };
  cell: {
    params: Place & { row: number; key: number };
    header: {
      weight: number | null;
      rank: number | null;
      seen: number;
      logit: number | null;
      product: number | null;
      bias: number | null;
      visible: boolean;
    };
  };
  /** `received_keys`: keys are other tokens than rows, and a second buffer has what those of [start, stop) receive. */
  rows: {
    params: Place & { start: number; stop: number };
    header: { names: string[]; received: boolean; received_keys?: number };
  };
  search: {
    params: { run: string; side: string; query: string; limit: number };
    /** `covered`: tokens among which a saved page searches; left out: all. */
    header: { total: number; found: [number, number, number, string, string, string][]; covered?: number };
  };
  step: { params: Place & { row: number }; header: Record<string, unknown> };
  /**
   * `loss` in nats a token with all heads on and without those that are off, and after `row` the likely tokens with both
   * probabilities, or in its place where the model is a `masked` one; the numbers are log-probabilities of all tokens,
   * before and after. A model that predicts none has neither, for a `reason`, and its numbers are the changes of its last
   * hidden states.
   */
  heads: {
    params: { run: string; off: [string, number][]; row: number | null };
    header: { side: string; loss: [number | null, number | null] | null; next: [string, number, number][] | null;
      masked: boolean; reason: string | null };
  };
  /** Of every head, in the order of the run's calls: the share of a metric that it brings back from another text. */
  patching: {
    params: { run: string; other: string; target: string; positions: string; by: string };
    header: { of: string; clean: number; corrupted: number; sentences: string[] };
  };
  /** Of every head, in the order of the run's calls: the slope of the loss by a gate on it. */
  importance: { params: { run: string }; header: { loss: number } };
  /** Of what takes long: how much of it is done; nothing where that is not known. */
  progress: { params: Record<string, never>; header: { done?: number; total?: number } };
  script: { params: { name: string }; header: { text: string } };
}

export type Op = keyof Protocol;

/** A reply: the header's fields, and the numbers of its first buffer (empty when there is none). */
export type Answer<O extends Op> = Protocol[O]["header"] & { data: Float32Array };
