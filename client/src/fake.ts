// A synthetic Python: a causal run of 100,000 tokens, a short run in both directions, and a translation. Deterministic.
// Its weights are mixtures with known sums, so that rows sum to 1 at any length; sampled tiles are said to be so.
import { together } from "./panels/data";
import type { Call, HeadSummary, LineParams, Manifest, Place, TileParams, WordTuple } from "./protocol";
import { RequestError, type Reply, type Transport } from "./transport";

const LONG = 100_000;
const WINDOW = 4096;
const STRIPE = 97;

/** One head: weights of pairs; NaN where the mask hides the pair. */
interface Head {
  weight(i: number, j: number): number;
  entropy(i: number): number;
}

/** Shares of a row: first token, itself, previous, near ones (falling by `ratio`), every 97th token, all alike. */
interface Mixture {
  sink: number;
  self: number;
  previous: number;
  near: number;
  ratio: number;
  stripe: number;
  even: number;
  window: number;
}

function mixture(m: Mixture): Head {
  const seen = (i: number): number => Math.min(i + 1, m.window);
  const weight = (i: number, j: number): number => {
    if (j > i || i - j >= m.window) return NaN;
    const stripes = Math.floor(i / STRIPE) - Math.ceil((i + 1 - seen(i)) / STRIPE) + 1;
    let w = m.even / seen(i) + (m.near * (1 - m.ratio) * m.ratio ** (i - j)) / (1 - m.ratio ** seen(i));
    if (j === i) w += m.self + (i === 0 ? m.previous : 0) + (i >= m.window ? m.sink : 0) + (stripes ? 0 : m.stripe);
    if (j === 0) w += m.sink;
    if (j === i - 1) w += m.previous;
    if (j % STRIPE === 0) w += m.stripe / stripes;
    return w;
  };
  const spread = 1 / (1 - m.ratio);
  const part = (share: number, over: number): number => (share > 0 ? share * Math.log(Math.max(1, over) / share) : 0);
  const entropy = (i: number): number => Math.max(0, part(m.even, seen(i)) + part(m.near, Math.min(seen(i), spread)) +
    part(m.stripe, seen(i) / STRIPE) + part(m.self, 1) + part(m.previous, 1) + part(m.sink, 1));
  return { weight, entropy };
}

/** A few pairs that hold the largest and that stand for the mean of a bin [r0, r1) x [k0, k1). */
function bin(
  head: Head, pool: string, r0: number, r1: number, k0: number, k1: number,
  of: (w: number, i: number, j: number) => number,
): number {
  let best = NaN, sum = 0, count = 0;
  const look = (i: number, j: number): void => {
    const w = i >= r0 && i < r1 && j >= k0 && j < k1 ? head.weight(i, j) : NaN;
    if (Number.isNaN(w)) return;
    const value = of(w, i, j);
    best = Number.isNaN(best) ? value : Math.max(best, value);
    sum += value;
    count++;
  };
  if (r1 - r0 === 1) {
    look(r0, k0);
    return best;
  }
  for (const j of [k0, k1 - 1, Math.ceil(k0 / STRIPE) * STRIPE, Math.min(k1, r1) - 1])
    for (const i of [Math.max(r0, j), Math.max(r0, j + 1), r1 - 1]) look(i, j);
  if (pool === "max") return best;
  sum = count = 0;
  for (let a = 0; a < 4; a++) for (let b = 0; b < 4; b++)
    look(Math.floor(r0 + ((a + 0.5) * (r1 - r0)) / 4), Math.floor(k0 + ((b + 0.5) * (k1 - k0)) / 4));
  return count ? sum / count : best;
}

const random = (seed: number): (() => number) => {
  let state = seed >>> 0 || 1;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
};

/** A head of a short map: softmax of random logits, with peaks near the diagonal; keys from `hide` on are padding. */
function dense(rows: number, keys: number, seed: number, hide = keys): Head {
  const next = random(seed);
  const weights: Float64Array[] = [];
  for (let i = 0; i < rows; i++) {
    const exps = new Float64Array(keys).fill(NaN);
    let sum = 0;
    for (let j = 0; j < hide; j++) {
      exps[j] = Math.exp(3 * next() + 4 * Math.exp(-(((i * keys) / rows - j + (seed % 3) - 1) ** 2) / 2));
      sum += exps[j];
    }
    weights.push(exps.map((e) => e / sum));
  }
  return {
    weight: (i, j) => weights[i][j],
    entropy: (i) => -weights[i].reduce((sum, w) => (w > 0 ? sum + w * Math.log(w) : sum), 0),
  };
}

