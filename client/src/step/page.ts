// `step.js`: the page of `saccade step --out`, whose data stands in the page itself, and what the viewer loads for its panel.
import { h } from "../dom";
import { mount, type StepData } from "../step";
import { addStyle, adopt } from "../styles";
import css from "./page.css";

/** Shows the steps within a page of others, whose colours are inherited; the function that it returns empties it. */
export function show(el: HTMLElement, data: StepData): () => void {
  const root = el.attachShadow({ mode: "open" });
  addStyle(css); // what it says of the whole page meets nothing here
  adopt(root);
  const box = h("div");
  root.append(box);
  return mount(box, data);
}

function page(text: string): void {
  addStyle(css);
  adopt(document);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = (): void => void (document.documentElement.dataset.theme = dark.matches ? "dark" : "light");
  dark.addEventListener("change", paint);
  paint();
  const main = document.body.appendChild(h("main", {}, h("p", "brand", "Saccade")));
  mount(main, JSON.parse(text) as StepData, {
    keys: document,
    first: decodeURIComponent(location.hash.slice(1)),
    onstep: (id) => history.replaceState(null, "", `#${encodeURIComponent(id)}`),
  });
}

const held = document.getElementById("steps-of-this-page");
if (held) page(held.textContent ?? "null");
