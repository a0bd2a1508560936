// The logic of panels and saved files; `npm test` builds and runs it.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as client from "../build/test.mjs";

const NASTY = ["=1+1", "+cmd", "-2", "@sum", "\t=1", " =1", "\uff1d1", 'a"b', "a,b", "line\nbreak", "\u0000=x",
  "\u0007bell", "café", "'quoted"];

/** An independent reader of RFC 4180. */
function readCsv(text) {
  const rows = [[]];
  for (let at = 0; at < text.length;) {
    let field = "";
    if (text[at] === '"') {
      for (at++; text[at] !== '"' || text[at + 1] === '"'; at++) {
        if (text[at] === '"') at++;
        field += text[at];
      }
      at++;
    } else while (at < text.length && text[at] !== "," && text[at] !== "\r") field += text[at++];
    rows.at(-1).push(field);
    if (text[at] === ",") at++;
    else if (text.startsWith("\r\n", at)) {
      at += 2;
      if (at < text.length) rows.push([]);
    } else assert.fail(`a field ends with ${JSON.stringify(text.slice(at, at + 5))}`);
  }
  return rows;
}

test("a field of CSV is its text, and never a formula", () => {
  for (const word of NASTY) {
    const [[field, next]] = readCsv(client.csvLine([word, 7]));
    assert.equal(next, "7");
    assert.doesNotMatch(field, /^[=+\-@\uff1d\uff0b\uff0d\uff20\t\r\n]/);
    assert.doesNotMatch(field.trim(), /^[=+\-@\uff1d]/);
    assert.doesNotMatch(field, /[\u0000-\u0008\u000b\u000c\u000e-\u001f]/);
  }
  for (const word of ["café", 'a"b', "a,b", "line\nbreak", "a=b",
    "it's"]) assert.equal(readCsv(client.csvLine([word]))[0][0], word);
});

test("a number of CSV is the float32 that was shown", () => {
  for (const value of [0.1, 1 / 3, 1e-30, 3.4e38, 0.999999940395, 1.17549435e-38].map(Math.fround))
    assert.equal(Math.fround(Number(client.csvNumber(value))), value);
  assert.equal(client.csvNumber(Math.fround(0.1)), "0.1");
  assert.equal(client.csvNumber(NaN), "");
  assert.equal(client.csvNumber(-2), "-2");
});

test("cells of CSV stand with their tokens and words, hidden ones are left out", () => {
  const input = {
    level: 0, row: 3, key: 5, down: 2, across: 3, values: Float32Array.of(0.5, NaN, 0.25, 1, 0, NaN), second: null,
    sampled: false, rowNames: ["=a", "b"], keyNames: ["x", "y", "z"],
  };
  const read = (input) => readCsv(client.csvOf(input, [11, 13], "weights", "max").join(""));
  assert.deepEqual(read(input), [
    ["row", "row_word", "key", "key_word", "weights"],
    ["3", "'=a", "5", "x", "0.5"], ["3", "'=a", "7", "z", "0.25"], ["4", "b", "5", "x", "1"], ["4", "b", "6", "y", "0"],
  ]);
  const binned = read({ ...input, level: 2, row: 0, key: 2, second: Float32Array.of(0.25, NaN, NaN, 0, 0.5, 1) });
  assert.deepEqual(binned[0], ["row_first", "row_last", "row_word", "key_first", "key_last", "key_word", "max_weights",
    "second", "difference"]);
  assert.deepEqual(binned[1], ["0", "3", "'=a", "8", "11", "x", "0.5", "0.25", "0.25"]);
  assert.equal(read({ ...input, level: 2, sampled: true })[0][6], "max_weights_from_sampled_rows");
  assert.deepEqual(binned.at(-1), ["4", "7", "b", "16", "12", "z", "", "1", "-1"]);
});

test("the level of a file is the finest with few bins, counted where they stand", () => {
  assert.equal(client.levelFor([0, 512], [0, 512]), 0);
  assert.equal(client.levelFor([0, 513], [0, 5]), 1);
  assert.equal(client.levelFor([511, 1535], [0, 5]), 2); // 1,024 tokens that touch 513 bins of two
  assert.equal(client.levelFor([0, 100_003], [0, 100_003]), 8);
});

test("requests of a saved page are known again, whatever the order of their fields", () => {
  const params = client.lineParams({ run: "0", call: "1", head: 3, item: 0 }, [5, 6], 2, 1100);
  assert.deepEqual(params, { run: "0", call: "1", head: 3, item: 0, tokens: [5, 6], start: 1024, stop: 1100, top: 0 });
  const turned = Object.fromEntries(Object.entries(params).reverse());
  assert.equal(client.recordedKey("row", turned), client.recordedKey("row", params));
  assert.notEqual(client.recordedKey("column", params), client.recordedKey("row", params));
  assert.ok(client.lineParams(params, [5], 0, 1100).top > 0);
});

