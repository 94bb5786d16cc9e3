/** One request in the list: a line that opens into its waterfall, its figures, its reason and its trace. */

import { copyButton } from "../copying.js";
import { facts, h, icon } from "../dom.js";
import { clock, count, DASH, figure, percent, plural, seconds } from "../format.js";
import { ask } from "../server.js";
import { lengthOf, strip, waterfall } from "./waterfall.js";

/** `onToggle(id, open)` is told when it is opened or closed. */
export function requestRow(id, onToggle) {
  const line = h("button", { type: "button", class: "line", "aria-expanded": "false" });
  const details = h("div", { class: "details", hidden: true, id: `request-${id}` });
  const element = h("li", { class: "request", "data-id": id }, line, details);
  line.setAttribute("aria-controls", details.id);
  let shown = ""; // the last view, as text: an equal one changes nothing
  let request = null;

  function setOpen(open) {
    line.setAttribute("aria-expanded", String(open));
    details.hidden = !open;
    if (open) details.replaceChildren(...inside(request));
  }
  line.addEventListener("click", () => {
    const open = details.hidden;
    setOpen(open);
    onToggle(id, open);
  });

  function update(view, longest) {
    const text = JSON.stringify([view, longest]);
    if (text === shown) return;
    [shown, request] = [text, view];
    element.dataset.status = view.status;
    line.replaceChildren(...outside(view, longest));
    if (!details.hidden) details.replaceChildren(...inside(view));
  }
  return { element, update, setOpen, id };
}

function outside(view, longest) {
  return [
    h("span", { class: "when" }, clock(view.began), h("small", {}, view.endpoint.replace(/^\/v1\//, ""))),
    strip(view, longest),
    h("span", { class: "took number" }, view.e2e_s == null ? `${seconds(lengthOf(view))}…` : seconds(view.e2e_s)),
    h("span", { class: "tokens number" },
      `${count(view.prompt_tokens)} → ${count(view.output_tokens)}`, h("small", {}, "tokens")),
    h("span", { class: "chips" }, chip(view.status), view.reason && chip(view.reason, "reason")),
  ];
}

const chip = (text, kind = "status") => h("span", { class: `chip ${kind}`, "data-is": text }, text);

function inside(view) {
  const rows = [
    ["First token", seconds(view.ttft_s)],
    ["Per token", view.tpot_s ? `${seconds(view.tpot_s)} (${figure(1 / view.tpot_s)} tok/s)` : DASH],
    ["Whole", seconds(view.e2e_s)],
    ["Prompt", plural(view.prompt_tokens, "token")],
    ["Found in the cache", percent(view.cached_tokens, view.prompt_tokens)],
    view.host_tokens ? ["From host memory", plural(view.host_tokens, "token")] : null,
    view.disk_tokens ? ["From the disk", plural(view.disk_tokens, "token")] : null,
    view.cache_miss ? ["Not found", view.cache_miss] : null,
    ["Output", plural(view.output_tokens, "token")],
    ["Preempted", view.preemptions ? plural(view.preemptions, "time") : "never"],
    view.drafted_tokens ? ["Drafts that held", `${count(view.accepted_tokens)} of ${count(view.drafted_tokens)}`] : null,
    view.steps ? ["Steps", count(view.steps)] : null,
    view.key ? ["Key", view.key] : null,
    view.device_s ? ["Device, its share", seconds(view.device_s)] : null,
    view.joules ? ["Energy, its share", `${figure(view.joules)} J`] : null,
    view.answers > 1 ? ["Answers at once", count(view.answers)] : null,
  ];
  return [
    view.text_of_reason && h("p", { class: "why" }, view.text_of_reason),
    view.cache_miss && view.cache_miss !== "hit" && h("p", { class: "miss" }, `Prefix cache: ${view.text_of_miss}.`),
    waterfall(view),
    facts(rows),
    h("div", { class: "foot" },
      h("code", { class: "id" }, view.id), copyButton("Copy the id", () => view.id),
      traceButton("Trace", `/cairn/requests/${encodeURIComponent(view.id)}/trace`, `cairn-${view.id}`)),
  ].filter(Boolean);
}

/** A timeline for Perfetto. Fetched with the key, and handed over as a file: a plain link could carry no key. */
export function traceButton(label, path, name) {
  const said = h("span", { class: "soft", role: "status" });
  const button = h("button", { type: "button", class: "plain-button", "data-does": "trace", onclick: async () => {
    button.disabled = true;
    try {
      const content = await (await ask(path)).blob();
      const address = URL.createObjectURL(content);
      h("a", { href: address, download: `${name}.trace.json` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
      said.textContent = "Open it in Perfetto or chrome://tracing.";
    } catch (error) {
      said.textContent = error.message;
    }
    button.disabled = false;
  } }, icon("down"), label);
  return [button, said];
}
