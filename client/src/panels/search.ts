// Finding words of the text: a field, the places with what stands around them, and steps from one to the next.
import type { Axis, Context } from "../context";
import { h } from "../dom";
import { sameTokens } from "./data";
import { onKey } from "./dialog";

const LIMIT = 200;
type Found = [word: number, first: number, end: number, before: string, text: string, after: string];

/** The search of the text panel; `/` anywhere in the client goes to its field. */
export class Search {
  readonly end: () => void;
  readonly el: HTMLElement;
  readonly #field: HTMLInputElement;
  readonly #count = h("span", { class: "quiet number", "aria-live": "polite" });
  readonly #list = h("ol", { class: "found" });
  readonly #steps: HTMLButtonElement[];
  #found: { axis: Axis; place: Found }[] = [];
  #total = 0;
  #at = -1;
  #timer = 0;
  #asked = 0;

  readonly #context: Context;

  constructor(context: Context) {
    this.#context = context;

    this.#field = h("input", {
      type: "search", placeholder: "Search the text", "aria-label": "Search the text", autocomplete: "off", spellcheck: "false",
      maxlength: 400, oninput: () => this.#later(), onkeydown: (event: KeyboardEvent) => this.#key(event),
    });
    const step = (by: number, name: string, sign: string): HTMLButtonElement =>
      h("button", { type: "button", "aria-label": name, title: name, disabled: true, onclick: () => this.#go(this.#at + by) }, sign);
    this.#steps = [step(-1, "Previous place", "↑"), step(1, "Next place", "↓")];
    this.el = h("div", { class: "search", role: "search" }, h("div", { class: "tools" }, this.#field, ...this.#steps), this.#count, this.#list);
    this.#count.hidden = this.#list.hidden = true;
    this.end = onKey(context, "/", () => {
      context.store.set({ panel: "text" });
      this.#field.focus();
      this.#field.select();
    });
    this.#field.value = context.store.get().searched;
    context.store.subscribe(({ searched }) => {
      if (searched === this.#field.value) return;
      this.#field.value = searched;
      void this.#run(false);
    }, ["searched"]);
    context.store.subscribe(() => void this.#run(false), ["run"]);
    if (this.#field.value) void this.#run(false);
  }

  #later(): void {
    window.clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => {
      this.#context.store.set({ searched: this.#field.value });
      void this.#run(true);
    }, 200);
  }

  #key(event: KeyboardEvent): void {
    if (event.key === "Enter") {
      event.preventDefault();
      if (this.#found.length && this.#field.value === this.#context.store.get().searched) this.#go(this.#at + (event.shiftKey ? -1 : 1));
      else this.#later();
    } else if (event.key === "Escape" && this.#field.value) {
      event.preventDefault();
      this.#field.value = "";
      this.#later();
    }
  }

  async #run(jump: boolean): Promise<void> {
    const asked = ++this.#asked, query = this.#field.value, context = this.#context;
    this.#found = [];
    this.#total = 0;
    this.#at = -1;
    if (query) {
      const axes: Axis[] = sameTokens(context.call()) ? ["row"] : context.side("row") === context.side("key") ? ["key"] : ["key", "row"];
      try {
        const answers = await Promise.all(axes.map((axis) =>
          context.ask("search", { run: context.run().id, side: context.side(axis).id, query, limit: LIMIT })));
        if (asked !== this.#asked) return;
        this.#found = answers.flatMap(({ found }, i) => found.map((place) => ({ axis: axes[i], place })));
        this.#total = answers.reduce((sum, { total }) => sum + total, 0);
      } catch (error) {
        context.fail(error);
      }
    }
    this.#show(query);
    if (jump && this.#found.length) this.#go(0);
  }

  #show(query: string): void {
    this.#count.hidden = !query;
    this.#list.hidden = !this.#found.length;
    for (const step of this.#steps) step.disabled = !this.#found.length;
    this.#list.replaceChildren(...this.#found.map(({ place: [, , , before, text, after] }, i) => h("li", {},
      h("button", { type: "button", onclick: () => this.#go(i) },
        h("bdi", {}, "…", before, h("mark", {}, text), after, "…")))));
    this.#tell();
  }

  #tell(): void {
    const total = this.#total, at = this.#at, places = total === 1 ? "1 place" : `${total.toLocaleString("en")} places`;
    const part = total > this.#found.length ? `; the first ${this.#found.length} are listed` : "";
    this.#count.textContent = total === 0 ? "Nothing found" : at < 0 ? places + part : `${at + 1} of ${places}${part}`;
    this.#list.querySelectorAll("button").forEach((button, i) => {
      if (i === at) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
  }

  #go(to: number): void {
    if (!this.#found.length) return;
    this.#at = (to + this.#found.length) % this.#found.length;
    const { axis, place: [, first, end] } = this.#found[this.#at];
    this.#context.choose(axis, Array.from({ length: end - first }, (_, i) => first + i));
    const both = sameTokens(this.#context.call());
    this.#context.reveal(axis === "row" ? first : null, axis === "key" || both ? first : null);
    this.#tell();
    const current = this.#list.children[this.#at] as HTMLElement;
    this.#list.scrollTop = current.offsetTop - this.#list.offsetTop - this.#list.clientHeight / 2;
  }
}
