import assert from "node:assert/strict";
import { test } from "node:test";
import { cellText, difference, mix, readable, Lru, makeScale, mostUnder, colourInto, roundRange, roundUp, STEPS, TileStore, write } from "../build/test.mjs";

const MAP = { run: "0", call: "0", head: 0, item: 0, what: "weights", pool: "max" };
const at = (level, row, key) => ({ map: MAP, at: { level, row, key } });
const rest = () => new Promise((resolve) => setTimeout(resolve, 0));

/** A server that answers when told to. */
function server(sampled = () => 0, exactly = () => 0) {
  const open = [];
  const fetchTile = (params, signal) => new Promise((resolve, reject) => {
    const entry = { params, aborted: false,
      answer: (fill = 1) => resolve({ rows: 2, keys: 3, sampled: (params.exact ? exactly : sampled)(params),
      data: new Float32Array(6).fill(fill) }), fail: reject };
    signal.addEventListener("abort", () => {
      entry.aborted = true;
      reject(new Error("aborted"));
    });
    open.push(entry);
  });
  return { open, fetchTile, names: () => open.map((e) => `${e.params.row} ${e.params.key}`) };
}

test("the one used longest ago goes when the budget is spent", () => {
  const lru = new Lru(10);
  lru.set("a", 1, 4);
  lru.set("b", 2, 4);
  lru.get("a");
  lru.set("c", 3, 4);
  assert.deepEqual([lru.get("a"), lru.get("b"), lru.get("c"), lru.bytes], [1, undefined, 3, 8]);
  lru.set("a", 5, 1);
  assert.deepEqual([lru.get("a"), lru.get("c"), lru.bytes], [5, 3, 5]);
  lru.set("d", 6, 99);
  assert.deepEqual([lru.get("a"), lru.get("c"), lru.get("d")], [undefined, undefined, 6]);
});

test("at most four requests, in order, the next when one is answered", async () => {
  const { open, fetchTile, names } = server();
  const store = new TileStore(fetchTile, () => {}, assert.fail);
  store.want([0, 1, 2, 3, 4, 5].map((key) => at(0, 0, key)));
  assert.deepEqual(names(), ["0 0", "0 1", "0 2", "0 3"]);
  open[2].answer();
  await rest();
  assert.deepEqual(names(), ["0 0", "0 1", "0 2", "0 3", "0 4"]);
  assert.equal(store.get(MAP, { level: 0, row: 0, key: 2 }).high, 1);
});

test("what left the view is dropped, what stays is not asked for again", async () => {
  const { open, fetchTile, names } = server();
  const store = new TileStore(fetchTile, () => {}, assert.fail);
  store.want([0, 1, 2, 3, 4].map((key) => at(0, 0, key)));
  store.want([3, 9].map((key) => at(0, 0, key)));
  assert.deepEqual(open.map((e) => e.aborted), [true, true, true, false, false]);
  assert.deepEqual(names().slice(3), ["0 3", "0 9"]);
  await rest();
  assert.ok(store.busy);
});

test("sampled tiles are replaced by exact ones, two at once, after everything missing", async () => {
  const { open, fetchTile } = server(() => 4), came = [];
  const store = new TileStore(fetchTile, (tile) => came.push(tile.sampled), assert.fail);
  store.want([0, 1, 2, 3, 4].map((key) => at(7, 0, key)));
  open[0].answer();
  await rest();
  assert.deepEqual(open.map((e) => e.params.exact), [false, false, false, false, false]);
  for (const entry of open.slice(1)) entry.answer();
  await rest();
  assert.deepEqual(open.slice(5).map((e) => e.params.exact), [true, true]);
  open[5].answer(9);
  await rest();
  assert.deepEqual([came.at(-1), store.get(MAP, { level: 7, row: 0, key: 0 }).high], [0, 9]);
  const rough = new TileStore(fetchTile, () => {}, assert.fail), before = open.length;
  rough.want([{ ...at(7, 0, 0), rough: true }]);
  open[before].answer();
  await rest();
  assert.equal(open.length, before + 1);
});

