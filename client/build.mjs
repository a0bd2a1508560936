// Builds the client for the package and dev.js, or the client to `--out FILE`; with `--dev` build/dev.html, with `--test`
// build/test.mjs.
import { build, transform } from "esbuild";
import { createHash } from "node:crypto";
import { mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const option = process.argv.indexOf("--out");
const out = option > 0 ? process.argv[option + 1] : join(here, "../src/saccade/see/viewer/client.js");

const css = {
  name: "css as text",
  setup({ onLoad }) {
    onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(await readFile(path, "utf8"), { loader: "css", minify: true });
      return { contents: code.trim(), loader: "text" };
    });
  },
};

const common = {
  bundle: true, format: "esm", target: "es2022", charset: "utf8", minify: true, plugins: [css], absWorkingDir: here,
};

async function page() {
  const script = async (entry) => {
    const { outputFiles } = await build({ ...common, entryPoints: [entry], write: false });
    return outputFiles[0].text.replaceAll("</script", "<\\/script");
  };
  const [client, dev] = await Promise.all([script("src/main.ts"), script("src/dev.ts")]);
  const html = await readFile(join(here, "dev.html"), "utf8");
  await mkdir(join(here, "build"), { recursive: true });
  await writeFile(join(here, "build/dev.html"), html.replace("/* client */", () => client).replace("/* dev */", () => dev));
}

// What tells without esbuild whether the committed files are of these sources: tests/viewer/test_client.py.
async function writeDigest(built) {
  const sources = (await readdir(join(here, "src"), { recursive: true, withFileTypes: true }))
    .filter((entry) => entry.isFile()).map((entry) => relative(here, join(entry.parentPath, entry.name)));
  const paths = [...sources, "build.mjs", ...built].map((path) => path.split(sep).join("/")).sort();
  const digest = createHash("sha256");
  for (const path of paths) digest.update(`${path}\0`).update(await readFile(join(here, path))).update("\0");
  await writeFile(join(here, "built.sha256"), `${digest.digest("hex")}\n`);
}

if (process.argv.includes("--dev")) await page();
else if (process.argv.includes("--test"))
  await build({ ...common, minify: false, entryPoints: ["src/testing.ts"], outfile: join(here, "build/test.mjs") });
else {
  const packaged = {
    ...common, legalComments: "none",
    banner: { js: "/* Saccade's viewer, Apache-2.0. built from client/ */" },
  };
  const built = [
    ["src/main.ts", out],
    ["src/heads/index.ts", join(dirname(out), "heads.js")],
    ["src/step/page.ts", join(here, "../src/saccade/see/viewer/steps/step.js")],
    ["src/dev.ts", join(here, "dev.js")],
  ].slice(0, option < 0 ? 4 : 2);
  for (const [source, outfile] of built) await build({ ...packaged, entryPoints: [source], outfile });
  if (option < 0) await writeDigest(built.map(([, outfile]) => relative(here, outfile)));
}
