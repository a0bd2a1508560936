// Several runs, what of their maps is asked for, and what a saved page answers.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as client from "../build/test.mjs";

const transport = client.fakeTransport();
const { header: manifest } = await transport.request("open", {});

const run = (id, model, text, calls) => ({ id, model, text, calls });
const call = (id, name, layer, heads, more = {}) => ({
  id, name, layer, kind: "self", heads, items: 1, causal: true,
  rows: { side: "text", length: 1500, placed: 0 }, keys: { side: "text", length: 1500 }, ...more,
});

test("names of runs differ: the model of one text, the text of one model, both, and a number", () => {
  const names = (...all) => client.runNames(all.map(([model, text], at) => run(String(at), model, text)));
  assert.deepEqual(names(["a", "text"], ["b", "text"]), ["a", "b"]);
  assert.deepEqual(names(["a", "one"], ["a", "two"]), ["one", "two"]);
  assert.deepEqual(names(["a", "one"], ["b", "two"]), ["a: one", "b: two"]);
  assert.deepEqual(names(["a", "x"], ["a", "x"], ["b", "x"]), ["1 · a", "2 · a", "b"]);
  const long = "x".repeat(60);
  assert.equal(new Set(names(["a", long + 1], ["a", long + 2])).size, 2);
  const alike = "The owl met the bee, and it flew on to the old house, where the ";
  assert.deepEqual(names(["a", alike + "hen slept"], ["a", alike + "hens sat"]), ["…hen slept", "…hens sat"]);
  assert.deepEqual(names(["a", alike], ["a", alike + "hen"]).map((name) => name[0]), ["1", "2"]);
  assert.deepEqual(names(["a", "\u202eone"]), ["⟨202E⟩one"]);
});

test("texts that begin alike are not one text", () => {
  const sides = [{ id: "text", tokens: 9 }], one = { ...run("0", "a", "x"), sides, digest: "1" };
  const other = { ...one, id: "1", digest: "2" };
  assert.deepEqual([client.sameText(one, { ...one, model: "b" }), client.sameText(one, other)], [true, false]);
  assert.equal(client.sameText(one, { ...one, sides: [{ id: "text", tokens: 8 }] }), false);
  assert.deepEqual(client.runNames([one, { ...other, model: "b" }]), ["a: x", "b: x"]);
  assert.deepEqual(client.runNames([one, other]), ["1 · x", "2 · x"]);
});

test("rows of an item stand where that item has them", () => {
  const rows = { side: "text", length: 1000, placed: 0, placed_by_item: [0, 300] };
  const padded = call("0", "b.0", 0, 4, { items: 2, causal: false, rows, scale: 1, softcap: null, kv_heads: 4 });
  const store = client.makeStore({ call: "0" }), runs = [{ ...run("0", "a", "x", [padded]),
    sides: [{ id: "text", name: "text", tokens: 1500, named: false }] }];
  const context = client.makeContext(null, store, transport, { ...manifest, runs }, () => {}, assert.fail);
  const placed = () => [context.call().rows.placed, context.wordsOf("row") === context.wordsOf("key")];
  assert.deepEqual(placed(), [0, true]);
  store.set({ item: 1 });
  assert.deepEqual(placed(), [300, false]);
  assert.equal(context.call(), context.call());
  const facts = Object.fromEntries(client.factsOf(runs[0], context.call()));
  assert.equal(facts.Causal, "differs by item");
  assert.match(facts.Shapes, /first query stands at key 300/);
  assert.equal(client.layerName(runs[0], context.call()), "layer 0");
});

test("a head is compared with the same head of the other run, in one run with the next", () => {
  const first = run("0", "a", "x", [call("0", "b.0", 0, 8), call("1", "b.1", 1, 8)]);
  const other = run("1", "b", "x", [call("0", "b.1", 1, 4), call("1", "b.0", 0, 8)]), none = run("2", "c", "x", []);
  const usual = (runs, own, call, head) => {
    const { run, call: id, head: to, mode } = client.usualCompare(runs, own, call, head);
    return [run, id, to, mode];
  };
  assert.deepEqual(usual([first, other], first, first.calls[0], 7), ["1", "1", 7, "side"]);
  assert.deepEqual(usual([first, other], first, first.calls[1], 7), ["1", "0", 3, "side"]);
  assert.deepEqual(usual([first, none, other], other, other.calls[1], 2), ["0", "0", 2, "side"]);
  assert.deepEqual(usual([first, none], first, first.calls[0], 2), ["0", "0", 3, "side"]);
  const renamed = run("3", "d", "x", [call("0", "l.0", 0, 8), call("1", "l.1", 1, 8)]);
  assert.equal(client.twin(renamed, first.calls[1]).id, "1");
});

/** What stands where in a room. */
function laid(calls, state, room) {
  const runs = [{ ...run("0", "a", "x", calls), sides: [{ id: "text", tokens: 1500, named: false }] }];
  const store = client.makeStore({ call: "0", scale: 1.4, x: 750, y: 750, ...state });
  const context = client.makeContext(null, store, transport, { ...manifest, runs }, () => {}, assert.fail);
  const tiles = new client.TileStore(assert.fail, () => {}, assert.fail), { x, y, scale } = store.get();
  return client.layOut(context, tiles, new client.Ranges(), { ...room, ratio: 1 }, () => ({ x, y, scale }));
}

