// Words by pages of tokens, fetched once each and kept while they are used.
import { visible } from "./map/labels";
import { byId, type Manifest, type WordTuple } from "./protocol";
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
  ({ text, label: visible(label), first, end, special: special === 1, gap, tokens });

/** Words by token, as the map and the panels read them. */
export interface Words {
  readonly named: boolean;
  need(start: number, stop: number): Promise<boolean>;
  at(token: number): Word | undefined;
  between(start: number, stop: number): Word[];
  name(token: number): string;
}

/** How a token is called: the label of its word, "word (2 of 3)" for parts of words, its number without words. */
function nameOf(word: Word | undefined, token: number): string {
  if (!word) return `token ${token}`;
  const of = word.end - word.first;
  return of > 1 ? `${word.label} (${token - word.first + 1} of ${of})` : word.label;
}

/** The words of one side of one run. */
export class SideWords implements Words {
  readonly #pages = new Map<number, Word[]>();
  readonly #loading = new Map<number, Promise<boolean>>();
  readonly #views = new Map<number, Words>();

  readonly named: boolean;
  readonly #length: number;
  readonly #fetch: (start: number, stop: number) => Promise<WordTuple[]>;

  constructor(length: number, named: boolean, fetch: (start: number, stop: number) => Promise<WordTuple[]>) {
    this.#length = length;
    this.named = named;
    this.#fetch = fetch;
  }

  /** The same words by tokens counted from `placed` on. */
  from(placed: number): Words {
    if (!placed) return this;
    const known = this.#views.get(placed);
    if (known) return known;
    const shifted = (word: Word): Word => ({ ...word, first: word.first - placed, end: word.end - placed });
    const at = (token: number): Word | undefined => {
      const word = this.at(token + placed);
      return word && shifted(word);
    };
    const view: Words = {
      named: this.named, at, need: (start, stop) => this.need(start + placed, stop + placed),
      between: (start, stop) => this.between(start + placed, stop + placed).map(shifted),
      name: (token) => nameOf(at(token), token),
    };
    this.#views.set(placed, view);
    return view;
  }

  /** Loads the words over tokens [start, stop), a page after the other; resolves to whether any were missing. */
  async need(start: number, stop: number): Promise<boolean> {
    const last = Math.floor((Math.min(this.#length, stop) - 1) / PAGE);
    let news = false;
    for (let page = Math.floor(Math.max(0, start) / PAGE); page <= last && this.named; page++)
      if (!this.#pages.has(page)) news = (await this.#load(page)) || news;
    return news;
  }

  /** The word of a token; undefined while its page is not here, or when the side has no known words. */
  at(token: number): Word | undefined {
    const words = this.#pages.get(Math.floor(token / PAGE));
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
    for (let page = Math.floor(Math.max(0, start) / PAGE); page * PAGE < Math.min(stop, this.#length); page++) {
      for (const word of this.#pages.get(page) ?? []) {
        if (word.end <= start || word.first >= stop || word.first < end) continue;
        out.push(word);
        end = word.end;
      }
    }
    return out;
  }

  name(token: number): string {
    return nameOf(this.at(token), token);
  }

  #load(page: number): Promise<boolean> {
    const known = this.#loading.get(page);
    if (known) return known;
    const start = page * PAGE, stop = Math.min(this.#length, start + PAGE);
    const promise = this.#fetch(start, stop)
      .then((words) => {
        if (this.#pages.size >= MOST_PAGES) this.#pages.delete(this.#pages.keys().next().value!);
        this.#pages.set(page, words.map(fromTuple));
        return true;
      })
      .finally(() => this.#loading.delete(page));
    this.#loading.set(page, promise);
    return promise;
  }
}

/** The words of every side of every run. */
export class WordCache {
  readonly #sides = new Map<string, SideWords>();

  readonly #manifest: Manifest;
  readonly #transport: Transport;

  constructor(manifest: Manifest, transport: Transport) {
    this.#manifest = manifest;
    this.#transport = transport;
  }

  side(run: string, side: string): SideWords {
    const key = JSON.stringify([run, side]);
    let found = this.#sides.get(key);
    if (!found) {
      const about = byId(byId(this.#manifest.runs, run)?.sides, side);
      found = new SideWords(about?.tokens ?? 0, about?.named ?? false, async (start, stop) =>
        (await ask(this.#transport, "words", { run, side, start, stop })).words);
      this.#sides.set(key, found);
    }
    return found;
  }
}
