// The page of `saccade step --out`: the data stands in the page itself, and the step that is shown in its hash.
import { h } from "../dom";
import { mount, type StepData } from "../step";
import { addStyle, adopt } from "../styles";
import css from "./page.css";

addStyle(css);
adopt(document);

const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = (): void => void (document.documentElement.dataset.theme = dark.matches ? "dark" : "light");
dark.addEventListener("change", paint);
paint();

const held = document.getElementById("data");
const data = JSON.parse(held?.textContent ?? "null") as StepData;
const main = document.body.appendChild(h("main", {}, h("p", { class: "brand" }, "Saccade")));
mount(main, data, {
  keys: document,
  first: decodeURIComponent(location.hash.slice(1)),
  onstep: (id) => history.replaceState(null, "", `#${encodeURIComponent(id)}`),
});
