// Which heads of the overview are shown: those of one role, or with alarms.
import type { HeadSummary } from "../protocol";

type About = Pick<HeadSummary, "role" | "alarms">;

const ALARMS = "!";

/** What heads can be filtered by, as choices [value, text] with how many there are; "" is all. */
export function filtersOf(heads: readonly About[]): [string, string][] {
  const counts = new Map<string | null, number>(), alarms = heads.filter((about) => passes(about, ALARMS)).length;
  for (const { role } of heads) counts.set(role, (counts.get(role) ?? 0) + 1);
  const roles = [...counts].sort(([, a], [, b]) => b - a)
    .map(([role, count]): [string, string] => [`=${role}`, `${role ?? "no role"} (${count})`]);
  return [["", "all heads"], ...(alarms ? [[ALARMS, `with alarms (${alarms})`] as [string, string]] : []), ...roles];
}

export const passes = ({ role, alarms }: About, filter: string): boolean =>
  !filter || (filter === ALARMS ? alarms.length > 0 : filter === `=${role}`);
