// Making elements. Text goes in as text; nothing here or elsewhere reads data as HTML.

type Attributes = Record<string, string | number | boolean | null | undefined | ((event: never) => void)>;
type Child = Node | string | null | undefined | false;

/** Attributes whose names the build makes short. */
const SHORT: Record<string, string> = { [/* @__KEY__ */ "class"]: "class", [/* @__KEY__ */ "onclick"]: "onclick" };

/** An element: functions are listeners of `on…`, booleans set or leave out an attribute, children are text or nodes. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    const name = SHORT[key] ?? key;
    if (value === null || value === undefined || value === false) continue;
    // the attribute would need the page policy's permission
    if (name === "style") element.style.cssText = String(value);
    else if (typeof value === "function") on(element, name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

/** Listens; returns what ends that. Wheels may be kept from scrolling. */
export function on<E extends Event>(target: EventTarget, name: string, listener: (event: E) => void): () => void {
  target.addEventListener(name, listener as EventListener, { passive: false });
  return () => target.removeEventListener(name, listener as EventListener);
}

/** A labelled select; `choices` are [value, text]. */
export function choice(
  label: string, choices: readonly (readonly [string, string])[], chosen: string, onchange: (value: string) => void,
): HTMLLabelElement {
  const select = h("select", { onchange: () => onchange(select.value) });
  for (const [value, text] of choices) select.append(h("option", { value, selected: value === chosen }, text));
  select.value = chosen;
  return h("label", { class: "choice" }, h("span", {}, label), select);
}

/** A row of buttons of which one is pressed; `choices` are [value, text, longer description]. */
export function toggles(
  label: string, choices: readonly (readonly [string, string, string?])[], chosen: string,
  onchange: (value: string) => void,
): HTMLDivElement {
  const group = h("div", { class: "toggles", role: "group", "aria-label": label });
  for (const [value, text, title] of choices)
    group.append(h("button", {
      title, "aria-pressed": String(value === chosen), "data-value": value,
      onclick: () => onchange(value),
    }, text));
  return group;
}

/** Shows another of the toggles as pressed. */
export function press(group: HTMLElement, chosen: string): void {
  for (const button of group.querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset["value"] === chosen));
}

/** A word in running text: isolated, so that a right-to-left word does not turn the sentence around. */
export const bdi = (text: string): HTMLElement => h("bdi", {}, text);
