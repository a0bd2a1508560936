// One head and one word, step by step: a diagram with its numbers, and switches that change the weights at once.
import { choice, h } from "./dom";
import { columnOf, leftOut, stateOf, summed, weightsMoved } from "./step/changed";
import { Diagram } from "./step/diagram";
import { FORMATS, mixed, numberText, shownKeys, softmaxOf, type Format, type Scores, type Settings, type Softmax } from "./step/numbers";
import { formulas, keyName, vectorRow, type Step } from "./step/parts";
import css from "./step/step.css";
import { addStyle } from "./styles";

addStyle(css);

/** What `saccade.step(...).as_json()` gives, and the header of the request `step`. */
export interface StepData {
  version: number;
  text: string;
  title: string;
  model: string;
  layer: number;
  head: number;
  row: number;
  /** The key that is the row's token; null where queries are other tokens. */
  own: number | null;
  dtype: string;
  digits: number;
  labels: string[];
  /** What sentences call each key: 'owl', of a word of several tokens 'o' in 'owl'. */
  names: string[];
  /** The keys that columns, keys and values are of; null: all. */
  shown: number[] | null;
  notes: string[];
  /** What comes out, in one sentence. */
  summary: string;
  /** The number, from 1, of the step that hides keys of this row; null where none is hidden. */
  hidden_in: number | null;
  without: string[];
  switches: string[];
  steps: Step[];
  scores: Scores;
  keys: (number | null)[][];
  /** Before positions turned them; null where nothing does. */
  unplaced_keys: (number | null)[][] | null;
  values: (number | null)[][] | null;
  differences: Record<string, number | null>;
}

export interface StepOptions {
  /** Where the arrow keys are listened to; the element itself where it is left out. */
  keys?: EventTarget;
  /** The id of the step that is shown first, and what is told of each step that is chosen. */
  first?: string;
  onstep?: (id: string) => void;
}

const MOST_KEYS = 16;
const MOST_NUMBERS = 6;
const LEFT_OUT: Record<string, string> = { scale: "another scale", mask: "no mask", position: "no positions", shift: "no shift" };
const NAMES: Record<string, string> = { scale: "scale", mask: "mask", position: "positions", shift: "softmax shift" };

/** Fills `el`; the function that it returns empties it again. */
export function mount(el: HTMLElement, data: StepData, options: StepOptions = {}): () => void {
  const view = new StepView(data, options);
  el.append(view.element);
  const target: EventTarget = options.keys ?? view.element;
  const listen = (event: Event): void => view.onkey(event as KeyboardEvent);
  target.addEventListener("keydown", listen);
  return () => {
    target.removeEventListener("keydown", listen);
    view.element.remove();
  };
}

class StepView {
  readonly element: HTMLElement;
  private at = 0;
  private readonly settings: Settings;
  private readonly original: Softmax;
  private live: Softmax;
  private readonly keys: number[];
  /** Where each of the keys stands in columns, keys and values. */
  private readonly places: number[];
  private readonly diagram: Diagram;
  private readonly panel = h("section", { class: "s-panel", "aria-live": "polite" });
  private readonly place = h("span", "place");
  private readonly back: HTMLButtonElement;
  private readonly next: HTMLButtonElement;
  private readonly weights = h("div", "weights");
  private readonly told = h("p", { class: "s-told", role: "status" });
  private readonly changed = h("p", { class: "changed", hidden: true }, "In the model, with nothing left out:");
  /** By part, ticked where it is left out. */
  private readonly boxes = new Map<string, HTMLInputElement>();
  private readonly slider: HTMLInputElement;
  private readonly scaleText = h("span", { class: "output", "aria-hidden": "true" });
  private readonly format: HTMLLabelElement;

