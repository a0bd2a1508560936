// The map of one head, in the centre of the page.
import type { Context } from "../context";
import { h } from "../dom";

export function mountMap(el: HTMLElement, context: Context): () => void {
  const name = el.appendChild(h("p", {}));
  const show = (): void => {
    name.textContent = `Layer ${context.call().layer} head ${context.store.get().head}`;
  };
  show();
  return context.store.subscribe(show, ["run", "call", "head"]);
}
