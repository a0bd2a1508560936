// Keys and gestures, and how to read the colours.
import type { Panel } from "../context";
import { h } from "../dom";
import { makeDialog, onKey } from "./dialog";

const READ = [
  "Each row of the map is a token that looks (query), each column a token that is looked at (key). A row gives one unit of attention; the darker a cell, the more of it that key gets.",
  "Zoomed out, a cell is the largest or the mean weight of many pairs; the map says which. Grey pairs are hidden by the mask.",
  "In the text, a filled word is looked at by the chosen one, and an underlined word looks at it. Of several chosen words, what they look at is averaged and what looks at them is summed.",
  "In a difference, one colour means that the shown head gives more weight, the other that the second one does.",
];
const KEYS: [string, string, [string, string][]][] = [
  ["Map", "map", [["Drag, or one finger", "move"], ["Wheel, or two fingers", "zoom"], ["Arrow keys", "go from cell to cell; the numbers are read out"],
    ["+ and −, 0", "zoom, show all"], ["Enter", "choose the row of the cell"]]],
  ["Heads", "overview", [["Arrow keys", "go from head to head"], ["Home, End", "first and last head"]]],
  ["Text", "text", [["Click, Enter", "choose a word"], ["Shift, Ctrl + click", "choose several words"], ["Arrow keys", "go from word to word; with Shift choose all between, with Ctrl choose none"],
    ["Page up, Page down", "go by a screen"], ["Home, End", "first and last word"], ["Escape", "choose nothing"]]],
  ["Everywhere", "all", [["/", "search the text; Enter goes to the next place, Shift + Enter to the one before"], ["?", "this help"]]],
];

export const help: Panel = {
  id: "help", title: "Help", place: "bar",
  mount(el, context) {
    const dialog = makeDialog(context.root, "Keys, gestures and colours",
      h("h3", {}, "How to read this"), ...READ.map((text) => h("p", {}, text)),
      ...KEYS.flatMap(([title, , keys]) => [h("h3", {}, title),
        h("dl", { class: "facts keys" }, ...keys.flatMap(([key, text]) => [h("dt", {}, key), h("dd", {}, text)]))]));
    el.append(h("button", { type: "button", "aria-label": "Help", title: "Help (?)", onclick: () => dialog.showModal() }, "?"));
    const end = onKey(context, "?", () => dialog.showModal());
    return () => {
      end();
      dialog.remove();
    };
  },
};
