// Sentences about what words look at.
import type { Part } from "../parts";

export interface Share { word: string; weight: number }

const LEAST = 0.05;

/** A weight as the report shows it: hundredths without the zero, two digits below .005, by powers of ten below .001. */
export function short(weight: number): string {
  if (Number.isNaN(weight)) return "–";
  const text = weight && weight < 0.001 ? weight.toExponential(1) : weight < 0.005 ? String(Number(weight.toPrecision(2)))
    : weight.toFixed(2);
  return text.replace("e-", "e−").replace(/^0\./, ".");
}

function shares(all: readonly Share[], most: number): Part[] {
  const told = all.filter((share) => share.weight >= LEAST).slice(0, most);
  if (!told.length) return [`nothing with ${short(LEAST)} or more`];
  return told.flatMap((share, at): Part[] =>
    [at ? ", " : "", { word: share.word }, " ", { number: short(share.weight) }]);
}

function names(words: readonly string[]): Part[] {
  const told: Part[] = words.slice(0, 3).flatMap((word, at): Part[] => [at ? ", " : "", { word }]);
  return words.length > 3 ? [...told, ` and ${words.length - 3} more`] : told;
}

export interface Told { from: readonly Share[]; by: readonly Share[]; directions: readonly ("from" | "by")[] }

/**
 * "In layer 1 head 3 ‘it’ looks at ‘cat’ .42, ‘mat’ .20; looked at by ‘was’ .31." Several words are averaged over where
 * they look, and summed where they are looked at.
 */
export function sentence(where: string, chosen: readonly string[], told: Told, most = 5): Part[] {
  const several = chosen.length > 1, from = told.directions.includes("from"), by = told.directions.includes("by");
  const subject = [`In ${where} `, ...names(chosen), several ? ` (${chosen.length} words)` : ""];
  const looks = [several ? " look on average at " : " looks at ", ...shares(told.from, most)];
  const looked = [several ? "looked at, in sum, by " : "looked at by ", ...shares(told.by, most)];
  if (!by) return [...subject, ...looks, "."];
  return from ? [...subject, ...looks, "; ", ...looked, "."] : [...subject, several ? " are " : " is ", ...looked, "."];
}
