// Values by key, within a budget of bytes; those that were not used for longest go first.

export class Lru<V> {
  readonly #entries = new Map<string, { value: V; bytes: number }>();
  #held = 0;

  constructor(readonly budget: number) {}

  get bytes(): number {
    return this.#held;
  }

  /** The value of a key, which becomes the one used last. */
  get(key: string): V | undefined {
    const entry = this.#entries.get(key);
    if (!entry) return undefined;
    this.#entries.delete(key);
    this.#entries.set(key, entry);
    return entry.value;
  }

  /** Keeps a value; a single one larger than the budget is kept alone. */
  set(key: string, value: V, bytes: number): void {
    this.#held -= this.#entries.get(key)?.bytes ?? 0;
    this.#entries.delete(key);
    for (const [old, entry] of this.#entries) {
      if (this.#held + bytes <= this.budget) break;
      this.#entries.delete(old);
      this.#held -= entry.bytes;
    }
    this.#entries.set(key, { value, bytes });
    this.#held += bytes;
  }
}