const VOCABULARY = (
  "the of and to a in that it was his her with as for had not but at on she he him be is all which by from this have " +
  "were so there when one what very old said would no upon house river morning letter window carriage friend mother " +
  "evening garden thought moment another between nothing extraordinarily gentleman remembered countryside"
).split(" ");
const NASTY =
  "The cat</script><script>alert(1)</script> <b>sat</b> &amp; \"looked\" at \u0007 the שלום עולם mat because it was " +
  "soft \n\n and \u202e , after a very long_word_without_any_end_that_is_never_cut_anywhere , naïve 🐈 café – slept {{ 7*7 }} " +
  "until the rain had ended ; then it rose , stretched , and went out through the half-open door of the old house by " +
  "the river .";

/** Words of one to three tokens over exactly `tokens` tokens. */
function makeWords(tokens: number, text?: string): WordTuple[] {
  const next = random(tokens), given = text?.split(" "), out: WordTuple[] = [];
  let sentence = 0;
  for (let first = 0; first < tokens;) {
    let word = given ? given[out.length] ?? "…" : VOCABULARY[Math.floor(next() ** 1.6 * VOCABULARY.length)];
    if (!given && sentence > 8 && next() < 0.2) word = ".";
    if (!given && first % STRIPE === 0) word = "Margaret";
    sentence = word === "." ? 0 : sentence + 1;
    if (!given && sentence === 1) word = word[0].toUpperCase() + word.slice(1);
    const parts = Math.min(word.length > 9 ? 3 : word.length > 6 ? 2 : 1, tokens - first, STRIPE - (first % STRIPE));
    const cut = Math.ceil(word.length / parts);
    const label = word.trim() ? word.replace(/[\u0000-\u001f]/g, "\ufffd") : "⏎";
    out.push([word, label, first, first + parts, 0, first && word !== "." ? " " : "",
      Array.from({ length: parts }, (_, p) => word.slice(p * cut, (p + 1) * cut))]);
    first += parts;
  }
  return out;
}

function call(
  id: number, name: string, heads: number, rows: [string, number], keys: [string, number], more: Partial<Call> = {},
): Call {
  return {
    id: String(id), name, layer: id, kind: rows[0] === keys[0] ? "self" : "cross", heads, kv_heads: heads / 2,
    width: 32, items: 1,
    rows: { side: rows[0], length: rows[1], placed: 0 }, keys: { side: keys[0], length: keys[1] }, causal: false,
    mask: null,
    bias: null, scale: 32 ** -0.5, softcap: null, sink: false, ...more,
  };
}

interface FakeRun {
  words: Record<string, WordTuple[]>;
  heads(call: Call, head: number, item: number): Head;
}

function makeRuns(): { manifest: Manifest; runs: Record<string, FakeRun> } {
  const short = 61, source = 47, target = 53;
  const side = (id: string, tokens: number, words: WordTuple[], prompt: number | null = null) =>
    ({ id, name: id, tokens, words: words.length, named: true, prompt });
  const words = {
    long: makeWords(LONG), short: makeWords(short, NASTY), source: makeWords(source, NASTY.slice(60)),
    target: makeWords(target),
  };
  const shares = (layer: number, head: number): Mixture => {
    const next = random(97 * layer + head + 5), window = layer === 3 ? WINDOW : LONG;
    const raw = [
      layer === 3 ? 0 : next() ** 3, next() ** 4, head === 3 ? 6 : next() ** 6, next(), head % 3 ? 0.05 : next(),
      0.1 + next() ** 2,
    ];
    const sum = raw.reduce((a, b) => a + b);
    const [sink, self, previous, near, stripe, even] = raw.map((r) => r / sum);
    return { sink, self, previous, near, stripe, even, ratio: 1 - 10 ** (-0.3 - 3.2 * next()), window };
  };
  const cache = new Map<string, Head>();
  const kept = (key: string, make: () => Head): Head => {
    if (!cache.has(key)) cache.set(key, make());
    return cache.get(key)!;
  };
  const long: [string, number] = ["text", LONG], few: [string, number] = ["text", short];
  const manifest: Manifest = {
    version: 1, title: "Synthetic numbers", saccade: "0.1.0", shown: { run: "0", call: "1", head: 3, item: 0 },
    step: true,
    findings: [{ sentence: "Layer 1 head 3 looks at the previous word", call: "1", head: 3, row: 12, key: 11 }],
    runs: [
      { id: "0", model: "four layers", text: "A long text of made-up sentences",
        sides: [side("text", LONG, words.long)],
        calls: [0, 1, 2, 3].map((l) => call(l, `blocks.${l}.attention`, 8, long, long, {
          causal: true, bias: l === 0 ? "ALiBi" : null,
          mask: l === 3 ? `Causal() & Window(left=${WINDOW - 1})` : "Causal()" })) },
      { id: "1", model: "both directions", text: NASTY, beyond: 48, sides: [side("text", short, words.short, 40)],
        calls: [0, 1].map((l) => call(l, `encoder.${l}`, l ? 4 : 6, few, few, { items: 2, mask: "Padding([59])" })) },
      { id: "2", model: "translation", text: NASTY.slice(60),
        sides: [side("source", source, words.source), side("target", target, words.target)],
        calls: [call(0, "encoder.0", 4, ["source", source], ["source", source]),
          call(1, "decoder.0.cross", 4, ["target", target], ["source", source])] },
      { id: "3", model: "both directions, later", text: NASTY, sides: [side("text", short, words.short, 40)],
        calls: [0, 1].map((l) => call(l, `encoder.${l}`, l ? 4 : 6, few, few, { items: 2, mask: "Padding([59])" })) },
    ],
  };
  const runs = {
    "0": { words: { text: words.long },
      heads: (c: Call, n: number) => kept(`0 ${c.id} ${n}`, () => mixture(shares(c.layer, n))) },
    "1": { words: { text: words.short }, heads: (c: Call, n: number, item: number) =>
      kept(`1 ${c.id} ${n} ${item}`, () => dense(short, short, 31 * c.layer + n + 7 + 100 * item, 59)) },
    "3": { words: { text: words.short }, heads: (c: Call, n: number, item: number) =>
      kept(`3 ${c.id} ${n} ${item}`, () => dense(short, short, 53 * c.layer + n + 9 + 100 * item, 59)) },
    "2": { words: { source: words.source, target: words.target }, heads: (c: Call, n: number) =>
      kept(`2 ${c.id} ${n}`, () => dense(c.rows.length, c.keys.length, 17 * c.layer + n + 3)) },
  };
  return { manifest, runs };
}

