/** The model card: what is loaded, what it takes, what was chosen for it and why, and how to call it. */

import { troubleNotice } from "../chat/trouble.js";
import { copyButton } from "../copying.js";
import { facts, h } from "../dom.js";
import { bytes, count, DASH, figure, large } from "../format.js";
import { getJSON } from "../server.js";

export function makeView() {
  const body = h("div", {});
  const element = h("section", { class: "inside", "aria-label": "Model" }, body);
  async function load() {
    try {
      body.replaceChildren(...card(await getJSON("/cairn/model")));
    } catch (error) {
      body.replaceChildren(troubleNotice(error, load));
    }
  }
  return { element, show: load, hide: () => {} };
}

function card(model) {
  const others = model.names.filter((name) => name !== model.name);
  return [
    h("div", { class: "head" }, h("h1", {}, model.name),
      h("p", { class: "soft" }, [model.family, model.dtype, model.device && `on ${model.device}`].filter(Boolean).join(", "),
        others.length ? ` · also called ${others.join(", ")}` : "")),
    h("dl", { class: "figures four" }, headline(model).map(([name, value, below]) =>
      h("div", { class: "figure" }, h("dt", {}, name), h("dd", { class: "number" }, value), h("dd", { class: "below" }, below)))),
    h("div", { class: "cards" },
      h("section", { class: "card" }, h("h2", {}, "Shape"), facts(shape(model))),
      h("section", { class: "card" }, h("h2", {}, "Memory"), facts(memory(model))),
      h("section", { class: "card" }, h("h2", {}, "This machine"), facts(machine(model))),
      h("section", { class: "card" }, h("h2", {}, "Chosen, and why"),
        model.notes.length
          ? h("ul", { class: "notes" }, model.notes.map((note) => h("li", {}, note)))
          : h("p", { class: "soft" }, "Nothing out of the ordinary.")),
      callIt(model)),
  ];
}

const headline = (model) => [
  ["Parameters", large(model.parameters), "weights"],
  ["Context", large(model.context), "tokens of prompt and answer"],
  ["Room for", large((model.pages * model.page_size) / model.cache_groups), "tokens of all requests together"],
  ["Weights", bytes(model.weights_bytes), "in memory"],
];

const shape = (model) => [
  ["Family", model.family ?? DASH], ["Layers", count(model.layers)], ["Hidden size", count(model.hidden)],
  ["Attention heads", count(model.heads)], ["KV heads", count(model.kv_heads)], ["Vocabulary", count(model.vocabulary)],
];

const memory = (model) => [
  ["Weights", bytes(model.weights_bytes)],
  ["KV per token", bytes(model.kv_bytes_per_token)],
  ["Pages", `${count(model.pages)} of ${count(model.page_size)} tokens`],
  ["KV cache", model.cache_bytes ? bytes(model.cache_bytes) : DASH],
];

const machine = ({ device, ceilings, version }) => [
  ["Device", device ?? DASH],
  ["Memory", ceilings.memory_gbps ? `${figure(ceilings.memory_gbps)} GB/s` : DASH],
  ["Arithmetic", ceilings.tflops ? `${figure(ceilings.tflops)} TFLOP/s` : DASH],
  ["Ceilings", ceilings.measured ? "measured on this machine" : "estimated; cairn calibrate measures them"],
  ["Cairn", version],
];

function callIt({ name }) {
  const body = JSON.stringify({ model: name, messages: [{ role: "user", content: "Hello!" }] });
  const quoted = body.replaceAll("'", "'\\''");
  const command = [
    `curl ${location.origin}/v1/chat/completions`, "-H 'content-type: application/json'", `-d '${quoted}'`,
  ].join(" \\\n  ");
  return h("section", { class: "card wide" }, h("h2", {}, "Call it"),
    h("p", { class: "hint" }, "OpenAI's and Anthropic's clients work as they are, with the base URL ",
      h("code", {}, `${location.origin}/v1`), " and ", h("code", {}, location.origin), "."),
    h("figure", { class: "code" },
      h("figcaption", {}, h("span", {}, "shell"), copyButton("Copy this command", () => command)),
      h("pre", { tabindex: "0" }, h("code", {}, command))));
}
