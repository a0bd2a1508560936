// Names for what is written often: the build puts these in the place of `Math.max` and its like.
export const { max: $max, min: $min, floor: $floor, round: $round, ceil: $ceil, abs: $abs, log2: $log2, log10: $log10 } = Math;
export const { String: $String, Number: $Number } = globalThis;
export const { isNaN: $isNaN } = $Number;
export const { stringify: $stringify } = JSON;
export const { entries: $entries } = Object;
export const { from: $from } = Array;
export const {
  document: $document, Promise: $Promise, AbortController: $AbortController, Uint8Array: $Uint8Array,
  Uint32Array: $Uint32Array, Float32Array: $Float32Array, HTMLElement: $HTMLElement,
} = globalThis;
