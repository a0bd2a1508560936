// Keys and gestures, and how to read the colours.
import type { Panel } from "../context";
import { h } from "../dom";
import { makeDialog, onKey } from "./dialog";

const READ = [
  "A row of the map is a token that looks (query), a column one that is looked at (key). A row has one unit of weight " +
    "to give; stronger colour is more of it. Zoomed out, a dot is the largest or the mean of many pairs. Hatched pairs " +
    "are hidden by the mask.",
  "In the text, a filled word is looked at by the chosen one, an underlined word looks at it. Of several chosen words, " +
    "what they look at is averaged, what looks at them is summed.",
];
/** Titles, each with keys and what they do. */
const KEYS: readonly (readonly [string, ...string[]])[] = [
  ["Map", "drag", "move", "wheel, pinch, + − 0", "zoom", "arrow keys", "go from pair to pair and say its numbers",
    "Enter, Space", "choose the word of the row, of the key", "[ ] { }", "change head, layer"],
  ["Text, heads, tables", "click, Enter", "choose", "with Shift, Ctrl", "choose all words between, one more",
    "arrow keys, Page up, Page down, Home, End", "go on", "Escape", "choose nothing", "x", "switch a head off or on"],
  ["Everywhere", "/", "search; Enter goes on, Shift + Enter back", "?", "this help"],
];

export const help: Panel = {
  id: "help", title: "Help", place: "bar",
  mount(el, context) {
    const dialog = makeDialog(context.root, "Keys, gestures and colours", ...READ.map((text) => h("p", {}, text)),
      ...KEYS.flatMap(([title, ...keys]) => [h("h3", {}, title),
        h("dl", "facts", ...keys.map((text, i) => h(i % 2 ? "dd" : "dt", {}, text)))]));
    const open = (): void => dialog.showModal(), end = onKey(context, "?", open);
    el.append(h("button", { "aria-label": "Help", title: "Help (?)", onclick: open }, "?"));
    return () => {
      end();
      dialog.remove();
    };
  },
};
