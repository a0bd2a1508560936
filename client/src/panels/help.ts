// Keys and gestures, and how to read the colours.
import type { Panel } from "../context";
import { h } from "../dom";
import { makeDialog, onKey } from "./dialog";

const READ = [
  "Each row of the map is a token that looks (query), each column a token that is looked at (key). A row has one unit of weight to give; a stronger colour is more of it. Zoomed out, a dot is the largest or the mean of many pairs. Hatched pairs are hidden by the mask.",
  "In the text, a filled word is looked at by the chosen one, an underlined word looks at it. Of several chosen words, what they look at is averaged, and what looks at them is summed.",
];
const KEYS: readonly (readonly [string, ...string[]])[] = [
  ["Map", "drag, one finger", "move", "wheel, two fingers, + −", "zoom; 0 shows all", "arrow keys", "go from pair to pair and say its numbers", "Enter, Space", "choose the word of the row, of the key", "[ ] { }", "change head, layer"],
  ["Heads, tables", "arrow keys, Home, End", "go to another one", "Enter", "choose it"],
  ["Text", "click, Enter", "choose a word", "with Shift, Ctrl", "choose all between, one more", "arrow keys, Page up and down, Home, End", "go to another word and choose it", "Escape", "choose nothing"],
  ["Everywhere", "/", "search; Enter goes on, Shift + Enter back", "?", "this help"],
];

export const help: Panel = {
  id: "help", title: "Help", place: "bar",
  mount(el, context) {
    const dialog = makeDialog(context.root, "Keys, gestures and colours", ...READ.map((text) => h("p", {}, text)),
      ...KEYS.flatMap(([title, ...keys]) => [h("h3", {}, title), h("dl", { class: "facts" }, ...keys.map((text, i) => h(i % 2 ? "dd" : "dt", {}, text)))]));
    const open = (): void => dialog.showModal(), end = onKey(context, "?", open);
    el.append(h("button", { "aria-label": "Help", title: "Help (?)", onclick: open }, "?"));
    return () => {
      end();
      dialog.remove();
    };
  },
};
