/**
 * Where the time of one request went.
 *
 *     queue     |==|
 *     prefill      |====|              a full bar: from when to when
 *     decode            |==========|   the dark part: what this machine needs at least
 *     stream    |/|                    a hatched bar: a sum of many short pieces
 *
 * `strip` is the same on one line, for a list.
 */

import { h, setStyle } from "../dom.js";
import { seconds } from "../format.js";

export const PARTS = {
  tokenize: "Tokenize", media: "Media", queue: "Queue", schedule: "Schedule", kv_allocation: "KV allocation", prefill: "Prefill",
  decode: "Decode", detokenize: "Detokenize", stream: "Stream", respond: "Respond",
};
const NOTE = "≥ and the dark part of a bar: what this machine needs at least. Hatched: many short pieces, added up.";

/** The end of the last part, at least the whole request's own time. */
export function lengthOf(request) {
  return Math.max(request.e2e_s ?? 0, ...request.spans.map(({ start_s: start, seconds }) => start + seconds), 1e-6);
}

export function waterfall(request) {
  const whole = lengthOf(request);
  const floors = { prefill: request.floor?.prefill_s, decode: request.floor?.decode_s };
  const order = Object.keys(PARTS);
  const spans = [...request.spans].sort((a, b) => a.start_s - b.start_s || order.indexOf(a.name) - order.indexOf(b.name));
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => h("i", {}, seconds(whole * part)));
  return h("div", { class: "waterfall", role: "table", "aria-label": "Where the time went" },
    spans.map((span) => row(span, whole, floors[span.name])),
    h("div", { class: "ruler", "aria-hidden": "true" }, h("span"), h("span", { class: "ticks" }, ticks), h("span")),
    h("p", { class: "hint" }, NOTE));
}

function row({ name, start_s: start, seconds: took, summed }, whole, floor) {
  const bar = h("i", { class: `bar ${name}${summed ? " summed" : ""}`, title: summed ? "in many short pieces" : null });
  setStyle(bar, { "--from": `${(100 * start) / whole}%`, "--size": `${(100 * took) / whole}%` });
  if (floor && took > 0) {
    const least = h("b", { title: `at least ${seconds(floor)} on this machine` });
    setStyle(least, { "--size": `${Math.min(100, (100 * floor) / took)}%` });
    bar.append(least);
  }
  return h("div", { class: "fall", role: "row", "data-span": name },
    h("span", { role: "rowheader" }, PARTS[name] ?? name),
    h("span", { class: "track", role: "cell" }, bar),
    h("span", { class: "number", role: "cell" }, seconds(took), floor ? h("small", {}, ` ≥ ${seconds(floor)}`) : null));
}

/** All of it on one line; `longest` is the length that fills the line. */
export function strip(request, longest) {
  const bars = request.spans.filter(({ summed }) => !summed).map(({ name, start_s: start, seconds: took }) => {
    const bar = h("i", { class: `bar ${name}` });
    setStyle(bar, { "--from": `${(100 * start) / longest}%`, "--size": `${(100 * took) / longest}%` });
    return bar;
  });
  return h("span", { class: "track", "aria-hidden": "true" }, bars);
}
