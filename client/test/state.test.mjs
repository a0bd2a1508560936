import assert from "node:assert/strict";
import { test } from "node:test";
import { DEFAULTS, fakeTransport, fitted, fromHash, makeStore, sizeOf, toHash } from "../build/test.mjs";

const { header: manifest } = await fakeTransport().request("open", {});

test("a state comes back from the URL as it was", () => {
  const states = [
    DEFAULTS,
    {
      ...DEFAULTS, run: "a b&c=d#e", call: "blocks.0/1", head: 7, item: 1, what: "logits", pool: "mean", tone: "linear",
      x: 1234.5, y: 99_999,
      scale: 0.125, axis: "key", tokens: [3, 4, 5, 900, 902],
      compare: { run: "1", call: "a.b.c", head: 2, mode: "difference" }, panel: "rows",
      theme: "dark", searched: "שלום <b> & 100%",
    },
  ];
  for (const state of states) assert.deepEqual({ ...DEFAULTS, ...fromHash("#" + toHash(state)) }, state);
});

test("a broken URL is no error: what is malformed is left out", () => {
  const bad = "#head=-1&item=1e9x&what=<b>&scale=-3&x=NaN&row=5-2,a,7,1-99999999&with=side.x&theme=red&tone=";
  const state = fromHash(bad);
  assert.deepEqual(Object.keys(state).sort(), ["axis", "tokens"]);
  assert.ok(state.tokens.length <= 4096 && state.tokens.includes(7));
});

test("a state of another text becomes one that this text has", () => {
  const state = fitted({ ...DEFAULTS, run: "9", call: "0", head: 3 }, manifest);
  assert.deepEqual([state.run, state.call, state.head], ["0", "1", 3]);
  const other = fitted({ ...DEFAULTS, run: "1", call: "1", head: 2, item: 5, what: "bias", tokens: [3, 60, 61],
    compare: { run: "0", call: "0", head: 99, mode: "side" } }, manifest);
  assert.deepEqual([other.item, other.what, other.tokens, other.compare], [0, "weights", [3, 60], null]);
});

test("listeners hear of the fields they asked for, when values differ, until they leave", () => {
  const store = makeStore(), heard = [];
  const leave = store.subscribe((state, changed) => heard.push([state.head, [...changed]]), ["head", "tokens"]);
  store.set({ head: 0, x: 5 });
  store.set({ head: 2, y: 5 });
  store.set({ tokens: [] });
  store.set({ tokens: [1] });
  leave();
  store.set({ head: 4 });
  assert.deepEqual(heard, [[2, ["head", "y"]], [2, ["tokens"]]]);
});

test("three sizes of page", () => assert.deepEqual([390, 699, 700, 1099, 1100].map(sizeOf),
  ["narrow", "narrow", "middle", "middle", "wide"]));