const buffer = (numbers: ArrayLike<number>): ArrayBuffer => Float32Array.from(numbers).buffer as ArrayBuffer;
const largest = (pairs: [number, number][], top: number): [number, number][] =>
  pairs.filter(([, w]) => w > 0).sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, top);

/** Answers after `delay` milliseconds, at once where it is 0. */
export function fakeTransport(delay = 0): Transport {
  const { manifest, runs } = makeRuns();
  const callOf = (run: string, id: string): Call => {
    const found = manifest.runs.find((r) => r.id === run)?.calls.find((c) => c.id === id);
    if (!found) throw new RequestError(`There is no call ${id} in run ${run}.`);
    return found;
  };
  const headOf = (p: Place): Head => runs[p.run].heads(callOf(p.run, p.call), p.head, p.item);

  const measure = (c: Call, what: string) => (w: number, i: number, j: number): number =>
    what === "weights" ? w : what === "bias" ? -(2 ** -4) * (i - j) : Math.log(w) + 4 - c.layer;

  const ops: Record<string, (p: never) => Reply> = {
    open: () => ({ header: manifest as unknown as Record<string, unknown>, buffers: [] }),
    words: ({ run, side, start, stop }: { run: string; side: string; start: number; stop: number }) =>
      ({ header: { words: runs[run].words[side].filter((w) => w[3] > start && w[2] < stop) }, buffers: [] }),
    overview: ({ run, item }: { run: string; item: number }) => {
      const heads: HeadSummary[] = [], numbers: number[] = [];
      for (const c of manifest.runs.find((r) => r.id === run)!.calls) for (let n = 0; n < c.heads; n++) {
        const head = runs[run].heads(c, n, item), R = c.rows.length, K = c.keys.length, row = Math.floor(R * 0.7);
        heads.push({
          call: c.id, head: n, role: n === 3 ? "previous token" : null, decided_by: n === 3 ? "previous" : null,
          score: n === 3 ? 0.9 : null,
          sampled: R > 5000 ? 512 : 0, entropy: head.entropy(row), evenness: head.entropy(row) / Math.log(row + 1),
          largest: head.weight(row, row),
          distance: 10 * n, self: head.weight(row, Math.min(row, K - 1)),
          previous: head.weight(row, Math.max(0, Math.min(row, K) - 1)), next: null,
          first: head.weight(row, 0), sink: null, alarms: n === 5 ? ["One key gets nearly all weight."] : [],
        });
        const of = measure(c, "weights");
        for (let a = 0; a < 48; a++) for (let b = 0; b < 48; b++)
          numbers.push(bin(head, "max", Math.floor((a * R) / 48),
            Math.max(Math.floor((a * R) / 48) + 1, Math.floor(((a + 1) * R) / 48)),
            Math.floor((b * K) / 48), Math.max(Math.floor((b * K) / 48) + 1, Math.floor(((b + 1) * K) / 48)), of));
      }
      return { header: { side: 48, heads }, buffers: [buffer(numbers)] };
    },
    tile: (p: TileParams) => {
      const c = callOf(p.run, p.call), head = headOf(p), size = 2 ** p.level, of = measure(c, p.what);
      const r0 = p.row * 256 * size, k0 = p.key * 256 * size;
      const rows = Math.min(256, Math.ceil((c.rows.length - r0) / size));
      const keys = Math.min(256, Math.ceil((c.keys.length - k0) / size));
      if (rows <= 0 || keys <= 0) throw new RequestError("This tile is outside the map.");
      const out = new Float32Array(rows * keys);
      for (let i = 0; i < rows; i++) for (let j = 0; j < keys; j++)
        out[i * keys + j] = bin(head, p.pool, r0 + i * size, Math.min(c.rows.length, r0 + (i + 1) * size),
          k0 + j * size, Math.min(c.keys.length, k0 + (j + 1) * size), of);
      return { header: { rows, keys, sampled: !p.exact && p.level >= 5 ? 4 : 0 }, buffers: [out.buffer] };
    },
    row: (p: LineParams) => {
      const c = callOf(p.run, p.call), head = headOf(p), all: [number, number][] = [];
      let sum = 0, entropy = 0;
      for (let j = 0; j < c.keys.length; j++) {
        let w = 0;
        for (const i of p.tokens) w += (head.weight(i, j) || 0) / p.tokens.length;
        sum += w;
        if (w > 0) entropy -= w * Math.log(w);
        all.push([j, w]);
      }
      return { header: { top: largest([...all], p.top), entropy, sum },
        buffers: [buffer(all.slice(p.start, p.stop).map((e) => e[1]))] };
    },
    column: (p: LineParams) => {
      const c = callOf(p.run, p.call), head = headOf(p), all: [number, number][] = [];
      let received = 0;
      for (let i = 0; i < c.rows.length; i++) {
        let w = 0;
        for (const j of p.tokens) w += head.weight(i, j) || 0;
        received += w;
        all.push([i, w]);
      }
      return { header: { top: largest([...all], p.top), received },
        buffers: [buffer(all.slice(p.start, p.stop).map((e) => e[1]))] };
    },
    cell: (p: Place & { row: number; key: number }) => {
      const c = callOf(p.run, p.call), head = headOf(p), weight = head.weight(p.row, p.key);
      let rank = 1, seen = 0;
      for (let j = 0; j < c.keys.length; j++) {
        const w = head.weight(p.row, j);
        if (!Number.isNaN(w)) seen++;
        if (w > weight) rank++;
      }
      const visible = !Number.isNaN(weight), logit = visible ? Math.log(weight) + 4 - c.layer : null;
      const bias = visible && c.bias ? -(2 ** -4) * (p.row - p.key) : null;
      return { header: { weight: visible ? weight : null, rank: visible ? rank : null, seen, logit, product: logit,
        bias, visible }, buffers: [] };
    },
    rows: (p: Place & { start: number; stop: number }) => {
      const head = headOf(p), names = ["entropy", "largest", "largest_at", "distance", "self", "previous", "first",
        "sink"];
      const at = (name: string, i: number): number =>
        ({ entropy: head.entropy(i), largest: head.weight(i, 0), self: head.weight(i, i),
          previous: i ? head.weight(i, i - 1) : 0,
          first: head.weight(i, 0), distance: i / 3 })[name] ?? 0;
      const out = names.flatMap((name) => Array.from({ length: p.stop - p.start }, (_, i) => at(name, p.start + i)));
      const c = callOf(p.run, p.call);
      if (together(c)) return { header: { names, received: false }, buffers: [buffer(out)] };
      const received = Array.from({ length: p.stop - p.start }, (_, j) =>
        Array.from({ length: c.rows.length }, (_, i) => head.weight(i, p.start + j) || 0).reduce((a, b) => a + b));
      return { header: { names, received: true, received_keys: c.keys.length }, buffers: [buffer(out), buffer(received)] };
    },
    search: (p: { run: string; side: string; query: string; limit: number }) => {
      const words = runs[p.run].words[p.side], query = p.query.toLowerCase();
      const found = words.map((w, n) => [w, n] as const).filter(([w]) => query && w[0].toLowerCase().includes(query));
      const context = (from: number, to: number): string =>
        words.slice(Math.max(0, from), to).map((w) => w[5] + w[1]).join("");
      return { header: { total: found.length, found: found.slice(0, p.limit).map(([w, n]) =>
        [n, w[2], w[3], context(n - 4, n), w[1], context(n + 1, n + 5)]) }, buffers: [] };
    },
  };

  return {
    kind: "fake",
    async request(op, params, signal) {
      if (delay) await new Promise((resolve) => setTimeout(resolve, delay));
      if (signal?.aborted) throw new DOMException("The request was dropped.", "AbortError");
      try {
        if (!Object.hasOwn(ops, op)) throw new RequestError(`There is no request ${op}.`);
        return ops[op](params as never);
      } catch (error) {
        if (error instanceof RequestError) return { header: { error: error.message }, buffers: [] };
        throw error;
      }
    },
  };
}
