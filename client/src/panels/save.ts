// Saving what is in view: picture, numbers, or a page that shows it offline.
import type { Panel } from "../context";
import { h, on } from "../dom";
import { describeView, saveCsv, saveHtml, savePng, saveSvg } from "../export/files";
import { commas, messageOf } from "../parts";
import { makeDialog } from "./dialog";

const KINDS = [
  ["SVG", "A drawing for talks and papers; each cell is a shape where they are few.", saveSvg],
  ["PNG", "The map as it is on the screen.", savePng],
  ["CSV", "The numbers, one line a cell, with tokens and words. Hidden pairs have no line.", saveCsv],
  ["HTML", "One file that opens offline: this part of map and text, to point at, search and zoom out of.",
    saveHtml],
] as const;

export const save: Panel = {
  id: "save", title: "Save", place: "bar",
  mount(el, context) {
    const view = h("p", "quiet"), said = h("p", { "aria-live": "polite" });
    let running: AbortController | null = null;
    const start = async ([kind, , work]: (typeof KINDS)[number]): Promise<void> => {
      const picture = context.picture();
      if (!picture || running) return;
      const { signal } = (running = new AbortController());
      said.textContent = `Making the ${kind} file…`;
      try {
        const told = (done: number, all: number): void => {
          said.textContent = `Recording ${commas(done)} of ${commas(all)} answers; Escape cancels.`;
        };
        await work(context, { picture, signal, told });
        said.textContent = `The ${kind} file is saved.`;
      } catch (error) {
        said.textContent = signal.aborted ? "" : messageOf(error);
      }
      running = null;
    };
    const dialog = makeDialog(context.root, "Save what is in view", view,
      h("dl", "facts", ...KINDS.filter(([kind]) => kind !== "HTML"
        || context.transport.source).flatMap((one) => [
        h("dt", {}, h("button", { "data-save": one[0], onclick: () => void start(one) }, one[0])),
          h("dd", {}, one[1])])), said);
    on(dialog, "close", () => running?.abort());
    el.append(h("button", {
      onclick: () => {
        const picture = context.picture();
        view.textContent = picture ? describeView(context, picture) : "The map is not drawn yet.";
        said.textContent = "";
        dialog.showModal();
      },
    }, "Save"));
    return () => {
      running?.abort();
      dialog.remove();
    };
  },
};