test("a tile that stays sampled keeps its sign and is asked for twice, not for ever", async () => {
  const { open, fetchTile } = server(() => 4, () => 1);
  const store = new TileStore(fetchTile, () => {}, assert.fail);
  store.want([at(7, 0, 0)]);
  for (const entry of open) {
    entry.answer();
    await rest();
  }
  assert.deepEqual(open.map((e) => e.params.exact), [false, true]);
  assert.deepEqual([store.get(MAP, { level: 7, row: 0, key: 0 }).sampled, store.busy], [1, false]);
  store.want([at(7, 0, 0)]);
  assert.equal(open.length, 2);
  const saved = [], page = new TileStore(async (params) => {
    saved.push(params.exact);
    return { rows: 1, keys: 1, sampled: 2, final: true, data: Float32Array.of(1) };
  }, () => {}, assert.fail);
  page.want([at(7, 0, 0)]);
  await rest();
  assert.deepEqual(saved, [false]);
});

test("a tile that fails is asked for three times, not for ever", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { open, fetchTile } = server(), errors = [];
  const store = new TileStore(fetchTile, () => {}, (error) => errors.push(error.message));
  store.want([at(0, 0, 0)]);
  for (let i = 0; i < 5; i++) {
    open.at(-1).fail(new Error("no"));
    await Promise.resolve().then().then().then();
    t.mock.timers.tick(5000);
    await Promise.resolve().then().then().then();
  }
  assert.deepEqual([open.length, errors.length, store.busy, store.gaveUp], [3, 3, false, true]);
  store.retry();
  assert.deepEqual([open.length, store.gaveUp], [4, false]);
  open[3].answer();
  await Promise.resolve().then().then().then();
  assert.equal(store.get(MAP, { level: 0, row: 0, key: 0 }).high, 1);
  store.want([at(0, 0, 1)]);
  assert.equal(store.gaveUp, false);
});

test("differences: hidden in both is hidden, a weight hidden in one is 0 there", () => {
  const tile = (values) => ({ level: 0, rows: 1, keys: 4, sampled: 0, data: Float32Array.from(values), low: 0,
    high: 1 });
  const a = tile([0.5, NaN, NaN, 0.25]), b = tile([0.25, 0.5, NaN, NaN]);
  assert.deepEqual([...difference(a, b, true).data], [0.25, -0.5, NaN, 0.25]);
  assert.equal(difference(a, b, true), difference(a, b, true));
  assert.deepEqual([...difference(tile([3, NaN, NaN, 1]), b, false).data], [2.75, NaN, NaN, NaN]);
});

const palette = {
  paper: [253, 253, 252], ink: [21, 23, 28], quiet: [89, 96, 109], accent: [28, 78, 216], against: [180, 83, 9],
  hidden: [233, 234, 237],
};

test("linear weights: 0 is paper, 1 the accent, NaN transparent, half lies between", () => {
  const scale = makeScale(palette, "weights", "linear", 61, [0, 1], false), pixels = new Uint32Array(4);
  colourInto(pixels, Float32Array.from([0, 1, NaN, 0.5]), scale);
  const bytes = [...new Uint8Array(pixels.buffer)];
  assert.deepEqual(bytes.slice(0, 12), [253, 253, 252, 255, 28, 78, 216, 255, 0, 0, 0, 0]);
  for (let i = 0; i < 3; i++) assert.ok(Math.abs(bytes[12 + i] - (palette.paper[i] + palette.accent[i]) / 2) <= 1);
  assert.deepEqual(scale.ticks.map((t) => t.text), ["0", "0.5", "1"]);
  assert.equal(scale.pixels.length, STEPS);
});

test("logarithmic weights: equal factors are equal steps, and a tenth of an even share is the end", () => {
  const scale = makeScale(palette, "weights", "log", 100_000, [0, 1], false);
  const steps = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1].map(scale.place);
  for (let i = 1; i < steps.length; i++) assert.ok(Math.abs(steps[i] - steps[i - 1] - 1 / 6) < 1e-9);
  assert.deepEqual([scale.place(0), scale.place(1e-9), scale.place(1)], [0, 0, 1]);
  assert.ok(scale.ticks[0].text.startsWith("≤"));
});

