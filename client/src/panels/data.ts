// What several panels read: the overview of a run, how its calls are grouped, how a head is called.
import type { Context } from "../context";
import type { Answer, Call, Run } from "../protocol";

type Overview = Answer<"overview">;
const known = new WeakMap<Context, Map<string, Promise<Overview>>>();

/** The small maps and statistics of a run's heads; asked once. */
export function overviewOf(context: Context, run: string, item: number): Promise<Overview> {
  const all = known.get(context) ?? new Map<string, Promise<Overview>>();
  known.set(context, all);
  const key = `${item} ${run}`;
  let found = all.get(key);
  if (!found) {
    found = context.ask("overview", { run, item });
    found.catch(() => all.delete(key));
    all.set(key, found);
  }
  return found;
}

export interface Group { title: string; calls: Call[] }

const upper = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);

/** The calls by who looks and at what: one group, but for encoder and decoder. */
export function groupsOf(run: Run): Group[] {
  const groups = new Map<string, Group>();
  for (const call of run.calls) {
    const name = run.sides.find((side) => side.id === call.rows.side)?.name ?? call.rows.side;
    const title = call.kind === "cross" ? "Cross-attention" : `${upper(name)} self-attention`;
    const group = groups.get(title) ?? { title, calls: [] };
    groups.set(title, group);
    group.calls.push(call);
  }
  for (const group of groups.values()) group.calls.sort((a, b) => a.layer - b.layer);
  return [...groups.values()];
}

/** "layer 1", or its name where a layer has several calls: "decoder.1.cross". */
export function layerName(run: Run, call: Call): string {
  const groups = groupsOf(run);
  const group = groups.find((one) => one.calls.includes(call));
  const alone = (group?.calls ?? []).filter((other) => other.layer === call.layer).length < 2;
  const title = groups.length > 1 && group ? `${group.title.toLowerCase()}, ` : "";
  return alone ? `${title}layer ${call.layer}` : `${title}${call.name}`;
}

export const headName = (run: Run, call: Call, head: number): string => `${layerName(run, call)} head ${head}`;

/** Whether row i and key i are one token. */
export const sameTokens = ({ rows, keys }: Call): boolean =>
  rows.side === keys.side && rows.placed === 0 && rows.length === keys.length;

/** "1.3", the short name under a small map. */
export const headNumber = (call: Call, head: number): string => `${call.layer}.${head}`;

/** Numbers of a head that tables and orders know. */
export const STATISTICS = [
  ["entropy", "Entropy", "In nats, averaged over rows: 0 means that one key gets everything"],
  ["evenness", "Evenness", "Entropy as a share of what it would be if all visible keys got the same"],
  ["largest", "Largest", "The largest weight of a row, averaged over rows"],
  ["distance", "Distance", "How many tokens away a row looks, averaged by weight"],
  ["self", "Self", "Weight on the token itself"],
  ["previous", "Previous", "Weight on the token before"],
  ["next", "Next", "Weight on the token after"],
  ["first", "First", "Weight on the first token"],
  ["sink", "Sink", "Weight that the sink takes, which goes to no key"],
] as const;

export type Statistic = (typeof STATISTICS)[number][0];

export const decimal = (value: number | null | undefined, digits = 2): string =>
  value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);

/** Runs `refresh` when asked and `el` is visible, else as soon as it is; at most once a frame. Returns [ask, end]. */
export function whenShown(el: HTMLElement, refresh: () => void): [() => void, () => void] {
  let wanted = false, frame = 0;
  const visible = (): boolean => el.isConnected && el.getClientRects().length > 0;
  const run = (): void => {
    frame = 0;
    if (!wanted || !visible()) return;
    wanted = false;
    refresh();
  };
  const ask = (): void => {
    wanted = true;
    if (!frame && visible()) frame = requestAnimationFrame(run);
  };
  const observer = new ResizeObserver(() => {
    if (wanted) ask();
  });
  observer.observe(el);
  return [ask, () => {
    observer.disconnect();
    cancelAnimationFrame(frame);
  }];
}

/** Moves focus among `all` by an arrow key: `columns` to a row. Returns the place to go to, or null. */
export function arrowMove(key: string, at: number, count: number, columns: number): number | null {
  const step = ({ ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns } as Record<string, number>)[key];
  const to = key === "Home" ? 0 : key === "End" ? count - 1 : step === undefined ? at : at + step;
  return to === at || to < 0 || to >= count ? null : to;
}
