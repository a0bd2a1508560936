import assert from "node:assert/strict";
import { test } from "node:test";
import { cellAt, centreOf, cover, including, isHidden, isWhole, levelOf, makeView, middleOf, panned, topLevel,
  zoomed } from "../build/test.mjs";

const long = { width: 631, height: 547, rows: 100_003, keys: 100_003, square: true };
const near = (a, b, by = 1e-6) => assert.ok(Math.abs(a - b) <= by * Math.max(1, Math.abs(b)), `${a} is not ${b}`);

test("the whole map fits the shorter side and starts in the corner", () => {
  const view = makeView(long, { x: 5, y: 7, scale: 0 });
  near(view.sy * long.rows, long.height);
  near(view.sx, view.sy);
  assert.deepEqual([view.ox, view.oy], [0, 0]);
  assert.ok(isWhole(view));
  assert.equal(centreOf(view).scale, 0);
});

test("without square cells each axis fits its own length, and both zoom by the same factor", () => {
  const view = makeView({ width: 600, height: 400, rows: 53, keys: 47, square: false }, { x: 0, y: 0, scale: 0 });
  near(view.sx * 47, 600);
  near(view.sy * 53, 400);
  const closer = zoomed(view, 100, 100, 3);
  near(closer.sx / view.sx, closer.sy / view.sy);
});

test("a zoom keeps the point under the pointer, in and out", () => {
  let view = makeView(long, { x: 40_000, y: 41_000, scale: 0.5 });
  for (const factor of [1.7, 0.6, 2.3, 12]) {
    const key = (211 - view.ox) / view.sx, row = (307 - view.oy) / view.sy;
    view = zoomed(view, 211, 307, factor);
    near((211 - view.ox) / view.sx, key);
    near((307 - view.oy) / view.sy, row);
  }
});

test("zooms end at cells of 64 pixels and at the whole map, and drags at its edges", () => {
  near(zoomed(makeView(long, { x: 9, y: 9, scale: 50 }), 1, 1, 100).sx, 64);
  assert.ok(isWhole(zoomed(makeView(long, { x: 9, y: 9, scale: 50 }), 1, 1, 1e-9)));
  const view = makeView(long, { x: 50_000, y: 50_000, scale: 2 });
  const corner = panned(view, 1e9, 1e9), end = panned(view, -1e9, -1e9);
  assert.deepEqual([corner.ox, corner.oy], [0, 0]);
  near(end.ox, long.width - long.keys * 2);
  near(end.oy, long.height - long.rows * 2);
  near(panned(view, 31, -17).ox, view.ox + 31);
  near(panned(view, 31, -17).oy, view.oy - 17);
});

test("a centre makes the view again that it came from", () => {
  const view = makeView(long, { x: 77_123.25, y: 12_345.5, scale: 3.7 });
  const again = makeView(long, centreOf(view));
  for (const name of ["sx", "sy", "ox", "oy"]) near(again[name], view[name]);
});

test("a whole map that is smaller than its plot is zoomed at its own middle", () => {
  let view = makeView({ width: 700, height: 300, rows: 256, keys: 256, square: true }, { x: 0, y: 0, scale: 0 });
  for (let i = 0; i < 6; i++) view = makeView(view, { ...middleOf(view), scale: view.sx * 2 });
  near(centreOf(view).x, 128);
  near(centreOf(view).y, 128);
  const part = makeView(long, { x: 77_123.25, y: 12_345.5, scale: 3.7 });
  near(middleOf(part).x, 77_123.25);
  near(middleOf(part).y, 12_345.5);
});

test("points are cells, and points outside are none", () => {
  const view = makeView({ ...long, rows: 11, keys: 13 }, { x: 0, y: 0, scale: 0 });
  assert.deepEqual(cellAt(view, view.sx * 4.5, view.sy * 7.5), { row: 7, key: 4 });
  assert.equal(cellAt(view, view.sx * 13 + 1, 3), null);
  assert.equal(cellAt(view, -1, 3), null);
});

test("a cell out of sight comes into sight by the least movement", () => {
  const view = makeView(long, { x: 500, y: 500, scale: 8 });
  const moved = including(view, { row: 500, key: 900 });
  assert.equal(moved.oy, view.oy);
  near(moved.ox + 901 * moved.sx, long.width);
  assert.deepEqual(including(moved, { row: 500, key: 899 }), moved);
});

test("bins are about one device pixel, at most one level off, and one tile holds the whole at the top", () => {
  for (const ratio of [1, 2, 3]) for (const scale of [0.006, 0.03, 0.17, 0.9, 2, 40]) {
    const view = makeView(long, { x: 0, y: 0, scale }), pixels = 2 ** levelOf(view, ratio) * view.sx * ratio;
    if (levelOf(view, ratio) > 0) assert.ok(pixels > 0.7 && pixels < 1.42, `${pixels} pixels a bin`);
  }
  assert.equal(levelOf(makeView(long, { x: 0, y: 0, scale: 5 }), 1), 0);
  for (const length of [1, 255, 256, 257, 5_450, 100_003]) {
    assert.ok(256 * 2 ** topLevel(length, 1) >= length);
    if (topLevel(1, length)) assert.ok(256 * 2 ** (topLevel(1, length) - 1) < length);
  }
});

test("the cover holds every point in sight once, nearest to the centre first, and nothing outside", () => {
  const view = makeView(long, { x: 31_000, y: 64_000, scale: 0.21 }), level = levelOf(view, 1), size = 256 * 2 ** level;
  const tiles = cover(view, level), names = new Set(tiles.map((t) => `${t.row} ${t.key}`));
  assert.equal(names.size, tiles.length);
  for (const [x, y] of [[0, 0], [630, 0], [0, 546], [630, 546], [315, 270]]) {
    const { row, key } = cellAt(view, x, y);
    assert.ok(names.has(`${Math.floor(row / size)} ${Math.floor(key / size)}`));
  }
  for (const { row, key } of tiles) {
    assert.ok(view.oy + (row + 1) * size * view.sy > 0 && view.oy + row * size * view.sy < view.height);
    assert.ok(view.ox + (key + 1) * size * view.sx > 0 && view.ox + key * size * view.sx < view.width);
  }
  const far = ({ row, key }) => Math.hypot(view.ox + (key + 0.5) * size * view.sx - 315.5,
    view.oy + (row + 0.5) * size * view.sy - 273.5);
  for (let i = 1; i < tiles.length; i++) assert.ok(far(tiles[i]) >= far(tiles[i - 1]) - 1e-6);
});

test("a tile is hidden exactly when causality hides each of its pairs", () => {
  for (const placed of [0, 3, 255, 256, 700]) for (let row = 0; row < 4; row++) for (let key = 0; key < 6; key++) {
    const lastRow = (row + 1) * 256 - 1 + placed, firstKey = key * 256;
    assert.equal(isHidden({ level: 0, row, key }, placed), firstKey > lastRow);
  }
});
