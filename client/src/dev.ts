// The development page: the built client, whose source stands in the page, on synthetic numbers, without Python.
import { fakeTransport } from "./fake";

const delay = Number(new URLSearchParams(location.search).get("delay") ?? 20);
const code = document.getElementById("saccade-client")!.textContent!;
const client = (await import(`data:text/javascript,${encodeURIComponent(code)}`)) as typeof import("./main");
const source = async (): Promise<string> => code;
void client.mount(document.getElementById("saccade")!, { ...fakeTransport(delay), source }, { hash: true });
