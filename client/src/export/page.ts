// One HTML file that shows what was recorded: no file beside it, no connection.
import { escapeMarkup, scriptJson } from "./escape";

/** Code for a script element: nothing in it ends the element; these signs stand in strings and patterns only. */
export const scriptCode = (code: string): string => code.replace(/<(?=!--|\/script)/gi, "\\x3c");

const POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:";
const RECORDED = "saccade-recorded";

export interface Recorded {
  /** The state, as in a link. */
  hash: string;
  /** What `recordedTransport` reads. */
  table: Record<string, string>;
}

/** `client` is the source of the client's ESM file. */
export function savedPage(title: string, client: string, recorded: Recorded): string {
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="${POLICY}">
<title>${escapeMarkup(title)}</title>
<style>html, body, #saccade { height: 100%; margin: 0; }</style>
</head>
<body>
<div id="saccade"></div>
<noscript>This needs JavaScript.</noscript>
<script type="application/json" id="${RECORDED}">${scriptJson(recorded)}</script>
<script type="module">${scriptCode(client)}</script>
</body>
</html>
`;
}

/** In a saved page, takes what it recorded and shows it with `mount`; elsewhere does nothing. */
export function openSaved(mount: (element: HTMLElement, table: Record<string, string>) => unknown): void {
  const saved = document.getElementById(RECORDED), element = document.getElementById("saccade");
  if (!saved || !element) return;
  const { hash, table } = JSON.parse(saved.textContent!) as Recorded;
  saved.remove();
  if (!location.hash) location.replace("#" + hash);
  mount(element, table);
}
