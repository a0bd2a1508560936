// Numbers as CSV (RFC 4180) that no spreadsheet takes for formulas.

const FORMULA = /^[\s\u0000-\u001f]*[=+\-@\uff1d\uff0b\uff0d\uff20]/;
const CONTROL = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g;

/** A text as one field: always in quotes; what a spreadsheet could run begins with an apostrophe. */
export function csvText(text: string): string {
  const plain = text.replace(CONTROL, "\ufffd");
  const start = FORMULA.test(plain) || /^[\t\r\n]/.test(plain) ? "'" : "";
  return `"${start}${plain.replace(/"/g, '""')}"`;
}

/** A number as one field, as short as float32 can be told apart; NaN is an empty field. */
export function csvNumber(value: number): string {
  if (Number.isNaN(value)) return "";
  if (Number.isInteger(value)) return String(value);
  for (let digits = 6; digits < 10; digits++) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === Math.fround(value)) return String(short);
  }
  return String(value);
}

export const csvLine = (fields: readonly (string | number)[]): string =>
  fields.map((field) => (typeof field === "number" ? csvNumber(field) : csvText(field))).join(",") + "\r\n";

/** What a table of cells is made of; names are those of the bins' first tokens. */
export interface CsvInput {
  level: number;
  row: number;
  key: number;
  down: number;
  across: number;
  values: Float32Array;
  second: Float32Array | null;
  rowNames: readonly string[];
  keyNames: readonly string[];
  rowsLength: number;
  keysLength: number;
  what: string;
  pool: string;
}

/** One line a visible cell, with its tokens and words; pairs that the mask hides have none. */
export function csvOf(input: CsvInput): string[] {
  const { level, across, values, second } = input, size = 2 ** level;
  const axis = (name: string): string[] => (level ? [`${name}_first`, `${name}_last`, `${name}_word`] : [name, `${name}_word`]);
  const what = level ? `${input.pool}_${input.what}` : input.what;
  const lines = [csvLine([...axis("row"), ...axis("key"), what, ...(second ? ["second", "difference"] : [])])];
  const place = (bin: number, length: number, name: string): (number | string)[] =>
    level ? [bin * size, Math.min(length, (bin + 1) * size) - 1, name] : [bin, name];
  for (let i = 0; i < input.down; i++) {
    let text = "";
    for (let j = 0; j < across; j++) {
      const value = values[i * across + j], other = second?.[i * across + j];
      if (Number.isNaN(value) && (other === undefined || Number.isNaN(other))) continue;
      text += csvLine([...place(input.row + i, input.rowsLength, input.rowNames[i]), ...place(input.key + j, input.keysLength, input.keyNames[j]),
        value, ...(other === undefined ? [] : [other, Math.fround((value || 0) - (other || 0))])]);
    }
    if (text) lines.push(text);
  }
  return lines;
}