  constructor(private readonly data: StepData, private readonly options: StepOptions) {
    const known = FORMATS.includes(data.dtype as Format) ? (data.dtype as Format) : "float32";
    this.settings = { scale: data.scores.scale, mask: true, position: true, shift: true, format: known };
    this.original = softmaxOf(data.scores, this.settings);
    this.live = this.original;
    this.keys = shownKeys(data.scores, data.own, MOST_KEYS, data.scores.scale, data.shown);
    this.places = this.keys.map((j) => (data.shown ? data.shown.indexOf(j) : j));
    this.diagram = new Diagram(data.steps, this.keys, this.places, data.labels, data, (at) => this.choose(at));
    this.back = h("button", { type: "button", "aria-label": "Previous step", onclick: () => this.choose(this.at - 1) }, "←");
    this.next = h("button", { type: "button", "aria-label": "Next step", onclick: () => this.choose(this.at + 1) }, "→");
    this.slider = h("input", { type: "range", min: 0, max: 1000, step: 1, "aria-label": "Scale", oninput: () => this.onslide() });
    this.format = choice("numbers in", FORMATS.map((f) => [f, f] as const), known, (value) => {
      this.settings.format = value as Format;
      this.update();
    });
    this.element = this.build();
    for (const name of data.without) this.turn(name, false);
    this.update();
    this.choose(Math.max(0, data.steps.findIndex((s) => s.id === options.first)), false);
    requestAnimationFrame(() => this.reveal());
  }

  private build(): HTMLElement {
    const { data } = this;
    const worst = Math.max(0, ...Object.values(data.differences).map((one) => one ?? NaN));
    const notes = data.notes.map((note) => h("p", "note", `${note}.`));
    return h("div", { class: "steps", tabindex: "-1" },
      h("header", {}, h("h2", {}, data.title), h("p", "quiet", data.text && h("q", {}, data.text), data.text ? ", " : "", data.model), ...notes, this.changed, h("p", "summary", data.summary)),
      h("div", "columns",
        h("div", "s-flow", this.diagram.element),
        h("div", "side", h("nav", { "aria-label": "Steps" }, this.back, this.place, this.next), this.swiped(this.panel), this.controls(), this.weights, this.told)),
      h("p", "quiet end", `Largest difference from the model's own numbers: ${worst.toExponential(0)}.`));
  }

  private controls(): HTMLElement {
    const { data } = this;
    const group = h("fieldset", "s-controls", h("legend", {}, "Leave parts out, and see the weights change"));
    for (const name of data.switches) {
      const box = h("input", { type: "checkbox", onchange: () => this.turn(name, !box.checked) });
      this.boxes.set(name, box);
      group.append(h("label", {}, box, `without ${NAMES[name] ?? name}`));
    }
    group.append(h("label", "slide", h("span", {}, "scale by"), this.slider, this.scaleText), this.format);
    return group;
  }

  // Steps

  onkey(event: KeyboardEvent): void {
    const target = event.composedPath()[0];
    if (event.altKey || event.ctrlKey || event.metaKey || target === this.slider || target instanceof HTMLSelectElement) return;
    const last = this.data.steps.length - 1;
    const wanted: Record<string, number> = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: last };
    const to = wanted[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(to);
  }

  /** A swipe to a side is a step. */
  private swiped(el: HTMLElement): HTMLElement {
    let x = 0;
    let y = 0;
    el.addEventListener("touchstart", (e) => ([x, y] = [e.touches[0].clientX, e.touches[0].clientY]), { passive: true });
    el.addEventListener("touchend", (e) => {
      const [dx, dy] = [e.changedTouches[0].clientX - x, e.changedTouches[0].clientY - y];
      if (Math.abs(dx) > 60 && Math.abs(dx) > 2 * Math.abs(dy)) this.choose(this.at + (dx < 0 ? 1 : -1));
    }, { passive: true });
    return el;
  }

  private choose(at: number, move = true): void {
    const last = this.data.steps.length - 1;
    this.at = Math.min(last, Math.max(0, at));
    this.back.disabled = this.at === 0;
    this.next.disabled = this.at === last;
    this.place.textContent = `Step ${this.at + 1} of ${last + 1}`;
    this.diagram.choose(this.at);
    this.show();
    if (!move) return;
    this.options.onstep?.(this.data.steps[this.at].id);
    this.reveal();
  }

