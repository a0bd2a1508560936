// Three ways to ask Python: HTTP, a notebook's widget, a saved page. One interface: `request`.
import { searchWords } from "./export/search";
import type { Answer, Op, Protocol, WordTuple } from "./protocol";

export interface Reply {
  header: Record<string, unknown>;
  buffers: ArrayBuffer[];
}

export interface Transport {
  readonly kind: "http" | "widget" | "recorded" | "fake";
  request(op: string, params: object, signal?: AbortSignal): Promise<Reply>;
  /** The source of this client, for saved pages; left out where it cannot be had. */
  source?(): Promise<string>;
}

/** An answer of Python that says in one sentence what is wrong. */
export class RequestError extends Error {}

/** Asks, and raises `RequestError` where the reply is one. */
export async function ask<O extends Op>(
  transport: Transport, op: O, params: Protocol[O]["params"], signal?: AbortSignal,
): Promise<Answer<O>> {
  const { header, buffers } = await transport.request(op, params, signal);
  if (typeof header["error"] === "string") throw new RequestError(header["error"]);
  const data = buffers.length ? new Float32Array(buffers[0]) : new Float32Array(0);
  return { ...header, data } as Answer<O>;
}

const padded = (size: number): number => Math.ceil(size / 8) * 8;

/** Reads a framed reply: uint32 length, header, zeros up to a multiple of 8 bytes, then buffers, each padded to 8. */
export function decodeFrame(bytes: ArrayBuffer): Reply {
  const check = (end: number): void => {
    if (end > bytes.byteLength) throw new RequestError("The reply is cut short.");
  };
  check(4);
  const length = new DataView(bytes).getUint32(0, true);
  check(4 + length);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length))) as Record<string, unknown>;
  const buffers: ArrayBuffer[] = [];
  let at = padded(4 + length);
  for (const size of (header["buffers"] as number[] | undefined) ?? []) {
    check(at + size);
    buffers.push(bytes.slice(at, at + size));
    at += padded(size);
  }
  return { header, buffers };
}

/** The inverse of `decodeFrame`: for saved pages and tests. */
export function encodeFrame({ header, buffers }: Reply): ArrayBuffer {
  const text = new TextEncoder().encode(JSON.stringify({ ...header, buffers: buffers.map((b) => b.byteLength) }));
  const start = padded(4 + text.length);
  const out = new Uint8Array(start + buffers.reduce((sum, b) => sum + padded(b.byteLength), 0));
  new DataView(out.buffer).setUint32(0, text.length, true);
  out.set(text, 4);
  let at = start;
  for (const buffer of buffers) {
    out.set(new Uint8Array(buffer), at);
    at += padded(buffer.byteLength);
  }
  return out.buffer;
}

/** Asks the server that gave the page. */
export function httpTransport(token: string, base = ""): Transport {
  return {
    kind: "http",
    source: async () => (await fetch(import.meta.url)).text(),
    async request(op, params, signal) {
      const response = await fetch(`${base}/api/${op}`, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Saccade-Token": token },
        body: JSON.stringify(params),
        ...(signal ? { signal } : {}),
      }).catch((error: unknown) => {
        if (signal?.aborted) throw error;
        throw new RequestError("Saccade does not answer; is `saccade view` still running?");
      });
      if (response.headers.get("Content-Type")?.startsWith("application/octet-stream"))
        return decodeFrame(await response.arrayBuffer());
      throw new RequestError(`Saccade refused the request (status ${response.status}).`);
    },
  };
}

/** What the client uses of an anywidget model. */
export interface WidgetModel {
  get?(name: string): unknown;
  send(content: unknown): void;
  on(event: string, listener: (message: unknown, buffers?: ArrayLike<ArrayBufferView | ArrayBuffer>) => void): void;
  off?(event: string, listener: unknown): void;
}

function toBuffer(part: ArrayBufferView | ArrayBuffer): ArrayBuffer {
  if (part instanceof ArrayBuffer) return part;
  return new Uint8Array(part.buffer, part.byteOffset, part.byteLength).slice().buffer;
}

/** Asks the kernel of a notebook by the messages of its widget. Two views of one model share the messages. */
export function widgetTransport(model: WidgetModel): Transport {
  const own = Math.random().toString(36).slice(2), event = "msg:custom";
  let count = 0;
  return {
    kind: "widget",
    source: async () => String(model.get?.("_esm") ?? ""),
    request(op, params, signal) {
      const id = `${own}-${count++}`;
      return new Promise((resolve, reject) => {
        const end = (): void => {
          model.off?.(event, listen);
          signal?.removeEventListener("abort", drop);
        };
        const listen = (message: unknown, buffers?: ArrayLike<ArrayBufferView | ArrayBuffer>): void => {
          const { kind, id: of, header } = message as { kind: string; id: string; header: Record<string, unknown> };
          if (kind !== "reply" || of !== id) return;
          end();
          resolve({ header, buffers: Array.from(buffers ?? [], toBuffer) });
        };
        const drop = (): void => {
          end();
          model.send({ kind: "cancel", id });
          reject(new DOMException("The request was dropped.", "AbortError"));
        };
        model.on(event, listen);
        signal?.addEventListener("abort", drop);
        model.send({ kind: "request", id, op, params });
      });
    },
  };
}

const sorted = (value: unknown): unknown =>
  Array.isArray(value) ? value.map(sorted)
  : value && typeof value === "object"
    ? Object.fromEntries(Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1)).map(([k, v]) => [k, sorted(v)]))
    : value;

/** The name of a request in the table of a saved page. */
export const recordedKey = (op: string, params: object): string => `${op} ${JSON.stringify(sorted(params))}`;

/** Answers from the table of a saved page: request to framed reply in base64. */
export function recordedTransport(table: Record<string, string>): Transport {
  return {
    kind: "recorded",
    async request(op, params) {
      const read = (key: string): Reply => decodeFrame(Uint8Array.from(atob(table[key]), (c) => c.charCodeAt(0)).buffer);
      if (op === "search") {
        const { run, side, query, limit } = params as Protocol["search"]["params"];
        const pages = Object.keys(table).filter((key) => {
          const of = key.startsWith("words ") && JSON.parse(key.slice(6));
          return of && of.run === run && of.side === side;
        });
        return { header: { ...searchWords(pages.map((key) => read(key).header["words"] as WordTuple[]), query, limit) },
          buffers: [] };
      }
      const key = recordedKey(op, params);
      if (!Object.hasOwn(table, key)) throw new RequestError("This is not part of this saved page.");
      return read(key);
    },
  };
}
