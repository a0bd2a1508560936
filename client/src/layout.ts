// The page: header, overview at the left, map in the centre, tabs at the right; one thing at a time where it is narrow.
import type { Context, Panel } from "./context";
import { choice, h, on } from "./dom";
import { visible } from "./map/labels";
import { unread } from "./panels/data";
import { commas } from "./parts";
import { byId } from "./protocol";
import { runNames, twin } from "./runs";
import { addStyle } from "./styles";
import css from "./style.css";

addStyle(css);

type Size = "wide" | "middle" | "narrow";
const MAP: Omit<Panel, "mount"> = { id: "map", title: "Map", place: "right" };

export const sizeOf = (width: number): Size => (width < 700 ? "narrow" : width < 1100 ? "middle" : "wide");

export interface Frame {
  root: HTMLElement;
  announce(text: string): void;
  complain(text: string): void;
  /** Mounts the map and the panels; returns what removes them. */
  fill(context: Context, mountMap: Panel["mount"], panels: readonly Panel[]): () => void;
}

/** The outermost element, before anything is known of the run. */
export function makeFrame(): Frame {
  const live = h("p", { class: "unseen", role: "status", "aria-live": "polite" });
  const complaint = h("p", { class: "complaint", role: "alert", hidden: true });
  const root = h("div", { class: "saccade", "data-size": "wide", "data-theme": "light" }, live, complaint);
  let timer = 0;
  document.addEventListener("keydown", () => (complaint.hidden = true), true); // before what the key says itself
  return {
    root,
    announce(text) {
      live.textContent = text;
    },
    complain(text) {
      complaint.textContent = text;
      complaint.hidden = false;
      clearTimeout(timer);
      timer = setTimeout(() => (complaint.hidden = true), 6000);
    },
    fill: (context, mountMap, panels) => fill(root, context, mountMap, panels),
  };
}

function fill(root: HTMLElement, context: Context, mountMap: Panel["mount"], panels: readonly Panel[]): () => void {
  const { store, manifest } = context;
    const ends: (() => void)[] = [];
  const sections = new Map<string, HTMLElement>();
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Panels" });
  const body = h("div", "body", tabs);
  const bar = h("div", "bar");
  root.append(header(context, bar, ends), body);

  const tabbed: Omit<Panel, "mount">[] = [MAP, ...panels.filter((p) => p.place !== "bar")];
  for (const { id, title } of tabbed) {
    const section = h("section", { class: "panel", "data-panel": id, id: `panel-${id}`, "aria-label": title });
    const tab = h("button", {
      role: "tab", "aria-controls": `panel-${id}`, "data-tab": id,
      onclick: () => store.set({ panel: id }),
    }, title);
    sections.set(id, section);
    tabs.append(tab);
    body.append(section);
  }
  on<KeyboardEvent>(tabs, "keydown", (event) => moveTab(tabs, event));

  const arrange = (): void => {
    const size = sizeOf(root.clientWidth || root.parentElement?.clientWidth || 1200);
    root.dataset["size"] = size;
    place(size, tabbed, sections, tabs, store.get().panel);
  };
  const observer = new ResizeObserver(arrange);
  observer.observe(root);
  ends.push(() => observer.disconnect(), store.subscribe(arrange, ["panel"]), followTheme(root, context));
  arrange();

  const mounted = (panel: Panel["mount"], el: HTMLElement): void => {
    const end = panel(el, context);
    if (end) ends.push(end);
  };
  mounted(mountMap, sections.get("map")!);
  for (const panel of panels) {
    const inBar = panel.place === "bar" && bar.appendChild(h("div", { class: `bar-${panel.id}` }));
    const place = inBar || sections.get(panel.id)!;
    if (panel.wanted?.(manifest) ?? true) mounted(panel.mount, place);
    else place.append(h("p", "quiet", unread(manifest)));
  }
  return () => ends.splice(0).forEach((end) => end());
}

