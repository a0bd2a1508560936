import assert from "node:assert/strict";
import { test } from "node:test";
import { ask, decodeFrame, encodeFrame, fakeTransport, httpTransport, recordedKey, recordedTransport,
  widgetTransport } from "../build/test.mjs";

/** A frame put together by hand: length, header, zeros up to a multiple of 8, each buffer padded to 8. */
function byHand(header, buffers) {
  const parts = [Buffer.alloc(4), Buffer.from(JSON.stringify(header), "utf8")];
  parts[0].writeUInt32LE(parts[1].length);
  const pad = () => parts.push(Buffer.alloc((8 - (parts.reduce((n, p) => n + p.length, 0) % 8)) % 8));
  pad();
  for (const buffer of buffers) {
    parts.push(Buffer.from(buffer));
    pad();
  }
  const all = Buffer.concat(parts);
  return all.buffer.slice(all.byteOffset, all.byteOffset + all.length);
}

test("frames are read as they are written, with odd lengths and letters of any script", () => {
  for (const word of ["", "a", "né", "שלום", "🐈🐈🐈"]) {
    const floats = Float32Array.from([1, NaN, -3]), bytes = Uint8Array.from([1, 2, 3, 4, 5]);
    const header = { word, buffers: [12, 5] }, frame = byHand(header, [floats.buffer, bytes.buffer]);
    const reply = decodeFrame(frame);
    assert.deepEqual(reply.header, header);
    assert.deepEqual(new Float32Array(reply.buffers[0]), floats);
    assert.deepEqual(new Uint8Array(reply.buffers[1]), bytes);
    assert.deepEqual(Buffer.from(encodeFrame({ header: { word }, buffers: [floats.buffer, bytes.buffer] })),
      Buffer.from(frame));
  }
});

test("a frame that is cut short is an error at every length", () => {
  const whole = byHand({ buffers: [12] }, [new Float32Array(3).buffer]);
  for (const length of [0, 3, 4, 10, whole.byteLength - 9])
    assert.throws(() => decodeFrame(whole.slice(0, length)), /cut short/);
});

test("HTTP: token and body go out, errors come back as one sentence", async (t) => {
  const calls = [];
  const answer = (reply, type = "application/octet-stream") =>
    t.mock.method(globalThis, "fetch", async (url, options) => {
    calls.push([url, options]);
    return new Response(reply, { headers: { "Content-Type": type }, status: 200 });
  });
  answer(byHand({ total: 3, found: [] }, []));
  const http = httpTransport("secret");
  assert.equal((await ask(http, "search", { run: "0", side: "text", query: "x", limit: 5 })).total, 3);
  assert.equal(calls[0][0], "/api/search");
  assert.equal(calls[0][1].headers["X-Saccade-Token"], "secret");
  assert.equal(calls[0][1].body, '{"run":"0","side":"text","query":"x","limit":5}');
  answer(byHand({ error: "There is no head 9." }, []));
  await assert.rejects(ask(http, "open", {}), /^RequestError|There is no head 9\./);
  answer("<html>", "text/html");
  await assert.rejects(ask(http, "open", {}), /refused/);
  t.mock.method(globalThis, "fetch", async () => { throw new TypeError("network"); });
  await assert.rejects(ask(http, "open", {}), /still running/);
});

test("a widget's replies find their requests, whatever the order, and other views' are left alone", async () => {
  const listeners = new Set(), sent = [];
  const tell = (...message) => [...listeners].forEach((listener) => listener(...message));
  const model = {
    send: (message) => sent.push(message), on: (_, l) => listeners.add(l), off: (_, l) => listeners.delete(l),
  };
  const widget = widgetTransport(model), stop = new AbortController();
  const first = widget.request("tile", { row: 1 }), second = widget.request("tile", { row: 2 }, stop.signal),
    third = widget.request("tile", {}, stop.signal);
  tell({ kind: "reply", id: "another", header: {} }, []);
  tell({ kind: "reply", id: sent[1].id, header: { rows: 2 } },
    [new DataView(Float32Array.from([5, 6]).buffer, 4, 4)]);
  tell({ kind: "reply", id: sent[0].id, header: { rows: 1 } }, []);
  stop.abort();
  assert.deepEqual([(await first).header, (await second).header], [{ rows: 1 }, { rows: 2 }]);
  assert.deepEqual([...new Float32Array((await second).buffers[0])], [6]);
  await assert.rejects(third, { name: "AbortError" });
  assert.deepEqual(sent.map(({ kind, op }) => [kind, op]),
    [["request", "tile"], ["request", "tile"], ["request", "tile"], ["cancel", undefined]]);
  assert.equal(sent[3].id, sent[2].id); // Python drops what nobody waits for any more
  assert.equal(listeners.size, 0); // a view that is gone leaves nothing behind
});

test("a saved page answers what was recorded, whatever the order of parameters, and nothing else", async () => {
  const frame = encodeFrame({ header: { total: 1 }, buffers: [] });
  const table = { [recordedKey("cell", { b: [2, { d: 1, c: 2 }], a: "x" })]: Buffer.from(frame).toString("base64") };
  assert.equal(Object.keys(table)[0], 'cell {"a":"x","b":[2,{"c":2,"d":1}]}');
  const saved = recordedTransport(table);
  assert.equal((await saved.request("cell", { a: "x", b: [2, { c: 2, d: 1 }] })).header.total, 1);
  await assert.rejects(saved.request("cell", { a: "y", b: [] }), /not part of this saved page/);
  await assert.rejects(recordedTransport({}).request("toString", {}), /not part/);
});

test("the synthetic rows sum to 1 and tiles agree with rows", async () => {
  const fake = fakeTransport(), where = { run: "0", call: "1", head: 2, item: 0 };
  for (const token of [0, 97, 4_999]) {
    const row = await ask(fake, "row", { ...where, tokens: [token], start: 0, stop: 5_120, top: 3 });
    assert.ok(Math.abs(row.sum - 1) < 1e-6);
    const tile = await ask(fake, "tile",
      { ...where, what: "weights", pool: "max", level: 0, row: Math.floor(token / 256), key: 0, exact: true });
    for (let key = 0; key < 256; key++) {
      const weight = tile.data[(token % 256) * tile.keys + key];
      assert.equal(Number.isNaN(weight) ? 0 : weight, row.data[key]);
    }
  }
});
