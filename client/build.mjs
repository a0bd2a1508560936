// Builds the client for the package, or to `--out FILE`; with `--dev` build/dev.html, with `--test` build/test.mjs.
import { build, transform } from "esbuild";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const option = process.argv.indexOf("--out");
const out = option > 0 ? process.argv[option + 1] : join(here, "../src/saccade/viewer/client.js");

const css = {
  name: "css as text",
  setup({ onLoad }) {
    onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(await readFile(path, "utf8"), { loader: "css", minify: true });
      return { contents: code.trim(), loader: "text" };
    });
  },
};

const common = { bundle: true, format: "esm", target: "es2022", charset: "utf8", plugins: [css], absWorkingDir: here };

async function page() {
  const { outputFiles } = await build({ ...common, entryPoints: ["src/dev.ts"], write: false, minify: true });
  const html = await readFile(join(here, "dev.html"), "utf8");
  const script = outputFiles[0].text.replaceAll("</script", "<\\/script");
  await mkdir(join(here, "build"), { recursive: true });
  await writeFile(join(here, "build/dev.html"), html.replace("/* client */", () => script));
}

if (process.argv.includes("--dev")) await page();
else if (process.argv.includes("--test"))
  await build({ ...common, entryPoints: ["src/testing.ts"], outfile: join(here, "build/test.mjs") });
else {
  const packaged = {
    ...common,
    minify: true,
    legalComments: "none",
    banner: { js: "/* Saccade's viewer, Apache-2.0. Built from client/ by `npm run build`; do not edit. */" },
  };
  await build({ ...packaged, entryPoints: ["src/main.ts"], outfile: out });
  const page = join(here, "../src/saccade/viewer/steps/step.js");
  if (option < 0) await build({ ...packaged, format: "iife", entryPoints: ["src/step/page.ts"], outfile: page });
}
