// The panel: which heads are off, what the text's loss and its words' probabilities become, and what may come next.
import type { Context } from "../context";
import { bdi, h, on } from "../dom";
import { visible } from "../map/labels";
import { capital, headName, headNumber, live } from "../panels/data";
import { messageOf } from "../parts";
import { byId, type Answer } from "../protocol";
import type { Switches } from "./index";
import { lossRows, percent, signed } from "./numbers";
import { fillPatch } from "./patch";
import { makeText } from "./text";

type Found = Answer<"heads">;
const STATES = "Shown is how much the last hidden state of each token changes, as a share of its norm.";
const MASKED = "A masked model predicts each token from all others, with that token alone masked; of a longer text 16 tokens.";

const table = (title: string, names: readonly string[], rows: readonly HTMLElement[]): HTMLElement =>
  h("table", "h-numbers", h("caption", "unseen", title),
    h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows));

function losses({ loss, masked, reason }: Found): HTMLElement[] {
  if (loss === null) return [h("p", "quiet", `No probabilities: ${reason}. ${STATES}`)];
  const rows = lossRows(loss).map(([name, ...numbers]) =>
    h("tr", {}, h("th", { scope: "row" }, name), ...numbers.map((text) => h("td", {}, text))));
  return [table("Loss of the text", ["", "all on", "now", "change"], rows), ...(masked ? [h("p", "quiet small", MASKED)] : [])];
}

/** What may come after a word, or in its place; the token that does is told. */
function nextTokens(next: NonNullable<Found["next"]>, word: string, masked: boolean): Node[] {
  const where = `The most likely tokens ${masked ? "in place of" : "after"} `, title = `${where}‘${word}’`;
  return [h("h3", {}, where, bdi(`‘${word}’`)),
    table(title, ["token", "all on", "now", "points"], next.map(([token, before, after]) => h("tr", {},
      h("th", { scope: "row" }, bdi(visible(token).replace(/^ /, "␣") || "⏎")), h("td", {}, percent(before)), h("td", {}, percent(after)),
      h("td", {}, signed(100 * (after - before))))))];
}

export function fillPanel(el: HTMLElement, context: Context, switches: Switches): () => void {
  const { store } = context, { off, changes } = switches;
  const own = h("button", { class: "h-switch", onclick: () => switches.turn(store.get().call, store.get().head) });
  const all = h("button", { onclick: () => switches.clear() }, "All on");
  const chips = h("div", { class: "h-chips", role: "group", "aria-label": "Heads that are off" });
  const numbers = h("div"), scale = h("div", "h-scale"), said = h("p", { class: "quiet small h-said" }),
    next = h("div", "stack");
  const patch = fillPatch(context);
  const text = makeText(context, (told) => void (said.textContent = told));
  let asked: AbortController | null = null, announced = "";

  const tell = (): void => {
    const run = context.run(), { call, head } = store.get(), heads = off.of(run.id);
    own.textContent = `Switch off ${headName(run, context.call(), head)}`;
    own.setAttribute("aria-pressed", String(off.has(run.id, call, head)));
    all.disabled = !heads.length;
    const held = chips.contains((el.getRootNode() as ShadowRoot).activeElement);
    chips.replaceChildren(...heads.map(([id, n]) => {
      const of = byId(run.calls, id)!;
      return h("button", { "aria-label": `Switch ${headName(run, of, n)} on`, title: capital(headName(run, of, n)),
        onclick: () => switches.turn(id, n) }, h("s", {}, headNumber(of, n)), "×");
    }));
    if (held) ((chips.firstElementChild ?? own) as HTMLElement).focus();
  };
  const refresh = async (): Promise<void> => {
    asked?.abort();
    asked = new AbortController();
    const { signal } = asked, { run } = store.get(), heads = [...off.of(run)];
    const { row, word } = await text.chosen(), params = { run, off: heads, row };
    el.setAttribute("aria-busy", "true");
    try {
      const found = await context.ask("heads", params, signal);
      if (signal.aborted) return;
      const most = await text.show(found, heads.length > 0);
      if (signal.aborted) return;
      numbers.replaceChildren(...losses(found));
      legend(scale, most, found.loss !== null);
      next.replaceChildren(...(found.next ? nextTokens(found.next, word, found.masked) : []));
      const news = found.loss ? lossRows(found.loss).map(([name, a, b]) => `${name}: ${a} with all heads, ${b} now`).join(". ") : "";
      if (heads.length && news !== announced) context.announce(news);
      announced = news;
    } catch (error) {
      if (signal.aborted) return;
      announced = messageOf(error);
      numbers.replaceChildren(h("p", { role: "alert" }, announced));
      for (const part of [scale, text.element, said, next]) part.replaceChildren();
    } finally {
      if (!signal.aborted) el.removeAttribute("aria-busy");
    }
  };
  el.append(h("h2", {}, "Without some heads"),
    h("p", "quiet small", "A head that is off says nothing: its output is 0. Press x, or:"),
    h("div", "tools", own, all), chips, numbers, scale, text.element, said, next, patch.element);
  const [ask, stop] = live(el, context, ["run", "axis", "tokens", "panel"], refresh);
  tell();
  const ends = [stop, () => asked?.abort(), text.end, patch.end, store.subscribe(tell, ["run", "call", "head", "item"]),
    on(changes, "change", () => {
      tell();
      ask();
    })];
  return () => ends.forEach((end) => end());
}

/** What the colours of the words mean; hidden where nothing changes. */
function legend(scale: HTMLElement, most: number, predicted: boolean): void {
  scale.hidden = most === 0;
  scale.className = predicted ? "h-scale" : "h-scale h-one";
  scale.replaceChildren(h("span", {}, predicted ? `${signed(-most)} less likely` : "0"), h("i"),
    h("span", {}, predicted ? `more likely ${signed(most)} nats` : percent(most)));
}
