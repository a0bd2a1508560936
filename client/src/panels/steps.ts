// Attention step by step: the numbers of the shown head for one row. What shows them is loaded when it is first wanted.
import type { Panel } from "../context";
import { h } from "../dom";
import { CHOICE, live, loader, sameTokens } from "./data";
import { placeOf } from "./lines";

const load = loader<unknown>("step");

export const steps: Panel = {
  id: "step", title: "Step", place: "right",
  wanted: (manifest) => manifest.step,
  mount(el, context) {
    let asked: AbortController | null = null;
    const [, end] = live(el, context, CHOICE, async () => {
      const { axis, tokens, cursor } = context.store.get(), call = context.call(), last = call.rows.length - 1;
      asked?.abort();
      asked = new AbortController();
      // The last token of what is chosen, else the row of the cursor, else the last one.
      const { signal } = asked, chosen = axis === "row" || sameTokens(call) ? tokens[tokens.length - 1] : undefined;
      const row = Math.min(last, chosen ?? cursor?.row ?? last);
      const data = await context.ask("step", { ...placeOf(context), row }, signal);
      const show = await load(context);
      if (signal.aborted) return;
      const box = h("div");
      el.replaceChildren(box);
      show(box, { ...data, text: "" }); // it stands beside
    });
    return () => {
      end();
      asked?.abort();
    };
  },
};
