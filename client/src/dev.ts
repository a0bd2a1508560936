// The development page: the viewer on synthetic numbers, without Python.
import { fakeTransport } from "./fake";
import { mount } from "./main";

const delay = Number(new URLSearchParams(location.search).get("delay") ?? 20);
const source = async (): Promise<string> => document.getElementById("saccade-client")!.textContent!;
void mount(document.getElementById("saccade")!, { ...fakeTransport(delay), source }, { hash: true });
