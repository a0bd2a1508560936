// Saving what is in view: picture, numbers, or a page that shows it offline.
import type { Context, Panel } from "../context";
import { h } from "../dom";
import { describeView, saveCsv, saveHtml, savePng, saveSvg, type Work } from "../export/files";
import { makeDialog } from "./dialog";

type Save = (context: Context, work: Work) => Promise<void>;
const KINDS: [string, string, Save][] = [
  ["SVG", "A drawing for talks and papers, with words, legend and title; every cell a shape where they are few.", saveSvg],
  ["PNG", "The map as it is on the screen.", savePng],
  ["CSV", "The exact numbers, one line a cell, with tokens and words. Pairs hidden by the mask have no line.", saveCsv],
  ["HTML", "One file that opens offline: this part of the map and of the text, to point at, choose words in, and zoom out of.", saveHtml],
];

export const save: Panel = {
  id: "save", title: "Save", place: "bar",
  mount(el, context) {
    const view = h("p", { class: "quiet" }), state = h("p", { "aria-live": "polite" });
    let running: AbortController | null = null;
    const cancel = h("button", { type: "button", hidden: true, onclick: () => running?.abort() }, "Cancel");
    const start = async (kind: string, work: Save): Promise<void> => {
      const picture = context.picture();
      if (!picture || running) return;
      running = new AbortController();
      state.textContent = `Making the ${kind} file…`;
      cancel.hidden = false;
      try {
        await work(context, {
          picture, signal: running.signal, told: (done, all) => (state.textContent = `Recording ${done.toLocaleString("en")} of ${all.toLocaleString("en")} answers…`),
        });
        state.textContent = `The ${kind} file is saved.`;
      } catch (error) {
        state.textContent = running.signal.aborted ? "Cancelled." : error instanceof Error ? error.message : String(error);
      }
      running = null;
      cancel.hidden = true;
    };
    const kinds = KINDS.filter(([kind]) => kind !== "HTML" || context.transport.source);
    const dialog = makeDialog(context.root, "Save what is in view", view,
      h("ul", { class: "saves" }, ...kinds.map(([kind, about, work]) => h("li", {},
        h("button", { type: "button", "data-save": kind, onclick: () => void start(kind, work) }, kind), h("span", {}, about)))),
      h("div", { class: "tools" }, state, cancel));
    dialog.addEventListener("close", () => running?.abort());
    el.append(h("button", {
      type: "button", title: "Save picture, numbers or page", onclick: () => {
        const picture = context.picture(), text = picture ? describeView(context, picture) : "";
        view.textContent = picture ? text.charAt(0).toUpperCase() + text.slice(1) + "." : "The map is not drawn yet.";
        state.textContent = "";
        dialog.showModal();
      },
    }, "Save"));
    return () => {
      running?.abort();
      dialog.remove();
    };
  },
};
