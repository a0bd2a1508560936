// From values to colours: linear or logarithmic, from one side or two, with what a legend needs to say.
import { mix, type Palette, type Rgb } from "../colours";
import type { What } from "../protocol";

export type Tone = "linear" | "log";

export interface Tick {
  /** Place along the legend, 0 to 1. */
  at: number;
  text: string;
}

export interface ColourScale {
  /** Place of a value along the scale, 0 to 1, cut at the ends. */
  place(value: number): number;
  ticks: Tick[];
  /** Colours at STEPS places as pixels of ImageData (little endian). */
  pixels: Uint32Array;
  colourAt(place: number): Rgb;
}

export const STEPS = 1024;

/** Numbers of any size, short: 0.125, 4.2e-5, 1.00. */
export function write(value: number): string {
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : value > 0 ? "∞" : "none";
  const size = Math.abs(value);
  const text = size !== 0 && size < 1e-3 ? value.toExponential(1) : value.toFixed(size < 10 ? 3 : size < 1000 ? 1 : 0);
  return text.replace(/^-/, "−").replace("e-", "e−");
}

/**
 * The number in a cell. What hundredths would call 0 is left out where the colour is that of 0 too, and written by its
 * power where the colours go by powers.
 */
export function cellText(value: number, what: What, tone: Tone): string {
  const size = Math.abs(value);
  const text = !size ? "0" : size >= 0.005 ? value.toFixed(size < 0.995 ? 2 : size < 10 ? 1 : 0).replace("0.", ".")
    : what !== "weights" || tone === "log" ? value.toExponential(0) : "";
  return text.replaceAll("-", "−");
}

const plain = (value: number): string => {
  const short = Number(value.toPrecision(6)), small = short && Math.abs(short) < 1e-3;
  return (small ? short.toExponential() : String(short)).replaceAll("-", "−");
};
const power = (exponent: number): string => (exponent > -3 ? plain(10 ** exponent) : `1e−${-exponent}`);

/** The smallest weight that a logarithmic scale tells from 0: a tenth of an even share, as a power of ten. */
export const lowestPower = (keys: number): number => -Math.min(9, Math.max(3, Math.ceil(Math.log10(keys)) + 1));

const most = new WeakMap<{ data: Float32Array }, number>();

/** What all but a hundredth of a tile's numbers above 0 are under. */
export function mostUnder(tile: { data: Float32Array }): number {
  const known = most.get(tile);
  if (known !== undefined) return known;
  const data = tile.data.filter((value) => value > 0).sort(), found = data[(data.length * 0.99) | 0] ?? 0;
  most.set(tile, found);
  return found;
}

/** 1, 2 or 5 times a power of ten, not below `value`. */
export function roundUp(value: number): number {
  const base = 10 ** Math.floor(Math.log10(value));
  return base * ([1, 2, 5].find((n) => n * base >= value * 0.9999) ?? 10);
}

/** Ends around [low, high] that stay the same while a few more values come. */
export function roundRange(low: number, high: number): [number, number] {
  if (!(low <= high)) return [0, 1];
  if (low === high) return [low - 0.5, high + 0.5];
  const step = roundUp((high - low) / 4);
  return [Math.floor(low / step) * step, Math.ceil(high / step) * step];
}

const cut = (share: number): number => Math.max(0, Math.min(1, share));
const tick = (place: (value: number) => number) => (value: number): Tick => ({ at: place(value), text: plain(value) });

function finish(place: (value: number) => number, colourAt: (place: number) => Rgb, ticks: Tick[]): ColourScale {
  const pixels = Uint32Array.from({ length: STEPS }, (_, i) => {
    const [r, g, b] = colourAt(i / (STEPS - 1)).map(Math.round);
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  });
  return { place, ticks, colourAt, pixels };
}

/** From `low` (paper) to `high` (accent) in equal steps; or from 10 ** lowest to 1 in equal steps of the logarithm. */
function oneSided(palette: Palette, low: number, high: number, lowest: number | null): ColourScale {
  const place = (value: number): number =>
    lowest === null ? cut((value - low) / (high - low)) : value > 0 ? cut(1 - Math.log10(value) / lowest) : 0;
  const ticks: Tick[] = lowest === null ? [low, (low + high) / 2, high].map(tick(place)) : [];
  if (lowest !== null) for (let e = 0, by = Math.ceil(-lowest / 3); e >= lowest; e -= by) {
    if (e - lowest < by) e = lowest; // four ticks at most: their numbers stand beside each other
    ticks.unshift({ at: 1 - e / lowest, text: (e === lowest ? "≤ " : "") + power(e) });
  }
  return finish(place, (at) => mix(palette.paper, palette.accent, at), ticks);
}

/** Differences from -top (against) over 0 (paper) to top (accent). */
function twoSided(palette: Palette, top: number, lowest: number | null): ColourScale {
  const size = (value: number): number => (lowest === null ? value / top : value && 1 - Math.log10(value) / lowest);
  const place = (value: number): number => 0.5 + 0.5 * Math.sign(value) * cut(size(Math.abs(value)));
  const marks = lowest === null ? [top / 2, top] : [10 ** Math.round(lowest / 2), 1];
  return finish(place, (at) => mix(palette.paper, at < 0.5 ? palette.against : palette.accent, Math.abs(at - 0.5) * 2),
    [-marks[1], -marks[0], 0, ...marks].map(tick(place)));
}

/**
 * The scale of what is shown. Weights reach from 0 to 1 everywhere, so that heads compare, but for means, which reach to
 * `top`; the others over `range`.
 */
export function makeScale(
  palette: Palette, what: What, tone: Tone, keys: number, range: [number, number], compared: boolean, top = 1,
): ColourScale {
  const [low, high] = what === "weights" ? [0, top] : range;
  const lowest = what === "weights" && tone === "log" ? lowestPower(keys) : null;
  const scale = compared ? twoSided(palette, Math.max(Math.abs(low), Math.abs(high)) || 1, lowest)
    : oneSided(palette, low, high, lowest);
  if (top < 1) scale.ticks[2].text = "≥ " + scale.ticks[2].text;
  return scale;
}

/** Writes the colours of `data` into pixels of the same count; NaN becomes transparent. */
export function colourInto(pixels: Uint32Array, data: Float32Array, scale: ColourScale): void {
  const last = STEPS - 1, { pixels: colours, place } = scale;
  for (let i = 0; i < data.length; i++) {
    const value = data[i];
    pixels[i] = value !== value ? 0 : colours[(place(value) * last + 0.5) | 0];
  }
}
