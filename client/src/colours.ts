// The palette of style.css as numbers, and the scales that turn values into colours.

export type Rgb = readonly [number, number, number];

export interface Palette {
  paper: Rgb;
  ink: Rgb;
  quiet: Rgb;
  accent: Rgb;
  /** The other end of two-sided scales. */
  against: Rgb;
  /** Pairs that the mask hides. */
  hidden: Rgb;
}

/** "#1c4ed8" as three numbers of 0 to 255. */
export function parseHex(text: string): Rgb {
  const digits = text.trim().replace("#", "");
  const at = (i: number): number => parseInt(digits.slice(i, i + 2), 16);
  return [at(0), at(2), at(4)];
}

/** Reads the palette that is in force at an element. */
export function paletteOf(element: Element): Palette {
  const style = getComputedStyle(element);
  const read = (name: string): Rgb => parseHex(style.getPropertyValue(name));
  return {
    paper: read("--paper"), ink: read("--ink"), quiet: read("--quiet"), accent: read("--accent"),
    against: read("--against"), hidden: read("--hidden"),
  };
}

export const mix = (a: Rgb, b: Rgb, share: number): Rgb =>
  [a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share, a[2] + (b[2] - a[2]) * share];

/** Relative luminance, as contrasts are computed from (WCAG 2). */
const luminance = (c: Rgb): number => {
  const [r, g, b] = c.map((v) => (v > 10 ? ((v / 255 + 0.055) / 1.055) ** 2.4 : v / 3294.6));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

/** Which of two colours reads better on `ground`. */
export function readable(ground: Rgb, one: Rgb, other: Rgb): Rgb {
  const [at, a, b] = [ground, one, other].map((c) => luminance(c) + 0.05);
  return Math.max(at / a, a / at) < Math.max(at / b, b / at) ? other : one;
}

export const cssOf = (c: Rgb): string => `rgb(${c.map((v) => Math.round(v)).join(" ")})`;
