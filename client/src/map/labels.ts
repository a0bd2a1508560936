// Which words stand at a margin: tokens where cells are large, else words, else every n-th with its number.
import type { Word } from "../words";

export interface Label {
  /** Tokens [token, end) that the label stands for. */
  token: number;
  end: number;
  text: string;
  /** The number of the token, where it is part of the label. */
  number: string;
  /** Middle of the label along the axis, in pixels. */
  at: number;
}

export interface WordsView {
  readonly named: boolean;
  at(token: number): Word | undefined;
  between(start: number, stop: number): Word[];
}

/** An axis of `length` tokens: token t starts at offset + t * scale; `line` pixels per label. */
export interface LabelAxis {
  offset: number;
  scale: number;
  length: number;
  room: number;
  line: number;
}

const BLOCK = 512; // pixels; labels within a block do not depend on what is in sight, so they stay while the map moves

/** A text on one line: control signs are drawn; those that turn the direction of writing have their numbers. */
export const visible = (text: string): string => text
  .replace(/\r?\n/g, "⏎").replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "\ufffd")
  .replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (c) => `⟨${c.charCodeAt(0).toString(16).toUpperCase()}⟩`);

/** What the margin calls one token. */
export function tokenText(word: Word | undefined, token: number): string {
  if (!word) return "";
  const part = word.end - word.first > 1 && visible(word.tokens[token - word.first] ?? "").trim();
  return part || word.label;
}

/** How far from its place a label may stand, in tokens, to begin a sentence. */
const shift = (step: number): number => Math.min(step / 2, 64);

/** 1, 2 or 5 times a power of ten tokens, so that labels `line` pixels high do not touch even if one is shifted. */
export function stride(scale: number, line: number): number {
  for (let base = 1; ; base *= 10)
    for (const n of [1, 2, 5]) if ((n * base - shift(n * base)) * scale >= line) return n * base;
}

export function layLabels(axis: LabelAxis, words: WordsView): Label[] {
  const { offset, scale, length, room, line } = axis;
  const start = Math.max(0, Math.floor(-offset / scale)), stop = Math.min(length, Math.ceil((room - offset) / scale));
  const label = (token: number, end: number, text: string, number = ""): Label =>
    ({ token, end, text, number, at: offset + ((token + end) / 2) * scale });
  if (scale >= line) {
    const out: Label[] = [];
    for (let t = start; t < stop; t++) {
      const text = tokenText(words.at(t), t);
      out.push(label(t, t + 1, text, text ? "" : String(t)));
    }
    return out;
  }
  if (words.named && scale >= line / 3) return wordLabels(axis, words, start, stop, label);
  return numbered(axis, words, start, stop, label);
}

type Make = (token: number, end: number, text: string, number?: string) => Label;

function wordLabels(axis: LabelAxis, words: WordsView, start: number, stop: number, label: Make): Label[] {
  const block = Math.max(1, Math.round(BLOCK / axis.scale));
  const out: Label[] = [];
  for (let b = Math.floor(start / block); b * block < stop; b++) {
    const inBlock: Label[] = [];
    const end = Math.min(axis.length, (b + 1) * block);
    for (const word of words.between(b * block, end)) {
      if (word.first < b * block) continue;
      const one = label(word.first, word.end, word.label);
      const last = inBlock[inBlock.length - 1];
      if (!last || one.at - last.at >= axis.line) inBlock.push(one);
    }
    // The first of a block stands; what comes too close before it in the block before goes.
    while (out.length && inBlock.length && inBlock[0].at - out[out.length - 1].at < axis.line) out.pop();
    out.push(...inBlock);
  }
  return out.filter((one) => one.end > start && one.token < stop);
}

const ENDS = /[.!?…。！？]["'”’)\]]*$/;

const LETTER = /[\p{L}\p{N}]/u;

/** The first sentence that starts in [from, to), else the first word with a letter there, else what is at `from`. */
function sentenceStart(words: WordsView, from: number, to: number): Word | undefined {
  let ended = false, first: Word | undefined;
  for (const word of from === 0 ? [] : words.between(from, to)) {
    if (ENDS.test(word.text.trim())) ended = true;
    else if (LETTER.test(word.text) && word.first >= from) {
      if (ended) return word;
      first ??= word;
    }
  }
  return first ?? words.at(from);
}

function numbered(axis: LabelAxis, words: WordsView, start: number, stop: number, label: Make): Label[] {
  const step = stride(axis.scale, axis.line * 1.2), out: Label[] = [];
  for (let t = Math.floor(start / step) * step; t < stop; t += step) {
    const word = words.named ? sentenceStart(words, t, Math.min(axis.length, t + Math.max(1, shift(step)))) : undefined;
    const token = word && word.first >= t ? word.first : t;
    if (token >= start && token < stop) out.push(label(token, token + 1, word?.label ?? "", String(token)));
  }
  return out;
}

/** `marked` labels always stand; others that would touch one go. */
export function withMarked(labels: readonly Label[], marked: readonly Label[], line: number): Label[] {
  const kept: Label[] = [];
  for (const one of marked) if (kept.every((other) => Math.abs(other.at - one.at) >= line)) kept.push(one);
  return [...labels.filter((one) => kept.every((other) => Math.abs(other.at - one.at) >= line)), ...kept];
}

/** Text cut to a width with an ellipsis, by whole characters. */
export function fitText(text: string, width: number, measure: (text: string) => number): string {
  if (measure(text) <= width) return text;
  const characters = Array.from(text);
  let low = 0, high = characters.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (measure(characters.slice(0, middle).join("") + "…") <= width) low = middle;
    else high = middle - 1;
  }
  return low ? characters.slice(0, low).join("") + "…" : "…";
}