/** Which panels are shown where: at the right those that have no place of their own. */
function place(
  size: Size, all: readonly Omit<Panel, "mount">[], sections: Map<string, HTMLElement>, tabs: HTMLElement,
  chosen: string,
): void {
  const area = (panel: Omit<Panel, "mount">): "left" | "centre" | "right" =>
    size !== "narrow" && panel.id === "map" ? "centre"
    : size === "wide" && panel.place === "left" ? "left" : "right";
  const right = all.filter((panel) => area(panel) === "right");
  const front = right.find((panel) => panel.id === chosen) ?? right[0];
  for (const panel of all) {
    const section = sections.get(panel.id)!;
    section.dataset["area"] = area(panel);
    section.hidden = area(panel) === "right" && panel !== front;
    const tab = tabs.querySelector<HTMLElement>(`[data-tab="${CSS.escape(panel.id)}"]`)!;
    tab.hidden = area(panel) !== "right";
    tab.setAttribute("aria-selected", String(panel === front));
    tab.tabIndex = panel === front ? 0 : -1;
    if (tab.hidden) section.removeAttribute("role");
    else section.setAttribute("role", "tabpanel");
  }
  tabs.hidden = right.length === 0;
}

function moveTab(tabs: HTMLElement, event: KeyboardEvent): void {
  const shown = [...tabs.querySelectorAll<HTMLElement>("[role=tab]:not([hidden])")];
  const at = shown.indexOf(event.target as HTMLElement);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (at < 0 || step === undefined) return;
  event.preventDefault();
  const next = shown[(at + step + shown.length) % shown.length];
  next.click();
  next.focus();
}

function header(context: Context, bar: HTMLElement, ends: (() => void)[]): HTMLElement {
  const { store, manifest } = context;
  const title = h("p", { class: "title", dir: "auto" });
  const beyond = h("p", { class: "beyond quiet small" });
  const about = (): void => {
    const run = context.run();
    beyond.hidden = !run.beyond;
    beyond.textContent = `Read beyond the ${commas(run.beyond ?? 0)} tokens that the model was trained on.`;
    title.textContent = visible([manifest.title, run.model].filter(Boolean).join(" · "));
    title.title = visible(run.text);
  };
  about();
  ends.push(store.subscribe(about, ["run"]));
  const runs = choice("Run", runNames(manifest.runs).map((name, i) => [manifest.runs[i].id, name]),
    store.get().run, (id) => {
      const run = byId(manifest.runs, id)!;
      const { run: before, head, call: shown, compare } = store.get(), call = twin(run, context.call());
      store.set({
        run: id, call: call.id, head: Math.min(head, call.heads - 1), item: 0, tokens: [], scale: 0, cursor: null,
        // the other of two runs: they change places
        compare: compare?.run === id ? { ...compare, run: before, call: shown, head } : compare,
      });
    });
  ends.push(store.subscribe((state) => (runs.querySelector("select")!.value = state.run), ["run"]));
  const theme = choice("Colours", [["auto", "Auto colours"], ["light", "Light"], ["dark", "Dark"]],
    store.get().theme, (value) => store.set({ theme: value as "auto" | "light" | "dark" }));
  ends.push(store.subscribe((state) => (theme.querySelector("select")!.value = state.theme), ["theme"]));
  theme.firstElementChild!.className = "unseen";
  return h("header", "top",
    h("p", "brand", "Saccade"), title, manifest.runs.length > 1 && runs, bar, theme, beyond);
}

/** The theme of a notebook, told by the colour of its text; null where the page is the client's own. */
function hostTheme({ transport }: Context): "light" | "dark" | null {
  const rgb = transport.kind === "widget" && /^rgba?\((\d+), (\d+), (\d+)/.exec(getComputedStyle(document.body).color);
  return rgb ? (Math.max(...rgb.slice(1).map(Number)) > 127 ? "dark" : "light") : null;
}

/** Keeps `data-theme` at light or dark: what is chosen, else what the notebook has, else what the system prefers. */
function followTheme(root: HTMLElement, context: Context): () => void {
  const { store } = context;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = (): void => {
    const { theme } = store.get();
    const wanted = theme === "auto" ? hostTheme(context) ?? (dark.matches ? "dark" : "light") : theme;
    if (root.dataset["theme"] === wanted) return;
    root.dataset["theme"] = wanted;
    root.dispatchEvent(new Event("theme"));
  };
  const watcher = new MutationObserver(apply);
  for (const element of [document.body, document.documentElement]) watcher.observe(element, { attributes: true });
  const ends = [store.subscribe(apply, ["theme"]), on(dark, "change", apply), () => watcher.disconnect()];
  apply();
  return () => ends.forEach((end) => end());
}
