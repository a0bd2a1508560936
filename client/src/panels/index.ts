// The panels, in the order of their tabs.
import type { Panel } from "../context";

export const panels: readonly Panel[] = [];
