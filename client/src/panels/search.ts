// Finding words of the text: a field, the places with what stands around them, and steps from one to the next.
import type { Axis, Context } from "../context";
import { h, on } from "../dom";
import { visible } from "../map/labels";
import type { Answer } from "../protocol";
import { sameTokens } from "./data";
import { commas, tokensFrom } from "../parts";
import { onKey } from "./dialog";

const LIMIT = 200;

/** The search of the text panel; `/` anywhere in the client goes to its field. */
export function makeSearch(context: Context): { el: HTMLElement; end(): void } {
  const { store } = context;
  let found: { axis: Axis; place: Answer<"search">["found"][number] }[] = [], total = 0, of = "", at = -1, timer = 0, asked = 0;
  const label = context.transport.kind === "recorded" ? "Search what is saved" : "Search the text";
  const field = h("input", { type: "search", placeholder: label, "aria-label": label,
    autocomplete: "off", maxlength: 400, oninput: () => later() });
  const count = h("p", { class: "quiet number", "aria-live": "polite", hidden: true }),
    list = h("ol", { class: "found plain", hidden: true });
  const step = (by: number, title: string, sign: string): HTMLButtonElement =>
    h("button", { "aria-label": title, title, disabled: true, onclick: () => go(at + by) }, sign);
  const steps = [step(-1, "Previous place", "↑"), step(1, "Next place", "↓")];

  const tell = (): void => {
    const places = `${commas(total)} place${total === 1 ? "" : "s"}`,
      part = total > found.length ? `; the first ${found.length} are listed` : "";
    count.textContent = (total === 0 ? "Nothing found" : (at < 0 ? "" : `${at + 1} of `) + places + part) + of;
    list.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-current", String(i === at)));
  };
  const go = (to: number): void => {
    at = (to + found.length) % found.length;
    const { axis, place: [, first, end] } = found[at], both = sameTokens(context.call()),
      current = list.children[at] as HTMLElement;
    context.choose(axis, tokensFrom(first, end));
    context.reveal(axis === "row" ? first : null, axis === "key" || both ? first : null);
    tell();
    list.scrollTop = current.offsetTop - list.clientHeight / 2;
  };
  const run = async (jump: boolean): Promise<void> => {
    const mine = ++asked, query = field.value;
    const axes: Axis[] = sameTokens(context.call()) ? ["row"] : context.side("row") === context.side("key") ? ["key"]
      : ["key", "row"];
    try {
      const answers = query ? await Promise.all(axes.map((axis) =>
        context.ask("search", { run: store.get().run, side: context.side(axis).id, query, limit: LIMIT }))) : [];
      if (mine !== asked) return;
      found = answers.flatMap(({ found }, i) => found.map((place) => ({ axis: axes[i], place })));
      total = answers.reduce((sum, { total }) => sum + total, 0);
      const all = axes.reduce((sum, axis) => sum + context.side(axis).tokens, 0),
        covered = answers.reduce((sum, one) => sum + (one.covered ?? all), 0);
      of = covered < all ? `; only ${commas(covered)} of ${commas(all)} tokens are saved here` : "";
      at = -1;
    } catch (error) {
      context.fail(error);
    }
    count.hidden = !query;
    list.hidden = !found.length;
    for (const step of steps) step.disabled = !found.length;
    list.replaceChildren(...found.map(({ place: [, , , before, text, after] }, i) => h("li", {},
      h("button", { onclick: () => go(i) }, h("bdi", {}, "…" + visible(before), h("mark", {}, visible(text)),
        visible(after) + "…")))));
    if (jump && found.length) go(0);
    else tell();
  };
  const later = (): void => {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => {
      store.set({ searched: field.value });
      void run(true);
    }, 200);
  };
  on<KeyboardEvent>(field, "keydown", (event) => {
    if (event.key === "Enter" && found.length) go(at + (event.shiftKey ? -1 : 1));
    else if (event.key === "Escape" && field.value) {
      field.value = "";
      later();
    } else return;
    event.preventDefault();
  });
  const ends = [
    onKey(context, "/", () => {
      store.set({ panel: "text" });
      field.select();
      field.focus();
    }),
    store.subscribe(({ searched }, changed) => {
      if (searched === field.value && !changed.has("run")) return;
      field.value = searched;
      void run(false);
    }, ["searched", "run"]),
  ];
  field.value = store.get().searched;
  if (field.value) void run(false);
  return { el: h("div", "search", h("div", { class: "tools", role: "search" }, field, ...steps), count,
    list), end: () => ends.forEach((end) => end()) };
}