test("nothing of a text leaves its place in a saved page", async () => {
  const text = "</script><script>alert(1)</script><!-- <script> & \u2028 'q' \"q\"";
  const page = client.savedPage(text, 'const a = "</script><!--";', { hash: "", table: { [text]: text } });
  assert.equal(page.match(/<script/g).length, 2);
  assert.equal(page.match(/<\/script>/g).length, 2);
  assert.ok(!page.includes("<!--"));
  const json = /<script type="application\/json"[^>]*>([^]*?)<\/script>/.exec(page)[1];
  assert.deepEqual(JSON.parse(json), { hash: "", table: { [text]: text } });
  assert.equal(new Function(`${client.scriptCode('return "</script><!--" + /<!--/.source')}`)(),
    "</script><!--" + "\\x3c!--");
  assert.equal(client.escapeMarkup("<a href='x'>&\u0000\ud800"), "&lt;a href=&#39;x&#39;&gt;&amp;\ufffd\ufffd");
});

test("numbers sort, what is missing stands last both ways", () => {
  const values = [3, NaN, 1, null, 2, 1];
  assert.deepEqual(client.sortedPlaces(values, false), [2, 5, 4, 0, 1, 3]);
  assert.deepEqual(client.sortedPlaces(values, true), [0, 4, 2, 5, 1, 3]);
  assert.deepEqual(client.sortedPlaces(["b", null, "a"], false), [2, 0, 1]);
});

/** Rows whose entropy is a permutation of their numbers, with one that has none. */
function rowsOf(length) {
  const asked = [], entropy = (row) => (row === 5 ? NaN : (row * 7) % length);
  const numbers = new client.RowNumbers(length, async (start, stop) => {
    asked.push([start, stop]);
    return { names: ["sink", "entropy"], data: Float32Array.from({ length: 2 * (stop - start) }, (_, at) =>
      (at < stop - start ? -1 : entropy(start + at - (stop - start)))) };
  });
  return { numbers, asked, entropy };
}

test("rows sort among all rows, which are asked for once each", async () => {
  const length = 2 * client.ROWS + 100, { numbers, asked, entropy } = rowsOf(length), told = [];
  await numbers.load(1);
  assert.deepEqual(numbers.order("entropy", true).length, client.ROWS);
  assert.equal(await numbers.loadAll(() => true, () => told.push(numbers.here)), true);
  assert.deepEqual(asked, [[1024, 2048], [0, 1024], [2048, length]]);
  assert.deepEqual(told, [2048, length]);
  const falling = numbers.order("entropy", true), expected = [...Array(length).keys()].filter((row) => row !== 5)
    .sort((a, b) => entropy(b) - entropy(a));
  assert.deepEqual(falling, [...expected, 5]);
  assert.deepEqual(numbers.order("entropy", false), [...expected.toReversed(), 5]);
  assert.deepEqual(numbers.order(null, false), [...Array(length).keys()]);
  assert.deepEqual([numbers.value(2050, "entropy"), numbers.value(2050, "sink")], [entropy(2050), -1]);
});

test("too many rows are not all loaded, nor those that nobody waits for", async () => {
  const many = rowsOf(client.MOST_SORTED + 1), left = rowsOf(5000);
  assert.equal(await many.numbers.loadAll(() => true, () => {}), false);
  assert.equal(many.asked.length, 0);
  assert.equal(await left.numbers.loadAll(() => left.asked.length < 2, () => {}), false);
  assert.deepEqual([left.asked.length, left.numbers.here], [2, 2048]);
});

test("heads are filtered by the roles there are, and by alarms", () => {
  const heads = [["previous token", []], ["mixed", ["!"]], ["mixed", []], [null, ["a", "b"]], ["all heads", []]]
    .map(([role, alarms]) => ({ role, alarms }));
  const filters = client.filtersOf(heads);
  assert.deepEqual(filters.map(([, text]) => text), ["all heads", "with alarms (2)", "mixed (2)", "previous token (1)",
    "no role (1)", "all heads (1)"]);
  const counts = filters.map(([value]) => heads.filter((about) => client.passes(about, value)).length);
  assert.deepEqual(counts, [5, 2, 2, 1, 1, 1]);
  assert.equal(new Set(filters.map(([value]) => value)).size, filters.length);
  assert.ok(!client.filtersOf(heads.slice(0, 1)).some(([, text]) => text.includes("alarms")));
});

