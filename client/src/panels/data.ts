// What several panels read: the overview of a run, how its calls are grouped, how a head is called.
import type { Context } from "../context";
import { h } from "../dom";
import { byId, type Answer, type Call, type Manifest, type Run } from "../protocol";
import type { State } from "../store";

type Overview = Answer<"overview">;
const known = new WeakMap<Context, Map<string, Promise<Overview>>>();

/** Made once, and again only after it failed. */
export function once<A extends unknown[], T>(make: (...given: A) => Promise<T>): (...given: A) => Promise<T> {
  let known: Promise<T> | undefined;
  return (...given) => known ??= make(...given).catch((error: unknown) => {
    known = undefined;
    throw error;
  });
}

/**
 * Loads what fills a panel once it is wanted. It comes as text through the client's own channel: a notebook has no
 * address that it could be loaded from.
 */
export const loader = <T>(name: string): ((context: Context) => Promise<(el: HTMLElement, given: T) => () => void>) =>
  once(async (context: Context) => {
    const { text } = await context.ask("script", { name });
    return (await import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })))).show;
  });

/** The small maps and statistics of a run's heads; asked once. */
export function overviewOf(context: Context, run: string, item: number): Promise<Overview> {
  const all = known.get(context) ?? new Map<string, Promise<Overview>>(), key = `${item} ${run}`;
  known.set(context, all);
  const found = all.get(key) ?? context.ask("overview", { run, item });
  all.set(key, found);
  found.catch(() => all.delete(key));
  return found;
}

export interface Group { title: string; calls: Call[] }

export const capital = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);

/** The calls by who looks and at what: one group, but for encoder and decoder. */
export function groupsOf(run: Run): Group[] {
  const groups: Group[] = [];
  for (const call of run.calls) {
    const name = byId(run.sides, call.rows.side)?.name ?? call.rows.side;
    const title = call.kind === "cross" ? "Cross-attention" : `${capital(name)} self-attention`;
    const group = groups.find((one) => one.title === title);
    if (group) group.calls.push(call);
    else groups.push({ title, calls: [call] });
  }
  for (const { calls } of groups) calls.sort((a, b) => a.layer - b.layer);
  return groups;
}

/** "layer 1", or its name where a layer has several calls: "decoder.1.cross". */
export function layerName(run: Run, call: Call): string {
  const groups = groupsOf(run), group = groups.find(({ calls }) => byId(calls, call.id))!;
  const alone = group.calls.filter(({ layer }) => layer === call.layer).length < 2;
  return (groups.length > 1 ? `${group.title.toLowerCase()}, ` : "") + (alone ? `layer ${call.layer}` : call.name);
}

export const headName = (run: Run, call: Call, head: number): string => `${layerName(run, call)} head ${head}`;

/** Whether row i and key i are one token. */
export const sameTokens = ({ rows, keys }: Call): boolean =>
  rows.side === keys.side && rows.placed === 0 && rows.length === keys.length;

/** Whether rows and keys are as many tokens of one side: then `rows` says what each receives as a key. */
export const together = ({ rows, keys }: Call): boolean => rows.side === keys.side && rows.length === keys.length;

/** "1.3", the short name under a small map. */
export const headNumber = (call: Call, head: number): string => `${call.layer}.${head}`;

/** Numbers of a head that tables and orders know. */
export const STATISTICS = [
  ["entropy", "Entropy", "In nats; 0: one key gets everything"],
  ["evenness", "Evenness", "Entropy as a share of that of equal weights"],
  ["largest", "Largest", "The largest weight of a row"],
  ["distance", "Distance", "Tokens from row to key, averaged by weight"],
  ["self", "Self", "Weight on the token itself"],
  ["previous", "Previous", "Weight on the token before"],
  ["next", "Next", "Weight on the token after"],
  ["first", "First", "Weight on the first token"],
  ["sink", "Sink", "Weight that goes to no key"],
] as const;

export type Statistic = (typeof STATISTICS)[number][0];

export const decimal = (value: number | null | undefined, digits = 2): string =>
  value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);

/** What has the focus inside the client. */
export const activeIn = (el: HTMLElement): Element | null => (el.getRootNode() as ShadowRoot).activeElement;

/** Why the model does not read the text again. */
export const unread = ({ why_not }: Manifest): string => why_not ?? "This needs the model, not a saved page.";

/** Counts the seconds at the top of `el` from the second one on; what it gives ends that. */
export function waiting(el: HTMLElement, context: Context): () => void {
  const line = h("p", { class: "quiet", role: "status" });
  let seconds = 0;
  const timer = setInterval(async () => {
    line.textContent = `Working, ${++seconds} s`;
    el.prepend(line);
    const found = await context.ask("progress", {}).catch(() => null);
    if (found?.total) line.textContent += `: ${found.done} of ${found.total} heads`;
  }, 1000);
  return () => {
    clearInterval(timer);
    line.remove();
  };
}

/** What is shown and chosen. */
export const CHOICE = ["run", "call", "head", "item", "axis", "tokens", "panel"] as const;

/**
 * Runs `refresh` now, after changes of `fields` and when asked: once `el` is visible, at most once a frame. Returns
 * [ask, end].
 */
export function live(el: HTMLElement, context: Context, fields: readonly (keyof State)[],
  refresh: () => unknown): [() => void, () => void] {
  let wanted = false, frame = 0;
  const run = async (): Promise<void> => {
    frame = 0;
    if (!wanted || !el.getClientRects().length) return;
    wanted = false;
    const end = waiting(el, context);
    try {
      await refresh();
    } catch (error) {
      context.fail(error);
    }
    end();
  };
  const ask = (): void => {
    wanted = true;
    frame ||= requestAnimationFrame(run);
  };
  const observer = new ResizeObserver(() => void (wanted && ask()));
  observer.observe(el);
  const unsubscribe = context.store.subscribe(ask, fields);
  ask();
  return [ask, () => {
    observer.disconnect();
    unsubscribe();
    cancelAnimationFrame(frame);
  }];
}
