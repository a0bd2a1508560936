// The panels, in the order of their tabs.
import type { Panel } from "../context";
import { addStyle } from "../styles";
import { facts } from "./facts";
import { heads } from "./heads";
import { help } from "./help";
import { overview } from "./overview";
import css from "./panels.css";
import { save } from "./save";
import { statistics } from "./statistics";
import { steps } from "./steps";
import { text } from "./text";

addStyle(css);

export const panels: readonly Panel[] = [overview, text, statistics, facts, steps, heads, save, help];
