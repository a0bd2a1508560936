// The viewer in a browser: `mountPage` for `saccade view`, the default export for notebooks, `mountRecorded` for files.
import { makeContext } from "./context";
import { h } from "./dom";
import { startHeartbeat } from "./heartbeat";
import { makeFrame } from "./layout";
import { openSaved } from "./export/page";
import { mountMap } from "./map/index";
import { panels } from "./panels/index";
import { messageOf } from "./parts";
import { byId } from "./protocol";
import { bindHash, DEFAULTS, fitted, fromHash, makeStore } from "./store";
import { usualCompare } from "./runs";
import { adopt } from "./styles";
import { ask, httpTransport, recordedTransport, widgetTransport, type Transport, type WidgetModel } from "./transport";

export interface MountOptions {
  /** Whether the state is read from and kept in the page's hash. */
  hash?: boolean;
}

/** Shows the viewer in `element`; resolves to what removes it. Errors at the start are shown there. */
export async function mount(
  element: HTMLElement, transport: Transport, options: MountOptions = {},
): Promise<() => void> {
  const host = element.appendChild(h("div", { "data-lm-suppress-shortcuts": "true", style: "height: 100%" }));
  const shadow = host.attachShadow({ mode: "open" });
  adopt(shadow);
  const frame = makeFrame();
  shadow.append(frame.root);
  try {
    const manifest = await ask(transport, "open", {});
    if (!manifest.runs.some((run) => run.calls.length)) throw new Error("There is no attention here to show.");
    const given = options.hash ? fromHash(location.hash) : {};
    const state = fitted({ ...DEFAULTS, ...manifest.shown, ...given }, manifest), store = makeStore(state);
    // Weights of long rows are small: only powers of ten show them.
    const run = byId(manifest.runs, state.run), call = byId(run?.calls, state.call);
    if (run && call && manifest.runs.length === 2 && !Object.keys(given).length)
      store.set({ compare: usualCompare(manifest.runs, run, call, state.head) });
    if (!given.tone) store.set({ tone: call && call.keys.length > 512 ? "log" : "linear" });
    const context = makeContext(frame.root, store, transport, manifest, frame.announce, frame.complain);
    const unfill = frame.fill(context, mountMap, panels);
    const unbind = options.hash ? bindHash(store, manifest) : () => undefined;
    return () => {
      unbind();
      unfill();
      host.remove();
    };
  } catch (error) {
    frame.root.append(h("p", { class: "failed", role: "alert" }, messageOf(error)));
    return () => host.remove();
  }
}

/** Shows the viewer in the page of `saccade view`: the token is `?token=` of its URL, the state its hash. */
export function mountPage(): Promise<() => void> {
  const transport = httpTransport(new URLSearchParams(location.search).get("token") ?? "");
  startHeartbeat(transport);
  return mount(document.getElementById("saccade") ?? document.body, transport, { hash: true });
}

/** Shows a saved page: `table` maps requests (see `recordedKey`) to framed replies in base64. */
export function mountRecorded(element: HTMLElement, table: Record<string, string>): Promise<() => void> {
  return mount(element, recordedTransport(table), { hash: true });
}

export default {
  /** Called by anywidget for every view of the widget. */
  render({ model, el }: { model: WidgetModel; el: HTMLElement }): () => void {
    const style = "height: 40rem; max-height: 90vh; resize: vertical; overflow: hidden";
    const box = el.appendChild(h("div", { style }));
    const mounted = mount(box, widgetTransport(model));
    return () => {
      void mounted.then((remove) => remove());
      box.remove();
    };
  },
};

openSaved(mountRecorded);
