/**
 * The engine's pulse: one stream for the whole page, while somebody looks at it.
 *
 *     connecting -> live -> (the tab is hidden: paused) -> live
 *                      `-> lost, and again after 1, 2, 4 ... 15 s
 *
 * Keeps two minutes of rates for the charts. A hidden tab holds no connection, because browsers open only six.
 */

import { ask, events, Trouble } from "./server.js";

const KEEP = 240; // samples
const LONGEST_WAIT_S = 15;

export class Feed {
  state = "connecting"; // live, paused, lost, locked (no key), absent (this server shows nothing of itself)
  latest = null;
  history = [];
  #listeners = new Set();
  #stop = null;

  constructor() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#pause() : this.#run()));
    window.addEventListener("cairn:key", () => this.retry());
  }

  /** Calls back at once, and at each news; returns how to leave. */
  subscribe(listener) {
    this.#listeners.add(listener);
    listener(this);
    if (!document.hidden) this.#run();
    return () => this.#listeners.delete(listener);
  }

  /** After a key was given, or a person wants it now. */
  retry() {
    this.#pause();
    this.#run();
  }

  #say(state) {
    this.state = state;
    for (const listener of this.#listeners) listener(this);
  }

  #pause() {
    this.#stop?.abort();
    this.#stop = null;
    if (this.state === "live") this.#say("paused");
  }

  async #run() {
    if (this.#stop) return;
    const stop = (this.#stop = new AbortController());
    for (let wait = 1; !stop.signal.aborted; wait = Math.min(wait * 2, LONGEST_WAIT_S)) {
      try {
        const response = await ask("/cairn/engine/events", { signal: stop.signal, quiet: true });
        for await (const text of events(response)) {
          if (stop.signal.aborted) return;
          this.#take(JSON.parse(text));
          wait = 1;
        }
      } catch (error) {
        if (error.name === "AbortError" || stop.signal.aborted) return;
        if (!(error instanceof Trouble)) throw error;
        if (error.kind === "key" || error.status === 404) {
          this.#stop = null;
          return this.#say(error.kind === "key" ? "locked" : "absent");
        }
      }
      this.#say("lost");
      await new Promise((over) => setTimeout(over, wait * 1000));
    }
  }

  #take(view) {
    this.latest = view;
    this.history.push({
      time: view.time, output: view.rate.output_tokens_per_s, prompt: view.rate.prompt_tokens_per_s,
      running: view.running, waiting: view.waiting,
    });
    if (this.history.length > KEEP) this.history.shift();
    this.#say("live");
  }
}
