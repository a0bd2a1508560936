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

// 2 kB less: fields that are written most stand in the file once, and `x.name` is `x[_n]`. None is a class of a style.
const most = ("call push keys join style aborted imageSmoothingEnabled removeEventListener causal request observe named ctrlKey tabIndex includes header fillText fillRect getElementById catch textContent replaceChildren setAttribute getAttribute querySelectorAll querySelector preventDefault "
  + "getBoundingClientRect clientHeight clientWidth addEventListener createElement appendChild disconnect toPrecision "
  + "parentElement getContext classList scrollTop fillStyle strokeStyle flatMap dataset lineWidth pointerId filter "
  + "replace value height width sampled delete indexOf slice append level tokens "
  + "length toExponential toLowerCase contains remove strokeRect activeElement first calls placed forEach byteLength toFixed globalAlpha setProperty getPropertyValue").split(" ");
const styled = new RegExp(`\\.(${most.join("|")})\\b`);

const css = {
  name: "css as text",
  setup({ onLoad }) {
    onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(await readFile(path, "utf8"), { loader: "css", minify: true });
      if (!path.includes("step") && styled.test(code)) throw new Error(`build.mjs: ${styled.exec(code)[0]} stands in ${path}`);
      const contents = code.trim().replace(/(--[\w-]+): /g, "$1:").replace(/var\(--([\w-]+)\)/g, "$$$1"); // 0.4 kB less
      return { contents, loader: "text" };
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

// 2 kB less: fields of the client's own objects become one or two letters. None may be a field of the protocol, of the
// browser, or of anything that is called by its name.
const own = ("about across announce between canvas caption choose colourAt columns complain context directions element "
  + "fail falling filled gaveUp ground hatch hint keyNames keyWords label loadAll manifest margin mount need ofWord palette pane panes picture pixels place placeOf "
  + "pressed refresh retry reveal rowNames rowWords sorted special square store subscribe subtitle subtracted subtractedName takesWheel ticks "
  + "told transport view wordsOf").split(" ");
const protocol = await readFile(join(here, "src/protocol.ts"), "utf8");
const taken = own.filter((name) => new RegExp(`\\b${name}\\??:`).test(protocol));
if (taken.length) throw new Error(`build.mjs: ${taken} are fields of the protocol`);
// Classes of the page stand in the file once.
const globals = ["document", "Promise", "AbortController", "Uint8Array", "Uint32Array", "Float32Array", "HTMLElement"];
const small = {
  ...common, minify: true, mangleProps: new RegExp(`^(${own.join("|")})$`),
  define: { ...common.define, ...Object.fromEntries(globals.map((name) => [name, `$${name}`])) },
};

async function packed(path) {
  let text = await readFile(path, "utf8");
  const head = text.indexOf("\n") + 1;
  const tokens = new Set(text.match(/[\w$]+/g));
  const letters = [..."abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"];
  const free = [...letters.map((c) => `_${c}`), ...letters.map((c) => `$${c}`)].filter((n) => !tokens.has(n));
  const named = most.map((name, i) => [name, free[i]]);
  for (const [name, short] of named)
    text = text.replace(new RegExp(`(\\?)?\\.${name}\\b`, "g"), (_, may) => `${may ? "?." : ""}[${short}]`);
  const names = named.map(([name, short]) => `${short}="${name}"`);
  await writeFile(path, `${text.slice(0, head)}const ${names};${text.slice(head)}`);
}

async function page() {
  const script = async (entry, options) => {
    const { outputFiles } = await build({ ...options, entryPoints: [entry], write: false });
    return outputFiles[0].text.replaceAll("</script", "<\\/script");
  };
  const [client, dev] = await Promise.all([script("src/main.ts", small), script("src/dev.ts", common)]);
  const html = await readFile(join(here, "dev.html"), "utf8");
  await mkdir(join(here, "build"), { recursive: true });
  await writeFile(join(here, "build/dev.html"), html.replace("/* client */", () => client).replace("/* dev */", () => dev));
}

// What tells without esbuild whether the committed files are of these sources: tests/viewer/test_client.py.
async function writeDigest(built) {
  const sources = (await readdir(join(here, "src"), { recursive: true, withFileTypes: true }))
    .filter((entry) => entry.isFile()).map((entry) => relative(here, join(entry.parentPath, entry.name)));
  const paths = [...sources, "build.mjs", "short.mjs", ...built].map((path) => path.split(sep).join("/")).sort();
  const digest = createHash("sha256");
  for (const path of paths) digest.update(`${path}\0`).update(await readFile(join(here, path))).update("\0");
  await writeFile(join(here, "built.sha256"), `${digest.digest("hex")}\n`);
}

if (process.argv.includes("--dev")) await page();
else if (process.argv.includes("--test"))
  await build({ ...common, entryPoints: ["src/testing.ts"], outfile: join(here, "build/test.mjs") });
else {
  const packaged = {
    legalComments: "none",
    banner: { js: "/* Saccade's viewer, Apache-2.0. built from client/ */" },
  };
  const { mangleCache } = await build({ ...small, ...packaged, mangleCache: {}, entryPoints: ["src/main.ts"], outfile: out });
  await packed(out);
  const heads = join(dirname(out), "heads.js");
  // The client hands it objects of its own, whose fields have short names.
  await build({ ...small, ...packaged, mangleCache, entryPoints: ["src/heads/index.ts"], outfile: heads });
  if (option < 0) {
    const [step, dev] = ["../src/saccade/see/viewer/steps/step.js", "dev.js"];
    await build({ ...common, minify: true, ...packaged, entryPoints: ["src/step/page.ts"], outfile: join(here, step) });
    await build({ ...common, minify: true, ...packaged, entryPoints: ["src/dev.ts"], outfile: join(here, dev) });
    await writeDigest(["../src/saccade/see/viewer/client.js", "../src/saccade/see/viewer/heads.js", step, dev]);
  }
}
