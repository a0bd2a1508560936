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

const round = (value: number): string => String(Number(value.toFixed(2)));
const cut = (name: string): string => ([...name].length > LONGEST ? [...name].slice(0, LONGEST - 1).join("") + "…"
  : name);
const widest = (names: readonly string[]): number => Math.max(...names.map((name) => [...cut(name)].length)) * LETTER
  + 12;

function cells({ down, across, values, scale, palette }: SvgInput, size: number): string {
  const side = round(size > 10 ? size - 1 : size);
  let shown = "", hidden = "";
  for (let i = 0; i < down; i++) for (let j = 0; j < across; j++) {
    const value = values[i * across + j], x = round(j * size), y = round(i * size), place = scale.place(value);
    if (Number.isNaN(value)) hidden += `M${x} ${y}h${round(size)}v${round(size)}h-${round(size)}z`;
    else shown += `<rect x="${x}" y="${y}" width="${side}" height="${side}" fill="${cssOf(scale.colourAt(place))}"/>`;
    if (size < 26 || !(Math.abs(value) >= 0.05)) continue;
    const ink = cssOf(Math.abs(place - scale.place(0)) > 0.6 ? palette.paper : palette.ink);
    shown += `<text x="${round((j + 0.48) * size)}" y="${round((i + 0.6) * size)}" font-size="${round(size * 0.36)}" ` +
      `text-anchor="middle" style="fill:${ink}">${value.toFixed(2).replace(/^(-?)0\./, "$1.").replace("-", "−")}</text>`;
  }
  return `<path d="${hidden}" fill="url(#hidden)"/>${shown}`;
}

/** Labels of every n-th row or key, so that they do not touch. */
const labels = (names: readonly string[], size: number, where: (at: string) => string): string => names
  .map((name, i) => (i % Math.ceil(LINE / size) ? ""
    : `<text class="word" ${where(round((i + 0.5) * size + 4))}>${esc(cut(name))}</text>`)).join("");

/** The whole file. Text is escaped; fonts are those of every system, with a generic one last. */
export function svgOf(input: SvgInput): string {
  const { down, across, rowNames, keyNames, palette, scale, title, subtitle } = input;
  const size = Math.min(LARGEST, WIDE / Math.max(down, across)), width = across * size, height = down * size;
  const left = Math.max(94, widest(rowNames)), top = widest(keyNames) + 74, tall = round(top + height + 72);
  const wide = round(Math.max(left + Math.max(width + 16, 330), 16 + title.length * 8, 16 + subtitle.length * 6.2));
  const room = `width="${round(width)}" height="${round(height)}"`;
  const stops = Array.from({ length: 17 }, (_, i) =>
    `<stop offset="${i / 16}" stop-color="${cssOf(scale.colourAt(i / 16))}"/>`).join("");
  const ticks = scale.ticks.map(({ at, text }) =>
    `<text x="${round(at * 200)}" y="24" text-anchor="middle">${esc(text)}</text>`).join("");
  const [ink, quiet, paper] = [palette.ink, palette.quiet, palette.paper].map(cssOf);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${tall}" viewBox="0 0 ${wide} ${tall}"
 role="img" aria-labelledby="title about">
<title id="title">${esc(title)}</title><desc id="about">${esc(subtitle)}</desc>
<style>
text{font-family:system-ui,Helvetica,Arial,sans-serif;fill:${ink}}
.word{font:12px Palatino,Georgia,serif}
.quiet{fill:${quiet}}
</style>
<defs><linearGradient id="scale">${stops}</linearGradient>
<pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M-1 7L7 -1" stroke="${
  cssOf(palette.hidden)}"/></pattern></defs>
<rect width="100%" height="100%" fill="${paper}"/>
<text x="16" y="26" font-size="15" font-weight="600">${esc(title)}</text>
<text class="quiet" x="16" y="44" font-size="12">${esc(subtitle)}</text>
<g transform="translate(${round(left)} ${round(top)})" font-size="11">
<text class="quiet" y="${round(66 - top)}">keys →</text><text class="quiet" x="${round(14 - left)}" y="-8">queries ↓</text>
${input.image ? `<rect ${room} fill="url(#hidden)"/><image ${room} preserveAspectRatio="none"
 style="image-rendering:pixelated" href="${input.image}"/>` : cells(input, size)}
${labels(rowNames, size, (at) => `x="-6" y="${at}" text-anchor="end"`)}
${labels(keyNames, size, (at) => `transform="translate(${at} -6) rotate(-90)"`)}
<g transform="translate(8 ${round(height + 22)})"><rect width="200" height="9" fill="url(#scale)"/>${ticks}
<text x="222" y="9">${esc(input.legend)}</text></g>
</g>
</svg>
`;
}
