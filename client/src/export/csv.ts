// Numbers as CSV (RFC 4180) that no spreadsheet takes for formulas.
import { differenceOf, type Numbers } from "./numbers";

const FORMULA = /^([\s\u0000-\u001f]*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n])/;
const CONTROL = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g;

/** A text as one field: always in quotes; what a spreadsheet could run begins with an apostrophe. */
export function csvText(text: string): string {
  const plain = text.replace(CONTROL, "\ufffd").replace(/"/g, '""');
  return `"${FORMULA.test(text) ? "'" : ""}${plain}"`;
}

/** A number as one field, as short as float32 can be told apart; NaN is an empty field. */
export function csvNumber(value: number): string {
  if (Number.isNaN(value)) return "";
  for (let digits = 6; digits < 10; digits++) {
    const short = Number(value.toPrecision(digits));
    if (short === value || (!Number.isInteger(value)
      && Math.fround(short) === Math.fround(value))) return String(short);
  }
  return String(value);
}

export const csvLine = (fields: readonly (string | number)[]): string =>
  fields.map((field) => (typeof field === "number" ? csvNumber(field) : csvText(field))).join(",") + "\r\n";

/**
 * One line a visible cell, with its tokens and words; pairs that the mask hides have none. `lengths`: rows and keys of
 * the map.
 */
export function csvOf({ level, row, key, across, values, second, sampled, rowNames, keyNames }: Numbers,
  [rows, keys]: [number, number], what: string, pool: string): string[] {
  const size = 2 ** level, axis = (name: string): string[] =>
    [...(level ? [`${name}_first`, `${name}_last`] : [name]), `${name}_word`];
  const place = (bin: number, length: number): number[] =>
    (level ? [bin * size, Math.min(length, (bin + 1) * size) - 1] : [bin]);
  const less = second && differenceOf(values, second, what === "weights");
  const lines = [csvLine([...axis("row"), ...axis("key"), (level ? `${pool}_${what}` : what) + (sampled ? "_from_sampled_rows" : ""),
    ...(second ? ["second", "difference"] : [])])];
  values.forEach((value, at) => {
    const i = Math.floor(at / across), j = at % across;
    if (!Number.isNaN(value) || (second && !Number.isNaN(second[at])))
      lines.push(csvLine([...place(row + i, rows), rowNames[i], ...place(key + j, keys), keyNames[j], value,
        ...(second ? [second[at], less![at]] : [])]));
  });
  return lines;
}
