// A dialog over the client; the browser keeps the focus in it and closes it with Escape.
import type { Context } from "../context";
import { h, on } from "../dom";

let count = 0;

export function makeDialog(root: HTMLElement, title: string, ...children: Node[]): HTMLDialogElement {
  const id = `saccade-dialog-${count++}`;
  const close = h("button", { "aria-label": "Close", onclick: () => dialog.close() }, "×");
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": id },
    h("div", "dialog-body", h("div", "tools", h("h2", { id }, title), close), ...children));
  on(dialog, "click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop; all else stands in children
  });
  on(dialog, "keydown", (event) => event.stopPropagation());
  return root.appendChild(dialog);
}

/** Calls `run` when `key` is pressed outside of fields; in a notebook only while the client has the focus. */
export function onKey(context: Context, key: string, run: () => void): () => void {
  const target = context.transport.kind === "widget" ? context.root : document;
  return on<KeyboardEvent>(target, "keydown", (event) => {
    const { key: pressed, ctrlKey, metaKey, altKey } = event;
    if (pressed !== key || ctrlKey || metaKey || altKey
      || (event.composedPath()[0] as Element).matches?.("input, select, textarea")) return;
    event.preventDefault();
    run();
  });
}