/** The tiles of level 0 that a layout wants, as [row, key]. */
function wanted(calls, state) {
  return client.wantedTiles(laid(calls, state, { width: 2600, height: 2600 })).filter(({ at }) => at.level === 0).map(({ map, at }) => [map.call, at.row, at.key]);
}

test("of a causal map the hidden tiles are not asked for; of every other map all are", () => {
  const above = (tiles) => tiles.filter(([, row, key]) => key > row).length;
  const causal = call("0", "b.0", 0, 4, { items: 2 }), open = call("1", "b.1", 1, 4, { causal: false });
  assert.deepEqual([wanted([causal, open], {}).length, above(wanted([causal, open], {}))], [21, 0]);
  assert.equal(wanted([{ ...causal, causal: false }, open], {}).length, 36);
  assert.equal(wanted([causal, open], { item: 1 }).length, 21);
  const less = (other) => wanted([causal, other], { compare: { run: "0", call: "1", head: 0, mode: "difference" } });
  assert.equal(less(open).length, 72, "what one of two maps hides is in their difference");
  assert.equal(less({ ...open, causal: true }).length, 42);
  const later = { ...open, causal: true, rows: { ...open.rows, placed: 300 } };
  assert.equal(less(later).length, 72);
});

test("two maps stand below each other on a phone, and have a difference where they are of one size", () => {
  const one = call("0", "b.0", 0, 4), two = call("1", "b.1", 1, 4), less = { ...two, rows: { ...two.rows, length: 1499 } };
  const compare = { run: "0", call: "1", head: 0, mode: "side" };
  const places = (room) => laid([one, two], { compare }, room).panes.map(({ x, y }) => [x, y]);
  const [[x, y], [below, down]] = places({ width: 390, height: 544 });
  assert.ok(below === x && down > y + 250);
  const [[left, top], [right, level]] = places({ width: 656, height: 578 });
  assert.ok(level === top && right > left + 300);
  const asked = (other) => laid([one, other], { compare: { ...compare, mode: "difference" } }, { width: 656, height: 578 });
  assert.ok(asked(two).subtracted && client.comparable(one, two));
  assert.ok(!asked(less).subtracted && !client.comparable(one, less) && asked(less).note);
});

test("a saved page finds each place of the words that it holds, and says how many these are", async () => {
  const store = client.makeStore({ run: "0", call: "1", head: 3, scale: 8, x: 9000, y: 9000 });
  const context = client.makeContext(null, store, transport, manifest, () => {}, assert.fail);
  const seen = { rows: [8990, 9400], keys: [8990, 9400] };
  const table = await client.record(context, seen, () => {}, new AbortController().signal);
  const saved = client.recordedTransport(table), params = { run: "0", side: "text", query: "MARGARET", limit: 50 };
  const { header } = await saved.request("search", params);
  const { header: whole } = await transport.request("search", { ...params, limit: 5000 });
  assert.ok(header.covered >= 2 * 4096 && header.covered < 100_000);
  const pages = new Set(Object.keys(table).filter((key) => key.startsWith("words")).map((key) =>
    JSON.parse(key.slice(6)).start / 4096));
  assert.ok(pages.has(0) && pages.has(2));
  const inside = whole.found.filter(([, first, end]) => pages.has(Math.floor(first / 4096))
    || pages.has(Math.floor((end - 1) / 4096)));
  assert.equal(header.total, inside.length);
  assert.deepEqual(header.found.map(([, first, end]) => [first, end]),
    inside.slice(0, 50).map(([, first, end]) => [first, end]));
  assert.equal(header.found[0][4], "Margaret");
  assert.equal((await saved.request("search", { ...params, side: "no" })).header.total, 0);
  await assert.rejects(saved.request("search2", params), /not part/);
});

test("a place may reach over words and blanks, but not over what is missing or what is no text", () => {
  const words = [["[CLS]", "[CLS]", 0, 1, 1, "", []], ["The", "The", 1, 2, 0, "", []], ["İcat", "İcat", 2, 4, 0, " ", []],
    ["sat", "sat", 4, 5, 0, " ", []]];
  const far = [["on", "on", 9, 10, 0, " ", []], ["[SEP]", "[SEP]", 10, 11, 1, "", []]];
  const find = (query, limit = 9) => client.searchWords([far, words, words.slice(2)], query, limit);
  const places = (query) => find(query).found.map(([, first, end, before, text, after]) =>
    [first, end, before, text, after]);
  assert.deepEqual(places("HE İCAT s"), [[1, 5, "T", "he İcat s", "at\0on"]]);
  assert.deepEqual(places("at"), [[2, 4, "The İc", "at", " sat\0on"], [4, 5, "The İcat s", "at", "\0on"]]);
  assert.deepEqual(places(" sat"), [[4, 5, "The İcat", " sat", "\0on"]]);
  assert.deepEqual([places("sat on"), places("CLS"), places("")], [[], [], []]);
  assert.deepEqual([find("t", 1).total, find("t", 1).found.length, find("t").covered], [3, 1, 7]);
});
