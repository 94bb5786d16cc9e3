/** The row of figures on top of the engine view, and the bar of the newest batch. */

import { h, setStyle, setText } from "../dom.js";
import { count, figure, percent, plural, seconds } from "../format.js";

const tail = (of) => `p90 ${seconds(of.p90)} · p99 ${seconds(of.p99)}`;

const drafted = (drafts) =>
  drafts?.runs ? `tokens/s · ${figure(1 + drafts.accepted / drafts.runs)} per run of drafts` : "tokens per second";

// [label, value, the small line below, a word on what it is]
const FIGURES = [
  ["Output", (now) => `${figure(now.rate.output_tokens_per_s)}`, ({ drafts }) => drafted(drafts), "what all answers together gain"],
  ["Prompts", (now) => `${figure(now.rate.prompt_tokens_per_s)}`, () => "tokens per second", "prompt tokens computed"],
  ["Running", (now) => count(now.running), (now) => `${plural(now.open_requests, "open request")}`, "sequences in the batch"],
  ["Waiting", (now) => count(now.waiting), () => "for a place", "sequences without a place in the batch"],
  ["Preempted", (now) => count(now.preempted), () => "since the start", "sequences whose pages were taken back"],
  ["Prefix hits", ({ prefix }) => percent(prefix.hit_tokens, prefix.looked_up_tokens),
    ({ prefix }) => `${count(prefix.hit_tokens)} tokens not computed`, "prompt tokens found in the cache"],
  ["First token", (now) => seconds(now.latency.ttft_s.p50), (now) => tail(now.latency.ttft_s), "the median"],
  ["Next token", (now) => seconds(now.latency.itl_s.p50), (now) => tail(now.latency.itl_s), "the median time between tokens"],
  ["Whole answer", (now) => seconds(now.latency.e2e_s.p50), (now) => tail(now.latency.e2e_s), "the median, to the last byte"],
];
const COUNTS = 6; // the rest are times, which take more room

export function figures() {
  const made = FIGURES.map(([label, value, below, title], at) => {
    const parts = [h("dd", { class: "number" }), h("dd", { class: "below" })];
    const dress = { class: at >= COUNTS ? "figure twice" : "figure", title, "data-figure": label };
    return { element: h("div", dress, h("dt", {}, label), parts), parts, value, below };
  });
  return {
    element: h("dl", { class: "figures" }, made.map(({ element }) => element)),
    show(now) {
      for (const { parts, value, below } of made) {
        setText(parts[0], value(now));
        setText(parts[1], below(now));
      }
    },
  };
}

export function batchBar() {
  const bar = h("div", { class: "batch-bar", role: "img" }, h("i", { class: "decode" }), h("i", { class: "prefill" }));
  const words = h("p", { class: "soft" });
  const legend = h("ul", { class: "legend" },
    h("li", {}, h("i", { class: "cell decode" }), "decode"), h("li", {}, h("i", { class: "cell prefill" }), "prefill"),
    h("li", {}, h("i", { class: "cell" }), "budget left"));
  return {
    element: h("div", {}, words, bar, legend),
    show({ sequences, decode_tokens: decode, prefill_tokens: prefill, budget_tokens: budget }) {
      const part = (tokens) => Math.min(100, (100 * tokens) / budget);
      const share = (tokens) => (tokens && budget ? `max(4px, ${part(tokens)}%)` : "0%"); // one token is seen, too
      setStyle(bar, { "--decode-share": share(decode), "--prefill-share": share(prefill) });
      const said = sequences
        ? `${plural(sequences, "sequence")}: ${count(decode)} decode and ${count(prefill)} prefill tokens of ${count(budget)}`
        : `Nothing in the batch; it takes ${count(budget)} tokens`;
      setText(words, said);
      bar.setAttribute("aria-label", said);
    },
  };
}
