// A dialog over the client; the browser keeps the focus in it and closes it with Escape.
import { h } from "../dom";

let count = 0;

export function makeDialog(root: HTMLElement, title: string, ...children: Node[]): HTMLDialogElement {
  const id = `saccade-dialog-${count++}`;
  const close = h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "×");
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": id },
    h("header", {}, h("h2", { id }, title), close), h("div", { class: "dialog-body" }, ...children));
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop; all else stands in children
  });
  dialog.addEventListener("keydown", (event) => event.stopPropagation());
  return root.appendChild(dialog);
}
