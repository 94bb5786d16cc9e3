/**
 * The server, from the page's side: one way to ask, one kind of error, one reader of streams.
 *
 *     ask(path, {body}) -> Response        401: asks for a key, and tries again
 *                       -> Trouble         key | busy | away | refused | broken | lost
 *     for await (const text of events(response)) ...
 *
 * Knows no endpoint. The key lives as long as the tab (sessionStorage), and goes nowhere else.
 */

const KEY = "cairn.key";
let askForKey = async () => null; // how a person is asked; access.js says

export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** What went wrong, in words for the person at the screen. */
export class Trouble extends Error {
  constructor(kind, message, details = {}) {
    super(message);
    this.kind = kind;
    Object.assign(this, { status: null, retryAfter: null, code: null, param: null }, details);
  }
}

const KINDS = { 401: "key", 403: "key", 408: "lost", 429: "busy", 503: "away" };

async function troubleOf(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // a proxy's own page, or nothing at all
  }
  const kind = KINDS[response.status] ?? (response.status >= 500 ? "broken" : "refused");
  const wait = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  return new Trouble(kind, said.message ?? `the server answered ${response.status} ${response.statusText}`, {
    status: response.status,
    retryAfter: Number.isFinite(wait) ? wait : null,
    code: said.code ?? null,
    param: said.param ?? null,
  });
}

async function once(path, { body, signal }) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(path, {
      method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("lost", "the server cannot be reached");
  }
}

/** A response that is fine, or Trouble. `quiet` never opens the question for a key. */
export async function ask(path, { body, signal, quiet = false } = {}) {
  let response = await once(path, { body, signal });
  while (response.status === 401) {
    const trouble = await troubleOf(response);
    const key = quiet ? null : await askForKey(trouble.message);
    if (!key) throw trouble;
    sessionStorage.setItem(KEY, key);
    response = await once(path, { body, signal });
    if (response.status !== 401) window.dispatchEvent(new Event("cairn:key")); // others may try again, too
  }
  if (!response.ok) throw await troubleOf(response);
  return response;
}

export async function getJSON(path, options) {
  return (await ask(path, options)).json();
}

/** The data of each server-sent event. A stream that breaks is Trouble; one that is aborted just ends. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const lines = new EventLines();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* lines.push(value);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Trouble) throw error;
    throw new Trouble("lost", "the connection was lost before the end");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Cuts a stream of text, in whatever pieces it comes, into events. */
export class EventLines {
  #rest = "";
  #data = [];

  push(text) {
    const found = [];
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line === "" && this.#data.length) found.push(this.#data.splice(0).join("\n"));
    }
    return found;
  }
}
