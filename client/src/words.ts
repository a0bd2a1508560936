// Words by pages of tokens, fetched once each and kept while they are used.
import type { Manifest, WordTuple } from "./protocol";
import { ask, type Transport } from "./transport";

/** One word: its tokens are [first, end), `gap` is the text before it; `label` is one line without control signs. */
export interface Word {
  text: string;
  label: string;
  first: number;
  end: number;
  special: boolean;
  gap: string;
  tokens: string[];
}

export const PAGE = 4096;
const MOST_PAGES = 64;

const fromTuple = ([text, label, first, end, special, gap, tokens]: WordTuple): Word =>
  ({ text, label, first, end, special: special === 1, gap, tokens });

/** The words of one side of one run. */
export class SideWords {
  private readonly pages = new Map<number, Word[]>();
  private readonly loading = new Map<number, Promise<void>>();
  private readonly listeners = new Set<() => void>();

  constructor(
    readonly run: string, readonly side: string, readonly length: number, readonly named: boolean,
    private readonly transport: Transport,
  ) {}

  /** Tells `listener` when a page has come; returns what ends that. */
  onload(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }

  /** Loads the words over tokens [start, stop); resolves at once when they are here. */
  async need(start: number, stop: number): Promise<void> {
    const first = Math.floor(Math.max(0, start) / PAGE), last = Math.floor((Math.min(this.length, stop) - 1) / PAGE);
    const missing: Promise<void>[] = [];
    for (let page = first; page <= last; page++) if (!this.pages.has(page)) missing.push(this.load(page));
    await Promise.all(missing);
  }

  /** The word of a token; undefined while its page is not here, or when the side has no known words. */
  at(token: number): Word | undefined {
    const words = this.pages.get(Math.floor(token / PAGE));
    if (!words) return undefined;
    let low = 0, high = words.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1, word = words[middle];
      if (token < word.first) high = middle - 1;
      else if (token >= word.end) low = middle + 1;
      else return word;
    }
    return undefined;
  }

  /** The loaded words that overlap tokens [start, stop), in order; pages that are missing are skipped. */
  between(start: number, stop: number): Word[] {
    const out: Word[] = [];
    let end = -1;
    for (let page = Math.floor(Math.max(0, start) / PAGE); page * PAGE < Math.min(stop, this.length); page++) {
      for (const word of this.pages.get(page) ?? []) {
        if (word.end <= start || word.first >= stop || word.first < end) continue;
        out.push(word);
        end = word.end;
      }
    }
    return out;
  }

  /** How a token is called: the label of its word, "word (2 of 3)" for parts of words, its number without words. */
  name(token: number): string {
    const word = this.at(token);
    if (!word) return `token ${token}`;
    const of = word.end - word.first;
    return of > 1 ? `${word.label} (${token - word.first + 1} of ${of})` : word.label;
  }

  private load(page: number): Promise<void> {
    const known = this.loading.get(page);
    if (known) return known;
    if (!this.named) return Promise.resolve();
    const start = page * PAGE, stop = Math.min(this.length, start + PAGE);
    const promise = ask(this.transport, "words", { run: this.run, side: this.side, start, stop })
      .then(({ words }) => {
        if (this.pages.size >= MOST_PAGES) this.pages.delete(this.pages.keys().next().value!);
        this.pages.set(page, words.map(fromTuple));
        for (const listener of [...this.listeners]) listener();
      })
      .finally(() => this.loading.delete(page));
    this.loading.set(page, promise);
    return promise;
  }
}

/** The words of every side of every run. */
export class WordCache {
  private readonly sides = new Map<string, SideWords>();

  constructor(private readonly manifest: Manifest, private readonly transport: Transport) {}

  side(run: string, side: string): SideWords {
    const key = JSON.stringify([run, side]);
    let found = this.sides.get(key);
    if (!found) {
      const about = this.manifest.runs.find((r) => r.id === run)?.sides.find((s) => s.id === side);
      found = new SideWords(run, side, about?.tokens ?? 0, about?.named ?? false, this.transport);
      this.sides.set(key, found);
    }
    return found;
  }
}
