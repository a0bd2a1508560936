// The pure logic, bundled for node's tests.
export { sizeOf } from "./layout";
export * from "./map/labels";
export * from "./map/lru";
export { runsOf } from "./map/marks";
export * from "./map/scale";
export * from "./map/tiles";
export * from "./map/viewport";
export * from "./store";
export * from "./transport";
export * from "./words";
export { fakeTransport } from "./fake";
export * from "./panels/testing";