test("line breaks of a text break the line, outside of the words that hold them, and have their sign", () => {
  const lay = (text, label = "⏎") => client.broken({ text, label, special: false });
  assert.deepEqual(lay("\n\n"), ["", "⏎", "\n\n"]);
  assert.deepEqual(lay(".\n"), ["", ".⏎", "\n"]);
  assert.deepEqual(lay("\n\nThe"), ["\n\n", "⏎⏎The", ""]);
  assert.deepEqual(lay("}\n\n/"), ["", "}⏎\n⏎\n/", ""]);
  assert.deepEqual(lay("\u202efox\u0007"), ["", "⟨202E⟩fox\ufffd", ""]);
  assert.deepEqual(lay("cat"), ["", "cat", ""]);
  assert.deepEqual(client.broken({ text: "<s>\n", label: "<s>", special: true }), ["", "<s>", ""]);
});

test("a file says that its numbers are from a sample as soon as one tile is", async () => {
  const fake = client.fakeTransport(), { header: manifest } = await fake.request("open", {});
  for (const sampled of [0, 2]) {
    const transport = { ...fake, request: async (op, params, signal) => {
      const reply = await fake.request(op, params, signal);
      if (op === "tile" && params.key === 1) reply.header.sampled = sampled;
      return reply;
    } };
    const context = client.makeContext(null, client.makeStore({ ...manifest.shown }), transport, manifest, () => {}, assert.fail);
    const seen = { rows: [0, 300], keys: [200, 300] };
    const numbers = await client.numbersInView(context, seen, () => "", new AbortController().signal);
    assert.equal(numbers.sampled, sampled > 0);
    assert.equal(client.describeView(context, { ...seen, sampled: numbers.sampled }).includes("from a sample of rows"), sampled > 0);
  }
});

test("what failed is asked for again, what came is not", async () => {
  let asked = 0;
  const load = client.once(async (one) => {
    if (++asked === 1) throw new Error("no");
    return one;
  });
  await assert.rejects(load("a"));
  assert.deepEqual([await load("b"), await load("c"), asked], ["b", "b", 2]);
});

test("keys that are no rows have what they receive in a buffer of their own", async () => {
  const fake = client.fakeTransport(), { header } = await fake.request("open", {});
  const run = header.runs.find(({ calls }) => calls.some((call) => !client.together(call)));
  const call = run.calls.find((call) => !client.together(call)), place = { run: run.id, call: call.id, head: 0, item: 0 };
  const { names, data } = await client.askReceived(fake, { ...place, start: 0, stop: call.keys.length });
  assert.deepEqual([names, data.length], [["received"], call.keys.length]);
  const total = data.reduce((a, b) => a + b);
  assert.ok(Math.abs(total - call.rows.length) < 1e-3, "each row gives 1");
  const self = { run: "0", call: "0", head: 0, item: 0, start: 0, stop: 4 };
  assert.deepEqual((await client.askReceived(fake, self)).names, []);
  await assert.rejects(client.askReceived({ request: async () => ({ header: { error: "no" }, buffers: [] }) }, self), /no/);
});

test("the rows made are those in view", () => {
  assert.deepEqual(client.rowsInView(100_000, 30, 0, 300, 2), { first: 0, end: 12, before: 0, after: 99_988 * 30 });
  assert.deepEqual(client.rowsInView(100_000, 30, 1_500_010, 300, 2),
    { first: 49_998, end: 50_013, before: 49_998 * 30, after: 49_987 * 30 });
  assert.deepEqual(client.rowsInView(7, 30, 9999, 300), { first: 0, end: 7, before: 0, after: 0 });
  for (const top of [0, 15, 1_499_999, 2_999_900]) {
    const { first, end, before, after } = client.rowsInView(100_000, 30, top, 431);
    assert.equal(before + (end - first) * 30 + after, 3_000_000);
    assert.ok(before <= top && before + (end - first) * 30 >= Math.min(3_000_000, top + 431));
  }
  assert.deepEqual(client.pagesOf(1023, 1025, 512), [1, 2]);
  assert.deepEqual(client.pagesOf(5, 5, 512), []);
});

