// Heads switched off. What shows them also marks the overview, so it is loaded at once.
import type { Context, Panel } from "../context";
import { live, loader } from "./data";

const load = loader<Context>("heads");

export const heads: Panel = {
  id: "heads", title: "Heads off", place: "right",
  wanted: (manifest) => manifest.step,
  mount(el, context) {
    let end: (() => void) | undefined;
    const show = async (): Promise<void> => {
      const fill = await load(context);
      end ??= fill(el, context);
    };
    show().catch(() => undefined); // tried again, and told, when the panel is seen
    const [, stop] = live(el, context, ["panel"], show);
    return () => {
      stop();
      end?.();
    };
  },
};