  /** Brings the shown step's box into the diagram's view, without moving the page. */
  private reveal(): void {
    const node = this.diagram.at(this.at).closest("li") as HTMLElement;
    const flow = node.closest(".s-flow") as HTMLElement;
    const [box, view] = [node.getBoundingClientRect(), flow.getBoundingClientRect()];
    flow.scrollLeft += box.left + box.width / 2 - view.left - view.width / 2;
    flow.scrollTop += box.top + box.height / 2 - view.top - view.height / 2;
  }

  private show(): void {
    const step = this.data.steps[this.at];
    const { digits, values, names } = this.data;
    const state = this.state(step);
    const out = leftOut(this.data.scores, this.settings);
    // What is told of leaving out a part is told of the model: beside other numbers it would contradict them.
    const alone = state === "same" || (out.length === 1 && out[0] === step.switch);
    const vectors = state !== "new" ? step.vectors : step.id === "sum" ? summed(step, this.live.weights, values!, names) : [];
    const shown = h("p", { class: "formula", role: "math", "aria-label": step.formula }, ...formulas(step.mathml));
    const parts: (HTMLElement | false)[] = [
      h("h3", {}, step.name), state !== "same" && this.remark(step, state), shown, h("p", "shapes", step.shapes), h("p", "says", step.says),
      vectors.length > 0 && h("div", "vectors", ...vectors.map((v) => vectorRow(v, digits, MOST_NUMBERS))),
      step.columns.length > 0 && this.table(step),
      step.without !== "" && alone && h("p", "without", step.without),
      step.switch !== null && this.data.switches.includes(step.switch) && this.switchButton(step.switch),
    ];
    this.panel.replaceChildren(...parts.filter((part): part is HTMLElement => part !== false));
  }

  private switchButton(name: string): HTMLElement {
    const on = !(this.boxes.get(name)?.checked ?? false);
    return h("button", { type: "button", class: "switch", "aria-pressed": String(!on), onclick: () => this.turn(name, !on) },
      on ? `Leave out: ${NAMES[name]}` : `Back with: ${NAMES[name]}`);
  }

  /** Whether a step after that at `at` hides this key. */
  private hiddenLater(j: number, at = this.at): boolean {
    const { hidden_in, scores } = this.data;
    return hidden_in !== null && at + 1 < hidden_in && this.settings.mask && !scores.visible?.[j];
  }

  /** The keys of a step; scores after the mask and weights are those of the settings. */
  private table(step: Step): HTMLElement {
    const { digits, labels } = this.data;
    const columns = step.columns.map((c) => {
      const live = this.now(step, c.name);
      return { name: c.name, values: this.keys.map((j, i) => (live ? live[j] : c.values[this.places[i]])) };
    });
    const head = h("tr", {}, h("th", { scope: "col" }, "key"), ...columns.map((c) => h("th", { scope: "col" }, c.name)));
    const body = this.keys.map((j, i) => h("tr", { class: this.hiddenLater(j) ? "hidden-later" : j === this.data.own ? "own" : "" },
      h("th", { scope: "row" }, keyName(labels, j)), ...columns.map((c) => h("td", {}, numberText(c.values[i], digits))),
      this.hiddenLater(j) && h("td", "why", `hidden in step ${this.data.hidden_in}`)));
    const folded = labels.length - this.keys.length;
    return h("div", "scroll", h("table", {}, h("caption", "unseen", step.name), h("thead", {}, head), h("tbody", {}, ...body)),
      folded > 0 && h("p", "folded", `and ${folded.toLocaleString("en")} more ${folded === 1 ? "key" : "keys"}`));
  }

  /** A column as the settings make it; null where they do not change it. */
  private now(step: Step, column: string): number[] | null {
    return columnOf(this.data.scores, this.settings, this.live, step.id, column);
  }

  /** What of a step the settings change. */
  private state(step: Step): "same" | "new" | "old" {
    const { data, settings, live, original } = this;
    const values = data.values !== null && data.shown === null;
    const out = leftOut(data.scores, settings);
    return stateOf(step.id, out, data.scores, weightsMoved(live.weights, original.weights), values);
  }

