// The style sheets of all parts, inside the client's shadow root: nothing of a notebook reaches them, nor they it.

const texts = new Set<string>();

/** Adds a sheet; called by a part when its file is loaded. */
export function addStyle(css: string): void {
  texts.add(css);
}

/** Puts all sheets into force, after those that are. Constructed sheets need no permission of a Content-Security-Policy. */
export function adopt(root: DocumentOrShadowRoot): void {
  root.adoptedStyleSheets = [...root.adoptedStyleSheets, ...[...texts].map((css) => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(css);
    return sheet;
  })];
}

/** All sheets as one text: for saved pages. */
export const allStyles = (): string => [...texts].join("\n");
