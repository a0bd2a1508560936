// The pure logic, bundled for node's tests.
export * from "./colours";
export * from "./protocol";
export * from "./step/numbers";
export * from "./store";
export * from "./transport";
export * from "./words";
export { fakeTransport } from "./fake";