  /** What is shown of a step that the settings change. */
  private remark(step: Step, state: "new" | "old"): HTMLElement {
    const out = leftOut(this.data.scores, this.settings).map((name) => LEFT_OUT[name]).join(" and ");
    const what = step.columns.length ? "table" : "sum";
    return h("p", { class: "changed" }, state === "old" ? "As in the model, with nothing left out: the switches do not reach here."
      : `The ${what} is recomputed, with ${out}; words and formula are those of the model.`);
  }

  // Switches

  /** Leaves a part out, or takes it back. */
  private turn(name: string, on: boolean): void {
    const box = this.boxes.get(name);
    if (box) box.checked = !on;
    if (name === "scale") this.settings.scale = on ? this.data.scores.scale : 1;
    else if (name === "mask" || name === "position" || name === "shift") this.settings[name] = on;
    this.update();
    this.show();
  }

  /** The slider goes from 0 over the model's own scale, in its middle, to 1 or four times that. */
  private get most(): number {
    return Math.max(1, 4 * this.data.scores.scale);
  }

  private onslide(): void {
    const own = this.data.scores.scale;
    const t = Number(this.slider.value) / 1000;
    this.settings.scale = t <= 0.5 ? own * t * 2 : own + (this.most - own) * ((t - 0.5) * 2) ** 2;
    const box = this.boxes.get("scale");
    if (box) box.checked = Math.abs(this.settings.scale - 1) < 1e-9;
    this.update(true);
    this.show();
  }

  private update(sliding = false): void {
    const { data, settings } = this;
    this.live = softmaxOf(data.scores, settings);
    const own = data.scores.scale;
    if (!sliding) {
      const t = settings.scale <= own ? settings.scale / own / 2 : 0.5 + Math.sqrt((settings.scale - own) / (this.most - own)) / 2;
      this.slider.value = String(Math.round(t * 1000));
    }
    this.scaleText.textContent = numberText(settings.scale, 3);
    this.slider.setAttribute("aria-valuetext", numberText(settings.scale, 3));
    this.format.hidden = settings.shift;
    this.changed.hidden = !leftOut(data.scores, settings).length;
    const output = data.values && !data.shown ? mixed(this.live.weights, data.values) : null;
    this.diagram.update({ column: (step, name) => this.now(step, name), later: (j, at) => this.hiddenLater(j, at), output,
      old: (step) => this.state(step) === "old" });
    this.drawWeights();
  }

  /** One bar for each key, with the weight of the model as a mark. */
  private drawWeights(): void {
    const { data, live, original } = this;
    const list = h("ul", { "aria-label": "Weights" });
    for (const j of this.keys) {
      const weight = live.weights[j];
      const broken = !Number.isFinite(weight);
      list.append(h("li", { class: j === data.own ? "own" : "" }, keyName(data.labels, j),
        h("span", "track",
          h("i", { class: broken ? "s-bar broken" : "s-bar", style: `width: ${broken ? 100 : (100 * weight).toFixed(2)}%` }),
          h("i", { class: "mark", style: `left: ${(100 * original.weights[j]).toFixed(2)}%` })),
        h("span", { class: "number", "data-key": String(j) }, numberText(weight, data.digits))));
    }
    this.weights.replaceChildren(h("h3", {}, "Weights"), list);
    this.told.textContent = this.sentence();
  }

  private sentence(): string {
    const { data, live, original } = this;
    if (original.weights.some(Number.isNaN)) return "The weights are NaN: the score of a key that is seen is not finite.";
    if (live.weights.some(Number.isNaN)) return `exp overflows in ${this.settings.format}: the weights are NaN.`;
    const most = (values: number[]): number => values.reduce((best, w, j) => (w > values[best] ? j : best), 0);
    const [before, after] = [most(original.weights), most(live.weights)];
    const [old, now] = [numberText(original.weights[before], 2), numberText(live.weights[after], 2)];
    if (live.weights.every((w, j) => Math.abs(w - original.weights[j]) < 0.0005)) return "These are the model's weights. The marks show them when parts are left out, too.";
    if (before === after) return `${data.names[after]} has ${now} and not ${old}.`;
    return `${data.names[after]} has the largest weight now, ${now}; in the model it is ${data.names[before]} with ${old}.`;
  }
}