test("a sentence says who looks at whom", () => {
  const from = [{ word: "cat", weight: 0.424 }, { word: "mat", weight: 0.049 }], by = [{ word: "was", weight: 1 }];
  const say = (words, directions) => client.plain(client.sentence("layer 1 head 3", words, { from, by, directions }));
  assert.equal(say(["it"], ["from", "by"]),
    "In layer 1 head 3 ‘it’ looks at ‘cat’ .42; looked at by ‘was’ 1.00.");
  assert.equal(say(["a", "b"], ["from", "by"]),
    "In layer 1 head 3 ‘a’, ‘b’ (2 words) look on average at ‘cat’ .42; looked at, in sum, by ‘was’ 1.00.");
  assert.equal(say(["it"], ["from"]), "In layer 1 head 3 ‘it’ looks at ‘cat’ .42.");
  assert.equal(say(["it"], ["by"]), "In layer 1 head 3 ‘it’ is looked at by ‘was’ 1.00.");
  const none = client.sentence("layer 0 head 0", ["it"], { from: [], by: [], directions: ["from"] });
  assert.equal(client.plain(none), "In layer 0 head 0 ‘it’ looks at nothing with .05 or more.");
  assert.deepEqual([0, 0.005, 0.00499, 0.5, 0.9949, 0.996, 1.25, NaN, 3e-7, 0.00314].map(client.short),
    ["0", ".01", ".005", ".50", ".99", "1.00", "1.25", "–", "3.0e−7", ".0031"]);
});

test("generated tokens know the step at which they came", () => {
  assert.equal(client.stepsOf(7, 8, null), null);
  assert.equal(client.stepsOf(7, 8, 8), null);
  assert.equal(client.stepsOf(8, 9, 8), "1");
  assert.equal(client.stepsOf(11, 14, 8), "4–6");
  assert.equal(client.stepsOf(7, 10, 8), "1–2"); // a word that the prompt began
});

test("calls group by who looks at what", () => {
  const call = (id, layer, kind, side, name) =>
    ({ id, layer, kind, name, rows: { side }, keys: { side: kind === "cross" ? "source" : side } });
  const sides = [{ id: "source", name: "source" }, { id: "target", name: "target" }];
  const calls = [call("0", 1, "self", "source", "e.1"), call("1", 0, "self", "source", "e.0"),
    call("2", 0, "self", "target", "d.0"), call("3", 0, "cross", "target", "c.0")];
  const run = { sides, calls };
  assert.deepEqual(client.groupsOf(run).map(({ title, calls }) => [title, calls.map(({ id }) => id)]),
    [["Source self-attention", ["1", "0"]], ["Target self-attention", ["2"]], ["Cross-attention", ["3"]]]);
  assert.equal(client.headName(run, calls[3], 2), "cross-attention, layer 0 head 2");
  assert.equal(client.headName({ sides, calls: calls.slice(0, 2) }, calls[0], 5), "layer 1 head 5");
  assert.equal(client.layerName({ sides, calls: [calls[0], { ...calls[0], name: "e.again" }] }, calls[0]), "e.1");
});

test("columns of small maps divide the heads where they can", () => {
  assert.deepEqual([[8, 4], [8, 5], [12, 5], [32, 8], [7, 4],
    [3, 9]].map(([heads, room]) => client.columnsFor(heads, room)), [4, 4, 4, 8, 4, 3]);
});

test("differences count a weight that one mask hides as 0", () => {
  const a = Float32Array.of(0.5, NaN, NaN), b = Float32Array.of(0.25, 0.25, NaN);
  assert.deepEqual([...client.differenceOf(a, b, true)], [0.25, -0.25, NaN]);
  assert.deepEqual([...client.differenceOf(a, b, false)], [0.25, NaN, NaN]);
});

test("work in turn is done once each and ends when it is told to", async () => {
  const done = [];
  await client.inTurn([...Array(23).keys()], async (one) => void done.push(one), new AbortController().signal);
  assert.deepEqual(done.sort((a, b) => a - b), [...Array(23).keys()]);
  const stop = new AbortController();
  let count = 0;
  await assert.rejects(client.inTurn([...Array(50).keys()], async () => {
    if (++count === 5) stop.abort();
  }, stop.signal));
  assert.ok(count < 12);
});

test("a drawing escapes its words and shows each visible cell once", () => {
  const grey = [128, 128, 128], palette = { paper: grey, ink: grey, quiet: grey, accent: grey, against: grey,
    hidden: grey };
  const scale = { place: (v) => v, ticks: [{ at: 0, text: "<0" }], colourAt: () => grey };
  const svg = client.svgOf({
    title: "<script>alert(1)</script>", subtitle: "a & b", down: 2, across: 3,
    values: Float32Array.of(0.5, NaN, 0.25, 1, 0, NaN), rowNames: ["<b>", "\u0000"], keyNames: ["x", "y", "z"], scale,
      palette, legend: "weights", image: null,
  });
  assert.ok(!svg.includes("<script>") && !svg.includes("<b>") && !svg.includes("\u0000"));
  assert.equal(svg.match(/fill="rgb\(128 128 128\)"\/>/g).length, 4 + 1); // cells and the ground
  assert.match(svg, />\.50</);
});
