import assert from "node:assert/strict";
import { test } from "node:test";
import { fakeTransport, fitText, layLabels, runsOf, stride, tokenText, visible, withMarked, WordCache,
  PAGE } from "../build/test.mjs";

const transport = fakeTransport();
const { header: manifest } = await transport.request("open", {});
const words = new WordCache(manifest, transport).side("0", "text");
await words.need(0, 100_000);
const LENGTH = 100_000, LINE = 14;

function apart(labels, line = LINE) {
  const places = labels.map((label) => label.at).sort((a, b) => a - b);
  for (let i = 1; i < places.length; i++)
    assert.ok(places[i] - places[i - 1] >= line - 1e-6, `${places[i] - places[i - 1]} pixels apart`);
}

test("labels never touch and there are some, at every zoom", () => {
  for (let scale = 0.004; scale < 64; scale *= 1.23) for (const start of [0, 1, 48_321, 99_000]) {
    const axis = { offset: -start * scale, scale, length: LENGTH, room: 601, line: LINE };
    const labels = layLabels(axis, words);
    apart(labels);
    const end = Math.min(LENGTH * scale + axis.offset, 601);
    assert.ok(labels.length >= Math.floor(end / LINE / 8), `${labels.length} labels on ${end} pixels at ${scale}`);
  }
});

test("labels keep their words while the map moves", () => {
  for (const scale of [5.3, 0.4, 0.02]) {
    const at = (offset) => layLabels({ offset, scale, length: LENGTH, room: 600, line: LINE }, words);
    const before = new Map(at(-30_000 * scale).map((l) => [l.token, l.at])),
      after = new Map(at(-30_000 * scale - 7).map((l) => [l.token, l.at]));
    const kept = [...before].filter(([token]) => after.has(token));
    assert.ok(kept.length >= before.size - 2);
    for (const [token, place] of kept) assert.ok(Math.abs(place - 7 - after.get(token)) < 1e-6);
  }
});

test("large cells name each token, small ones words, tiny ones sentence starts with their number", () => {
  const lay = (scale, start) => layLabels({ offset: -start * scale, scale, length: LENGTH, room: 600, line: LINE },
    words);
  const tokens = lay(20, 500);
  assert.deepEqual(tokens.map((l) => l.token), Array.from({ length: 30 }, (_, i) => 500 + i));
  for (const label of lay(6, 500)) {
    const word = words.at(label.token);
    assert.deepEqual([label.token, label.end, label.text, label.number], [word.first, word.end, word.label, ""]);
  }
  const far = lay(0.01, 30_000).filter((l) => l.token > 0);
  assert.ok(far.every((label) => label.number === String(label.token)));
  const starts = far.filter((label) => words.at(label.token - 1).text === ".");
  assert.ok(starts.length > far.length / 2);
});

test("tokens without known words are numbers", () => {
  const none = { named: false, at: () => undefined, between: () => [] };
  assert.deepEqual(layLabels({ offset: 0, scale: 20, length: 3, room: 600, line: LINE }, none).map((l) => l.number),
    ["0", "1", "2"]);
  assert.equal(layLabels({ offset: 0, scale: 1, length: 5000, room: 600, line: LINE }, none)[1].text, "");
});

test("marked labels stand, those in their way do not", () => {
  const at = (places) => places.map((p) => ({ token: p, end: p + 1, text: "w", number: "", at: p }));
  const all = withMarked(at([0, 20, 40, 60]), at([33, 36]), LINE);
  assert.deepEqual(all.map((l) => l.at).sort((a, b) => a - b), [0, 33, 60]);
});

test("long words are cut to their room by whole characters", () => {
  const measure = (text) => [...text].length * 10;
  assert.equal(fitText("attention", 90, measure), "attention");
  assert.equal(fitText("attention", 89, measure), "attenti…");
  assert.equal(fitText("🐈🐈🐈🐈", 30, measure), "🐈🐈…");
  assert.equal(fitText("word", 3, measure), "…");
});

test("control signs are drawn, parts of words named by their own text", () => {
  assert.equal(visible("a\nb\u0007\u2028\r\n"), "a⏎b\ufffd\ufffd⏎");
  const turning = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069";
  assert.doesNotMatch(visible(`x${turning}`), /[\p{Bidi_Control}]/u);
  assert.equal(visible("\u202efox\u202c שלום"), "⟨202E⟩fox⟨202C⟩ שלום");
  assert.equal(tokenText({ label: "carriage", first: 7, end: 9, tokens: ["carr", "iage"] }, 8), "iage");
  assert.equal(tokenText({ label: "it", first: 7, end: 8, tokens: [" it"] }, 7), "it");
});

test("labels of words hold no sign that turns the writing around, whatever Python sends", async () => {
  const one = { kind: "fake", request: async () => ({ header: { words: [["\u202efox", "\u202efox", 0, 1, 0, "", []]] },
    buffers: [] }) };
  const runs = [{ id: "0", sides: [{ id: "text", tokens: 1, named: true }] }];
  const side = new WordCache({ runs }, one).side("0", "text");
  await side.need(0, 1);
  assert.deepEqual([side.name(0), tokenText(side.at(0), 0)], ["⟨202E⟩fox", "⟨202E⟩fox"]);
});

test("strides are 1, 2 or 5 times a power of ten and leave room", () => {
  for (let scale = 0.001; scale < 14; scale *= 1.7) {
    const step = stride(scale, LINE), lead = Number(String(step)[0]);
    assert.ok([1, 2, 5].includes(lead) && step * scale >= LINE);
  }
});

test("neighbouring tokens are one outline, cut to what is in sight", () => {
  assert.deepEqual(runsOf([1, 4, 5, 6, 9, 200], 2, 100), [[4, 7], [9, 10]]);
});

test("words come by pages, once, and whole across the seam of two pages", async () => {
  let asked = 0;
  const counting = { kind: "fake", request: (op, params) => (asked++, transport.request(op, params)) };
  const side = new WordCache(manifest, counting).side("0", "text");
  await Promise.all([side.need(PAGE - 50, PAGE + 50), side.need(PAGE - 9, PAGE)]);
  assert.equal(asked, 2);
  const between = side.between(PAGE - 50, PAGE + 50);
  for (let i = 1; i < between.length; i++) assert.equal(between[i].first, between[i - 1].end);
  assert.equal(side.at(PAGE + 3).first <= PAGE + 3 && side.at(PAGE + 3).end > PAGE + 3, true);
  const shifted = side.from(PAGE - 20);
  assert.equal(shifted.at(23).text, side.at(PAGE + 3).text);
  assert.equal(shifted.at(23).first, side.at(PAGE + 3).first - PAGE + 20);
});
