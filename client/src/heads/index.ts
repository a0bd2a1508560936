// `heads.js`: heads that are switched off, what the text loses by it, what each head is worth to it, and what each carries
// of the difference to another text. The client loads it for its panel "Heads off" and hands over what it knows.
import type { Context } from "../context";
import { headName, capital } from "../panels/data";
import { byId } from "../protocol";
import { addStyle, adopt } from "../styles";
import css from "./heads.css";
import { OffHeads } from "./numbers";
import { markOverview } from "./overview";
import { fillPanel } from "./panel";

/** What the panel and the marks of the overview share. */
export interface Switches {
  off: OffHeads;
  /** Switches a head of the shown run off or on again, and says so. */
  turn(call: string, head: number): void;
  clear(): void;
  /** Tells of every change. */
  changes: EventTarget;
}

function makeSwitches(context: Context): Switches {
  const off = new OffHeads(), changes = new EventTarget();
  const told = (text: string): void => {
    context.announce(text);
    changes.dispatchEvent(new Event("change"));
  };
  return {
    off, changes,
    turn(call, head) {
      const run = context.run(), known = byId(run.calls, call);
      if (!known) return;
      const name = capital(headName(run, known, head));
      told(`${name} is ${off.turn(run.id, call, head) ? "off" : "on"}.`);
    },
    clear() {
      off.clear(context.run().id);
      told("All heads are on.");
    },
  };
}

export function show(el: HTMLElement, context: Context): () => void {
  addStyle(css);
  adopt(el.getRootNode() as ShadowRoot);
  const switches = makeSwitches(context);
  const ends = [fillPanel(el, context, switches), markOverview(context, switches)];
  return () => ends.forEach((end) => end());
}
