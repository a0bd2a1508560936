// The development page: the viewer on synthetic numbers, without Python.
import { fakeTransport } from "./fake";
import { mount } from "./main";

const delay = Number(new URLSearchParams(location.search).get("delay") ?? 20);
void mount(document.getElementById("saccade")!, fakeTransport(delay), { hash: true });
