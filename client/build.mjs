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

// 1.5 kB less: what `short.mjs` names is written by these names, which the minifier makes one or two letters.
const short = [
  ...["max", "min", "floor", "round", "ceil", "abs", "log2", "log10"].map((name) => `Math.${name}`),
  "Number.isNaN", "JSON.stringify", "Object.entries", "Array.from", "String", "Number",
];
const common = {
  bundle: true, format: "esm", target: "es2022", charset: "utf8", plugins: [css], absWorkingDir: here,
  inject: ["short.mjs"], define: Object.fromEntries(short.map((name) => [name, `$${name.split(".").at(-1)}`])),
};

async function page() {
  const script = async (entry) => {
    const { outputFiles } = await build({ ...common, entryPoints: [entry], write: false, minify: true });
    return outputFiles[0].text.replaceAll("</script", "<\\/script");
  };
  const [client, source] = await Promise.all([script("src/dev.ts"), script("src/main.ts")]);
  const html = await readFile(join(here, "dev.html"), "utf8");
  await mkdir(join(here, "build"), { recursive: true });
  await writeFile(join(here, "build/dev.html"), html.replace("/* client */", () => client).replace("/* source */", () => source));
}

if (process.argv.includes("--dev")) await page();
else if (process.argv.includes("--test"))
  await build({ ...common, entryPoints: ["src/testing.ts"], outfile: join(here, "build/test.mjs") });
else {
  const packaged = {
    ...common,
    minify: true,
    legalComments: "none",
    banner: { js: "/* Saccade's viewer, Apache-2.0. built from client/ */" },
  };
  await build({ ...packaged, entryPoints: ["src/main.ts"], outfile: out });
  const page = join(here, "../src/saccade/viewer/steps/step.js");
  if (option < 0) await build({ ...packaged, entryPoints: ["src/step/page.ts"], outfile: page });
}
