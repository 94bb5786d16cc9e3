/**
 * One answer on its way: asks, reads the stream into a node of the conversation, measures, ends.
 *
 *     running -> done | stopped (by the person) | failed (with the reason; what came so far stays)
 *
 * Knows no element; `onNews` is called for every change. Speed is measured here, as the reader sees it, and replaced by
 * the server's own ledger at the end, where it has one.
 */

import { ask, events, getJSON, Trouble } from "../server.js";
import { messagesBefore, path } from "./conversation.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Talk {
  #stop = new AbortController();

  constructor(conversation, node, mode, onNews) {
    Object.assign(this, { conversation, node, mode, onNews });
    Object.assign(node, { status: "running", content: "", reasoning: "", error: null, finish: null, stats: null });
  }

  stop() {
    this.#stop.abort();
  }

  async run() {
    const { node } = this;
    try {
      await this.#read();
      node.status = "done";
    } catch (error) {
      const stopped = this.#stop.signal.aborted;
      node.status = stopped ? "stopped" : "failed";
      if (!stopped) node.error = asData(error);
    }
    this.onNews();
    await this.#ledger();
    this.onNews();
  }

  async #read() {
    const { node } = this;
    const began = performance.now();
    const response = await ask(...this.#request());
    node.stats = { request: response.headers.get("x-request-id"), ttft: null, tokens: 0, rate: null };
    let first = null;
    let ended = false;
    for await (const text of events(response)) {
      if (text === "[DONE]") {
        ended = true; // and read on: a connection that ends by itself is used again
        continue;
      }
      const chunk = JSON.parse(text);
      if (chunk.error) throw new Trouble("broken", chunk.error.message, { code: chunk.error.code });
      const news = this.#take(chunk);
      if (news && first === null) {
        first = performance.now();
        node.stats.ttft = (first - began) / 1000;
      }
      this.#measure(chunk.usage, first);
      this.onNews();
    }
    if (!ended) throw new Trouble("lost", "the connection was lost before the end");
  }

  #request() {
    const { conversation, node, mode } = this;
    const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    for (const name of NUMBERS) {
      const value = conversation.parameters[name];
      if (value !== undefined && value !== null && value !== "") body[name] = value;
    }
    const signal = this.#stop.signal;
    if (mode === "text") {
      body.prompt = path(conversation, node.parent).map(({ content }) => content).join("");
      body.max_tokens ??= 256; // completions stop after 16 otherwise, as OpenAI's do
      return ["/v1/completions", { body, signal }];
    }
    body.messages = messagesBefore(conversation, node);
    return ["/v1/chat/completions", { body, signal }];
  }

  /** True where it brought something to read. */
  #take(chunk) {
    const { node } = this;
    const choice = chunk.choices?.[0];
    if (!choice) return false;
    const { content = choice.text, reasoning_content: thought } = choice.delta ?? {};
    if (thought) node.reasoning += thought;
    if (content) node.content += content;
    if (choice.finish_reason) node.finish = choice.finish_reason;
    return Boolean(content || thought);
  }

  #measure(usage, first) {
    if (!usage) return;
    const { stats } = this.node;
    stats.tokens = usage.completion_tokens;
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const since = first === null ? 0 : (performance.now() - first) / 1000;
    stats.rate = stats.tokens > 1 && since > 0 ? (stats.tokens - 1) / since : null;
  }

  /** What the server itself measured; a server that keeps no ledger changes nothing. */
  async #ledger() {
    const { stats } = this.node;
    if (!stats?.request) return;
    try {
      const view = await getJSON(`/cairn/requests/${encodeURIComponent(stats.request)}`, { quiet: true });
      stats.tokens = view.output_tokens || stats.tokens;
      stats.ttft = view.ttft_s ?? stats.ttft;
      stats.rate = view.tpot_s ? 1 / view.tpot_s : stats.rate;
      stats.ledger = true;
    } catch {
      // the page's own figures stay
    }
  }
}

/** An error that can be stored with the conversation. */
function asData(error) {
  if (!(error instanceof Trouble)) return { kind: "broken", message: `this page failed: ${error.message}` };
  const { kind, message, status, retryAfter, code, param } = error;
  return { kind, message, status, retryAfter, code, param };
}