test("differences are two-sided around 0", () => {
  for (const tone of ["linear", "log"]) {
    const scale = makeScale(palette, "weights", tone, 61, [0, 1], true);
    assert.deepEqual([scale.place(0), scale.place(1), scale.place(-1)], [0.5, 1, 0]);
    assert.ok(Math.abs(scale.place(0.3) + scale.place(-0.3) - 1) < 1e-12);
    assert.deepEqual(scale.colourAt(0.5).map(Math.round), palette.paper);
    assert.deepEqual([scale.colourAt(0), scale.colourAt(1)], [palette.against, palette.accent]);
  }
});

test("other numbers have round ends around what came", () => {
  assert.deepEqual(roundRange(-3.2, 7.9), [-5, 10]);
  assert.deepEqual(roundRange(Infinity, -Infinity), [0, 1]);
  const scale = makeScale(palette, "logits", "log", 61, [-5, 10], false);
  assert.deepEqual([scale.place(-5), scale.place(10), scale.place(2.5)], [0, 1, 0.5]);
});

test("numbers are written short", () => {
  assert.deepEqual([0.12345, 1, 0, 0.00012, -3.14159, 1234.5, -Infinity].map(write),
    ["0.123", "1.000", "0.000", "1.2e−4", "−3.142", "1235", "−∞"]);
});

test("numbers in cells mislead nobody, and stand in the colour that reads better", () => {
  const text = (what, tone, ...values) => values.map((value) => cellText(value, what, tone));
  assert.deepEqual(text("weights", "linear", 0, 0.0003, 0.0051, 0.254, 1, -0.36), ["0", "", ".01", ".25", "1.0", "−.36"]);
  assert.deepEqual(text("weights", "log", 0, 0.0003, 0.25), ["0", "3e−4", ".25"]);
  assert.deepEqual(text("logits", "linear", -12.4, 3.21, -0.002), ["−12", "3.2", "−2e−3"]);
  const palette = { paper: [253, 253, 252], ink: [21, 23, 28], accent: [28, 78, 216], against: [180, 83, 9] };
  const light = (c) => c.map((v) => (v / 255) ** 2.2).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
  const contrast = (a, b) => Math.max(light(a), light(b)) / Math.min(light(a), light(b));
  for (const { paper, ink } of [palette, { paper: palette.ink, ink: palette.paper }])
    for (const compared of [false, true]) {
      const scale = makeScale({ ...palette, paper, ink }, "weights", "linear", 61, [0, 1], compared);
      for (const value of [-1, -0.36, 0, 0.25, 0.36, 1]) {
        const ground = scale.colourAt(scale.place(value)), chosen = readable(ground, ink, paper);
        assert.ok(contrast(ground, chosen) > 4, `${value} on ${ground}`);
      }
    }
  assert.deepEqual(readable(mix(palette.paper, palette.accent, 0.25), palette.ink, palette.paper), palette.ink);
});

test("a logarithmic legend has room for its numbers at every length of text", () => {
  const palette = { paper: [253, 253, 252], accent: [28, 78, 216], against: [180, 83, 9] };
  for (const keys of [61, 600, 5000, 20_000, 400_000, 3_000_000, 1e8]) {
    const { ticks } = makeScale(palette, "weights", "log", keys, [0, 1], false);
    assert.ok(ticks[0].at === 0 && ticks[0].text.startsWith("≤") && ticks.at(-1).at === 1);
    for (let i = 1; i < ticks.length; i++) assert.ok(ticks[i].at - ticks[i - 1].at >= 0.25);
  }
  const means = makeScale(palette, "weights", "linear", 61, [0, 1], false, 0.0005);
  assert.deepEqual(means.ticks.map(({ text }) => text), ["0", "2.5e−4", "≥ 5e−4"]);
  assert.equal(means.place(0.00025), 0.5);
  const data = Float32Array.from({ length: 1000 }, (_, i) => (i < 500 ? NaN : i < 503 ? 0.9 : (i - 502) / 1e5));
  const found = mostUnder({ data });
  assert.ok(found > 0.0048 && found < 0.9 && roundUp(found) === 0.005);
  assert.equal(mostUnder({ data: new Float32Array(3).fill(NaN) }), 0);
});
