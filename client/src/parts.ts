// Sentences as parts, the same for eyes and for screen readers.
import { bdi, h } from "./dom";

/** Running text, a word of the user's text, or a number. */
export type Part = string | { word: string } | { number: string };

/** The parts as nodes: words stand isolated, so that a right-to-left word does not turn the sentence around. */
export const partNodes = (parts: readonly Part[]): (Node | string)[] =>
  parts.map((part) => (typeof part === "string" ? part
    : "word" in part ? bdi(`‘${part.word}’`) : h("span", "number", part.number)));

export const plain = (parts: readonly Part[]): string =>
  parts.map((part) => (typeof part === "string" ? part : "word" in part ? `‘${part.word}’` : part.number)).join("");

/** What an error says. */
export const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));

/** A number with commas: 100,000. */
export const commas = (value: number): string => value.toLocaleString("en");

/** The numbers [first, end). */
export const tokensFrom = (first: number, end: number): number[] => Array.from({ length: end - first }, (_, i) => first + i);
