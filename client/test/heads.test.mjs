// Numbers of heads that are off, by hand.
import assert from "node:assert/strict";
import { test } from "node:test";
import { changeOf, lossRows, OffHeads, percent, reach, signed, signedWithin, tellChange, worths } from "../build/test.mjs";

test("a word's log-probabilities are those of its tokens, added", () => {
  const data = Float32Array.of(NaN, -1, -2, -4, NaN, -1.5, -2, -3); // 4 tokens before, then after
  assert.deepEqual(changeOf(data, true, { first: 1, end: 3 }), { before: -3, after: -3.5, change: -0.5 });
  assert.deepEqual(changeOf(data, true, { first: 3, end: 4 }), { before: -4, after: -3, change: 1 });
  assert.deepEqual(changeOf(data, true, { first: 0, end: 2 }), { before: -1, after: -1.5, change: -0.5 }); // `<s>` and a token
  assert.deepEqual(changeOf(data, true, { first: 0, end: 1 }), { before: null, after: null, change: null });
});

test("changes of states are averaged over a word, and have no sides", () => {
  const data = Float32Array.of(0.25, 0.75, 0.5);
  assert.deepEqual(changeOf(data, false, { first: 0, end: 2 }), { before: null, after: null, change: 0.5 });
  assert.equal(tellChange(changeOf(data, false, { first: 2, end: 3 })), "last hidden states change by 50 %");
});

test("a scale ends at 1, 2 or 5 times a power of ten, and holds every number", () => {
  assert.deepEqual([[0.3, -0.7], [5], [-51], [0.02, NaN, null], [1e-3], [0, 0], []].map(reach), [1, 5, 100, 0.02, 1e-3, 0, 0]);
});

test("numbers have their sign, and as many decimals as show them", () => {
  assert.deepEqual([-0.812, 0.5, 0.0034, -0.00001, 0, 1234.5, null, NaN].map((x) => signed(x)),
    ["−0.81", "+0.50", "+0.0034", "0.0000", "0.00", "+1235", "–", "–"]);
  assert.deepEqual([[-0.0512, 0.2], [0.004, 0.2], [-0.0004, 0.001], [12, 50], [1, 0]].map(([x, most]) => signedWithin(x, most)),
    ["−0.05", "0.00", "−0.0004", "+12", "+1"]);
  assert.deepEqual([1, 0.333, 0.0996, 0.034, 0.00034, 1e-9, 0].map(percent),
    ["100 %", "33 %", "10 %", "3.4 %", "0.03 %", "< 0.01 %", "0 %"]);
});

test("loss and perplexity are told before and after", () => {
  assert.deepEqual(lossRows([Math.log(100), Math.log(150)]), [
    ["Loss, nats a token", "4.61", "5.01", "+0.41"], ["Perplexity", "100", "150", "+50.00"]]);
  assert.deepEqual(lossRows([null, null])[1].slice(1), ["–", "–", "–"]); // a text of one token
  assert.match(tellChange({ before: Math.log(0.5), after: Math.log(0.25), change: Math.log(0.5) }),
    /^−0\.69 nats: from 50 % to 25 %$/);
});

test("slopes are told by call and head: what lowers the loss is worth something", () => {
  const found = worths([{ id: "b", heads: 2 }, { id: "a", heads: 3 }], Float32Array.of(-1, 2, 3, -4, 5));
  assert.deepEqual([...found], [["b", [1, -2]], ["a", [-3, 4, -5]]]);
});

test("heads are off in their own run, and on again by the same", () => {
  const off = new OffHeads();
  assert.deepEqual([off.turn("0", "1", 3), off.turn("0", "1", 2), off.turn("0", "1", 3)], [true, true, false]);
  assert.deepEqual(off.of("0"), [["1", 2]]);
  assert.ok(off.has("0", "1", 2) && !off.has("1", "1", 2) && !off.has("0", "2", 2));
  off.clear("0");
  assert.deepEqual(off.of("0"), []);
});
