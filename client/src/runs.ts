// Runs beside each other: what they are called, and which head of one is that of another.
import { visible } from "./map/labels";
import type { Call, Run } from "./protocol";
import type { Compare } from "./store";

/** Tells texts apart, also those that begin alike. */
const textOf = ({ text, digest }: Run): string => `${digest} ${text}`;

/** Whether two runs have one text and the same tokens of it: two checkpoints. */
export const sameText = (a: Run, b: Run): boolean =>
  textOf(a) === textOf(b) && JSON.stringify(a.sides) === JSON.stringify(b.sides);

/**
 * A name for each run that tells them apart: the text of several texts, the model of several models, both where both
 * differ; with its number where that is not enough. `most`: characters of a text, from the word on in which texts that
 * begin alike part.
 */
export function runNames(runs: readonly Run[], most = 40): string[] {
  const alone = (of: (run: Run) => string): boolean => runs.every((run) => of(run) === of(runs[0]));
  const first = runs[0].text;
  let part = 0;
  while (first[part] && alone(({ text }) => text[part])) part++;
  const start = part < most || !first[part] ? 0 : first.lastIndexOf(" ", part - 1) + 1;
  const names = runs.map(({ text, model }) => {
    const shown = (start ? "…" : "") + visible(text.slice(start, start + most)), parts = [!alone((run) => run.model) && model, !alone(textOf) && shown];
    return parts.filter(Boolean).join(": ") || shown || model;
  });
  return names.map((name, at) => (names.indexOf(name) === names.lastIndexOf(name) ? name : `${at + 1} · ${name}`));
}

/** The call of a run that is most like a call of another run. */
export const twin = ({ calls }: Run, call: Call): Call => calls.find(({ name }) => name === call.name)
  ?? calls.find(({ kind, layer }) => kind === call.kind && layer === call.layer) ?? calls[0];

/** What a head is compared with first: the same head of the next run; in a single run the next head. */
export function usualCompare(runs: readonly Run[], run: Run, call: Call, head: number): Compare {
  const all = runs.filter(({ calls }) => calls.length), other = all[(all.indexOf(run) + 1) % all.length];
  const next = head + 1 < call.heads ? { call: call.id, head: head + 1 } : { call: run.calls[0].id, head: 0 };
  if (other === run) return { run: run.id, ...next, mode: "side" };
  const there = twin(other, call);
  return { run: other.id, call: there.id, head: Math.min(head, there.heads - 1), mode: "side" };
}
