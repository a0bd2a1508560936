// The numbers of the page of steps, by hand.
import assert from "node:assert/strict";
import { test } from "node:test";
import { columnOf, leftOut, logitsOf, mixed, numberText, rounder, shownKeys, softmaxOf, stateOf, summed, weightsMoved } from "../build/test.mjs";

const SCORES = {
  products: [1, 0], unplaced: null, scale: 2 ** -0.5, softcap: null, bias: null, bias_of_positions: false, visible: null, sink: null,
};
const ALL = { scale: 2 ** -0.5, mask: true, position: true, shift: true, format: "float64" };
const near = (ours, theirs, most = 5e-7) => ours.forEach((x, i) => assert.ok(Math.abs(x - theirs[i]) <= most, `${ours} and ${theirs}`));

test("two keys by hand", () => {
  const { logits, maximum, exponentials, total, weights } = softmaxOf(SCORES, ALL);
  near(logits, [0.707107, 0]);
  near([maximum, total], [0.707107, 1.493069]);
  near(exponentials, [1, 0.493069]);
  near(weights, [0.669762, 0.330238]);
  near(mixed(weights, [[10, 20], [30, 40]]), [16.604769, 26.604769]);
  near(softmaxOf(SCORES, { ...ALL, shift: false }).exponentials, [2.028115, 1]);
});

test("every part can be left out", () => {
  const scores = {
    products: [2, -1, 4], unplaced: [1, 1, 1], scale: 0.5, softcap: 3, bias: [0.1, 0.2, 0.3], bias_of_positions: true,
    visible: [1, 1, 0], sink: 0.7,
  };
  const s = { ...ALL, scale: 0.5 };
  const cap = (x) => 3 * Math.tanh(x / 3);
  near(logitsOf(scores, s).slice(0, 2), [cap(1) + 0.1, cap(-0.5) + 0.2]);
  assert.equal(logitsOf(scores, s)[2], -Infinity);
  near([logitsOf(scores, { ...s, mask: false })[2]], [cap(2) + 0.3]);
  near(logitsOf(scores, { ...s, position: false }).slice(0, 2), [cap(0.5), cap(0.5)]);
  near([logitsOf(scores, { ...s, scale: 1 })[0]], [cap(2) + 0.1]);
  const { weights, total, maximum } = softmaxOf(scores, s);
  near([weights.reduce((a, b) => a + b) + Math.exp(0.7 - maximum) / total], [1]);
  assert.equal(weights[2], 0);
  assert.deepEqual(softmaxOf({ ...scores, visible: [0, 0, 0], sink: null }, s).weights, [0, 0, 0]); // an empty row
});

test("null is NaN where the key is seen, and nothing where it is hidden", () => {
  const scores = { ...SCORES, products: [1, null, 0], visible: [1, 1, 0] };
  assert.deepEqual(logitsOf(scores, ALL), [2 ** -0.5, NaN, -Infinity]);
  assert.deepEqual(softmaxOf(scores, ALL).weights, [NaN, NaN, NaN]);
  near(softmaxOf({ ...scores, visible: [1, 0, 1] }, ALL).weights, [0.669762, 0, 0.330238]);
  assert.deepEqual(logitsOf({ ...SCORES, bias: [0, null] }, ALL).slice(1), [NaN]);
  const products = Array.from({ length: 40 }, (_, j) => (j === 30 ? null : 0));
  assert.ok(shownKeys({ ...SCORES, products }, 0, 6, 1).includes(30));
});

