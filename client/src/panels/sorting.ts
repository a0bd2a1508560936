// Sorted places of values: NaN and missing values stand last in both directions, equal ones keep their order.
export type Value = number | string | null;

const missing = (value: Value): boolean => value === null || (typeof value === "number" && Number.isNaN(value));

function compare(a: Value, b: Value): number {
  if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b), "en",
    { numeric: true });
  return (a as number) - (b as number);
}

export function sortedPlaces(values: readonly Value[], falling: boolean): number[] {
  const places = values.map((_, place) => place);
  return places.sort((a, b) => {
    const x = values[a], y = values[b];
    if (missing(x) || missing(y)) return Number(missing(x)) - Number(missing(y)) || a - b;
    return (falling ? compare(y, x) : compare(x, y)) || a - b;
  });
}
