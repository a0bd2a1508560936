// Which maps stand where: one, two beside or below each other, or one of their difference.
import type { Context } from "../context";
import { byId, callOf, type Call, type Run } from "../protocol";
import { runNames } from "../runs";
import type { Pane } from "./pane";
import { difference, type MapOf, type Tile, type TileStore, type Wanted } from "./tiles";
import { cover, isHidden, levelOf, makeView, topLevel, type Centre, type Extent, type TileAt } from "./viewport";

export const GAP = 18;
export const CAPTION = 18;

export interface Layout {
  panes: Pane[];
  /** The second map where the only pane is a difference. */
  subtracted: MapOf | null;
  subtractedName: string;
  /** Widths of the row margin and heights of the key margin. */
  margin: { row: number; key: number };
  /** Why there is no difference although one is asked for. */
  note: string | null;
}

export interface Room {
  width: number;
  height: number;
  ratio: number;
}

type Source = Pick<Pane, "map" | "call" | "caption" | "rowWords" | "keyWords">;

/** Numbers that came so far, by map: the ends of scales that weights do not have. */
export class Ranges {
  readonly #known = new Map<string, [number, number]>();

  static key(...maps: readonly MapOf[]): string {
    return maps.map((m) => [m.run, m.call, m.head, m.item, m.what].join("|")).join(" - ");
  }

  /** Whether the range of `key` became wider. */
  add(key: string, { low, high }: { low: number; high: number }): boolean {
    const [a, b] = this.#known.get(key) ?? [Infinity, -Infinity];
    if (low >= a && high <= b) return false;
    this.#known.set(key, [Math.min(a, low), Math.max(b, high)]);
    return true;
  }

  /** The range over several keys; low > high where nothing is known. */
  over(keys: readonly string[]): [number, number] {
    const known = keys.map((key) => this.#known.get(key) ?? [Infinity, -Infinity]);
    return [Math.min(...known.map((r) => r[0])), Math.max(...known.map((r) => r[1]))];
  }
}

function source({ store, words, manifest }: Context, run: Run, of: Call, head: number): Source {
  const { what, pool, compare } = store.get(), item = Math.min(store.get().item, of.items - 1), call = callOf(of, item);
  const { runs } = manifest, name = compare && compare.run !== store.get().run
    ? ` · ${runNames(runs, 24)[runs.indexOf(run)]}` : "";
  return {
    map: { run: run.id, call: call.id, head, item, what, pool }, call,
    caption: `Layer ${call.layer} head ${head}${name}`,
    rowWords: words.side(run.id, call.rows.side).from(call.rows.placed), keyWords: words.side(run.id, call.keys.side),
  };
}

/** The second map that is asked for, or null. */
function second(context: Context): Source | null {
  const { compare } = context.store.get(), run = byId(context.manifest.runs, compare?.run);
  const call = byId(run?.calls, compare?.call);
  return run && call ? source(context, run, call, compare!.head) : null;
}

/** Whether both calls hide what comes later, from the same place on: only then is that hidden in their difference. */
const bothCausal = (a: Call, b: Call): boolean => a.causal && b.causal && a.rows.placed === b.rows.placed;
/** Whether two maps have a difference: as many rows and as many keys. */
export const comparable = (a: Call, b: Call): boolean => a.rows.length === b.rows.length && a.keys.length === b.keys.length;

/** Lays the panes out in `room`; `centre` gives the centre of what is shown, for the extent of a pane. */
export function layOut(
  context: Context, tiles: TileStore, ranges: Ranges, room: Room, centre: (extent: Extent) => Centre,
): Layout {
  const { compare, what } = context.store.get(), { width, height } = room;
  const margin = { row: Math.max(58, Math.min(120, width * 0.13)), key: Math.max(54, Math.min(104, height * 0.15)) };
  const first = source(context, context.run(), context.call(), context.store.get().head), other = second(context);
  const wanted = other !== null && compare?.mode === "difference";
  const subtract = wanted && comparable(first.call, other.call);
  const beside = other && !subtract ? [first, other] : [first];
  const top = beside.length > 1 || subtract ? CAPTION : 0;
  const margins = { x: margin.row + GAP, y: margin.key + top + GAP / 2 };
  const stacked = beside.length > 1 && (width < 480 || // the way that leaves the larger square
    Math.min(width - margins.x, height / 2 - margins.y) > Math.min(width / 2 - margins.x, height - margins.y));
  const across = stacked ? width : width / beside.length, down = stacked ? height / beside.length : height;
  const one = (s: Source) => (at: TileAt): Tile | undefined => tiles.get(s.map, at);
  const both = (at: TileAt): Tile | undefined => {
    const a = one(first)(at), b = a && one(other!)(at);
    if (!a || !b) return undefined;
    const result = difference(a, b, what === "weights");
    ranges.add(Ranges.key(first.map, other!.map), result);
    return result;
  };
  const panes = beside.map((s, i): Pane => {
    const extent = {
      width: Math.max(1, across - margins.x), height: Math.max(1, down - margins.y),
      rows: s.call.rows.length, keys: s.call.keys.length, square: s.call.kind === "self",
    };
    const view = makeView(extent, centre(extent));
    return {
      ...s, ...(subtract ? { call: { ...s.call, causal: bothCausal(s.call, other.call) } } : {}), view, level: levelOf(view, room.ratio), tile: subtract ? both : one(s),
      x: (stacked ? 0 : across * i) + margin.row, y: (stacked ? down * i : 0) + margin.key + top,
      caption: subtract ? `${s.caption} − ${other.caption}` : other ? s.caption : "",
    };
  });
  return {
    panes, margin, subtracted: subtract ? other.map : null, subtractedName: other?.caption ?? "",
    note: wanted && !subtract ? "Maps of different length have no difference; they are shown side by side." : null,
  };
}

/** The tiles that a layout needs: the whole maps first, roughly, then what is in sight. */
export function wantedTiles({ panes, subtracted }: Layout): Wanted[] {
  const rough: Wanted[] = [], sharp: Wanted[] = [];
  for (const { map, view, level, call } of panes) {
    const top = topLevel(view.rows, view.keys);
    for (const one of subtracted ? [map, subtracted] : [map]) {
      rough.push({ map: one, at: { level: top, row: 0, key: 0 }, rough: level !== top });
      if (level !== top) for (const at of cover(view, level))
        if (!call.causal || !isHidden(at, call.rows.placed)) sharp.push({ map: one, at });
    }
  }
  return [...rough, ...sharp];
}