test("formats round to the nearest, and overflow where they end", () => {
  const half = rounder("float16"), brain = rounder("bfloat16");
  // 1 + 2^-11 lies between 1 and 1 + 2^-10: the even one; the smallest of float16 is 2^-24.
  assert.deepEqual([1 + 2 ** -11, 1 + 3 * 2 ** -11, 65504, 65519, 65520, 2 ** -24, 2 ** -26, -0.1].map(half),
    [1, 1 + 2 ** -9, 65504, 65504, Infinity, 2 ** -24, 0, -0.0999755859375]);
  assert.deepEqual([1 + 2 ** -8, 1 + 3 * 2 ** -8, 3.3e38, 3.4e38].map(brain), [1, 1 + 2 ** -6, brain(3.3e38), Infinity]);
  assert.equal(rounder("float32")(0.1), Math.fround(0.1));
  const large = { ...SCORES, products: [12, 1] };
  const at = (format) => softmaxOf(large, { ...ALL, scale: 1, shift: false, format }).weights;
  assert.ok(Number.isNaN(at("float16")[0]));
  near(at("float32"), softmaxOf(large, { ...ALL, scale: 1 }).weights, 1e-6);
});

test("the keys that some setting makes large are shown, and the row itself", () => {
  const count = 5000;
  const products = Array.from({ length: count }, (_, j) => (j === 4000 ? 40 : j === 7 ? 30 : j === 8 ? 29 : -20));
  const visible = products.map((_, j) => (j <= 100 ? 1 : 0));
  const keys = shownKeys({ ...SCORES, products, visible }, 100, 6, SCORES.scale);
  assert.equal(keys.length, 6);
  for (const j of [7, 8, 100, 4000]) assert.ok(keys.includes(j), `${keys}`);
  assert.deepEqual(keys, [...keys].sort((a, b) => a - b));
});

test("numbers as text", () => {
  assert.deepEqual([null, -Infinity, NaN, -0.0001, -1.25, 12345678].map((x) => numberText(x, 3)), ["NaN", "−∞", "NaN", "0.000", "−1.250", "1.235e7"]);
  assert.deepEqual([1, 0.5].map((x) => numberText(x, 6)), ["1", "0.500000"]);
});

test("every step after a switch has the numbers of the switch, or says that it has not", () => {
  const scores = { ...SCORES, products: [2, 4, -1], scale: 0.5, softcap: 3, bias: [0.1, 0.2, 0.3], visible: [1, 0, 1] };
  const model = { ...ALL, scale: 0.5 }, unmasked = { ...model, mask: false };
  const ids = ["project", "dot", "scale", "mask", "softmax", "sum", "concat", "residual"];
  const states = (settings, moved, values) => ids.map((id) => stateOf(id, leftOut(scores, settings), scores, moved, values)).join(" ");
  assert.equal(states(model, false, true), "same same same same same same same same");
  assert.equal(states(unmasked, true, true), "same same same new new new old old");
  assert.equal(states({ ...model, scale: 1 }, true, false), "same same new new new old old old");
  assert.equal(states({ ...model, shift: false }, false, true), "same same same same new same same same");
  assert.equal(stateOf("position", ["position"], { ...scores, unplaced: [1, 1, 1] }, true, true), "old");
  const before = softmaxOf(scores, model), after = softmaxOf(scores, unmasked), cap = (x) => 3 * Math.tanh(x / 3);
  assert.ok(weightsMoved(after.weights, before.weights) && !weightsMoved(before.weights, softmaxOf(scores, { ...model, shift: false }).weights));
  const column = (step, name) => columnOf(scores, { ...unmasked, scale: 1 }, after, step, name);
  near(column("scale", "s"), [2, 4, -1]);
  near(column("softcap", "s"), [2, 4, -1].map(cap));
  near(column("bias", "before"), [2, 4, -1].map(cap));
  near(column("mask", "before"), [cap(2) + 0.1, cap(4) + 0.2, cap(-1) + 0.3]);
  const step = { vectors: [{ name: "o", kind: "value", size: 3, length: 9, values: [] }] };
  const found = summed(step, [0.25, 0.75, 0], [[4, 8], [8, 0], [1, 1]], ["'a'", "'b'", "'c'"]);
  assert.deepEqual(found.map(({ name, values }) => [name, values]),
    [[".750 · v of 'b'", [6, 0]], [".250 · v of 'a'", [1, 2]], ["o", [7, 2]]]);
  assert.ok(found.every(({ length }) => Number.isNaN(length))); // of components that are not all here
});
