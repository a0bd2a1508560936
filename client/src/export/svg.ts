// What is in view as SVG: cells as rectangles where they are few, else as a picture of one pixel a bin.
import { cssOf, type Palette } from "../colours";
import type { ColourScale } from "../map/scale";
import { escapeMarkup as esc } from "./escape";

/** Cells up to which each one is a rectangle. */
export const MOST_CELLS = 10_000;
const WIDE = 640, LARGEST = 36, LINE = 12, LETTER = 6.4, LONGEST = 24;

export interface SvgInput {
  title: string;
  subtitle: string;
  rowTitle: string;
  keyTitle: string;
  down: number;
  across: number;
  values: Float32Array;
  rowNames: readonly string[];
  keyNames: readonly string[];
  scale: ColourScale;
  legend: string;
  palette: Palette;
  /** The values as a picture, as a data URL, where they are many. */
  image: string | null;
}

const number = (value: number): string => String(Number(value.toFixed(2)));
const cut = (name: string): string => ([...name].length > LONGEST ? [...name].slice(0, LONGEST - 1).join("") + "…" : name);

function cells(input: SvgInput, size: number): string {
  const { down, across, values, scale, palette } = input, gap = size > 10 ? 1 : 0;
  let out = "", hidden = "";
  for (let i = 0; i < down; i++) for (let j = 0; j < across; j++) {
    const value = values[i * across + j], x = number(j * size), y = number(i * size);
    if (Number.isNaN(value)) {
      hidden += `M${x} ${y}h${number(size)}v${number(size)}h-${number(size)}z`;
      continue;
    }
    const side = number(size - gap), place = scale.place(value);
    out += `<rect x="${x}" y="${y}" width="${side}" height="${side}" fill="${cssOf(scale.colourAt(place))}"/>`;
    if (size >= 26 && Math.abs(value) >= 0.05) {
      const dark = Math.abs(place - (scale.place(0) || 0)) > 0.6;
      out += `<text x="${number((j + 0.5) * size)}" y="${number((i + 0.5) * size + size * 0.13)}" font-size="${number(size * 0.36)}" text-anchor="middle" fill="${cssOf(dark ? palette.paper : palette.ink)}">${short(value)}</text>`;
    }
  }
  return `<path d="${hidden}" fill="url(#hidden)"/>${out}`;
}

const short = (value: number): string => value.toFixed(2).replace(/^(-?)0\./, "$1.").replace("-", "−");

/** Labels of every n-th row or key, so that they do not touch. */
function labels(names: readonly string[], size: number, write: (at: number, name: string) => string): string {
  const step = Math.max(1, Math.ceil(LINE / size));
  let out = "";
  for (let i = 0; i < names.length; i += step) out += write((i + 0.5) * size, esc(cut(names[i])));
  return out;
}

function legend({ scale, legend: name }: SvgInput, y: number): string {
  const stops = Array.from({ length: 17 }, (_, i) => `<stop offset="${number(i / 16)}" stop-color="${cssOf(scale.colourAt(i / 16))}"/>`).join("");
  const ticks = scale.ticks.map(({ at, text }) => `<text x="${number(at * 200)}" y="24" text-anchor="${at < 0.05 ? "start" : at > 0.95 ? "end" : "middle"}">${esc(text)}</text>`).join("");
  return `<g transform="translate(0 ${number(y)})" font-size="11"><defs><linearGradient id="scale">${stops}</linearGradient></defs>` +
    `<rect width="200" height="9" fill="url(#scale)" class="line"/>${ticks}<text x="212" y="9">${esc(name)}</text></g>`;
}

/** The whole file. Text is escaped; fonts are those of every system, with a generic one last. */
export function svgOf(input: SvgInput): string {
  const { down, across, rowNames, keyNames, palette } = input;
  const size = Math.min(LARGEST, WIDE / Math.max(down, across)), width = across * size, height = down * size;
  const longest = (names: readonly string[]): number => Math.min(LONGEST, Math.max(...names.map((name) => [...name].length))) * LETTER + 12;
  const left = Math.max(longest(rowNames), 90) + 4, top = longest(keyNames) + 74, lowest = top + height + 28;
  const full = Math.max(left + width + 16, left + 330, 16 + [...input.title].length * 8, 16 + [...input.subtitle].length * 6.2);
  const shown = input.image
    ? `<rect width="${number(width)}" height="${number(height)}" fill="url(#hidden)"/><image width="${number(width)}" height="${number(height)}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${input.image}"/>`
    : cells(input, size);
  const rows = labels(rowNames, size, (at, name) => `<text class="word" x="-6" y="${number(at + 4)}" text-anchor="end">${name}</text>`);
  const keys = labels(keyNames, size, (at, name) => `<text class="word" transform="translate(${number(at + 4)} -6) rotate(-90)">${name}</text>`);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${number(full)}" height="${number(lowest + 44)}" viewBox="0 0 ${number(full)} ${number(lowest + 44)}" role="img" aria-labelledby="title about">
<title id="title">${esc(input.title)}</title><desc id="about">${esc(input.subtitle)}</desc>
<style>text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:${cssOf(palette.ink)}}.word{font:12px "Iowan Old Style",Palatino,Georgia,serif}.quiet{fill:${cssOf(palette.quiet)}}.line{stroke:${cssOf(palette.quiet)};stroke-width:.5}</style>
<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="${cssOf(palette.paper)}"/><path d="M-1 7L7 -1" stroke="${cssOf(palette.hidden)}"/></pattern></defs>
<rect width="100%" height="100%" fill="${cssOf(palette.paper)}"/>
<text x="16" y="26" font-size="15" font-weight="600">${esc(input.title)}</text><text class="quiet" x="16" y="44" font-size="12">${esc(input.subtitle)}</text>
<g transform="translate(${number(left)} ${number(top)})">
<text class="quiet" font-size="11" x="0" y="${number(66 - top)}">${esc(input.keyTitle)}</text><text class="quiet" font-size="11" x="${number(14 - left)}" y="-8">${esc(input.rowTitle)}</text>
${shown}
${rows}
${keys}
${legend(input, height + 22)}
</g>
</svg>
`;
}
