/**
 * One message on the screen: what was said, what it cost, what can be done with it.
 *
 * `update()` reads the node anew; it is called for every piece of a stream, and only touches what changed.
 */

import { copyButton } from "../copying.js";
import { h, iconButton, setText } from "../dom.js";
import { figure, percent, plural, seconds } from "../format.js";
import { markdownView } from "./markdown_dom.js";
import { troubleNotice } from "./trouble.js";

/** `does` is {again, edit, turn}: what the buttons call. `place` says which of how many versions this is. */
export function messageView(node, does) {
  return node.role === "user" ? userMessage(node, does) : answerMessage(node, does);
}

// -- the person -----------------------------------------------------------------------------------

function userMessage(node, does) {
  const turner = versionTurner(does);
  const pictures = (node.images ?? []).map((url) => h("img", { src: url, alt: "Picture of the message" }));
  const bubble = h("div", { class: "bubble" }, pictures, node.content);
  const tools = h("div", { class: "tools" },
    turner.element, copyButton("Copy", () => node.content), iconButton("edit", "Edit", () => edit(), { "data-does": "edit" }));
  const element = h("article", { class: "message user", "aria-label": "You" }, bubble, tools);

  function edit() {
    const area = h("textarea", { value: node.content, rows: 3, "aria-label": "Edit your message" });
    const close = () => element.replaceChildren(bubble, tools);
    const form = h("form", { class: "edit", onsubmit: (event) => {
      event.preventDefault();
      const text = area.value.trim();
      close();
      if (text && text !== node.content) does.edit(node, text);
    } }, area, h("div", { class: "actions" },
      h("button", { type: "button", class: "plain-button", onclick: close }, "Cancel"),
      h("button", { type: "submit", class: "strong-button" }, "Send")));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    element.replaceChildren(form);
    area.focus();
  }
  return { element, node, update: (place) => turner.update(node, place) };
}

// -- the model ------------------------------------------------------------------------------------

function answerMessage(node, does) {
  const prose = markdownView();
  const thought = thoughtView();
  const turner = versionTurner(does);
  const cost = h("span", { class: "cost" });
  const inside = h("a", { class: "inside-link", title: "Where the time went" }, "ledger");
  const again = iconButton("again", "Answer again (r)", () => does.again(node), { "data-does": "again" });
  const copy = copyButton("Copy the answer", () => node.content);
  const tools = h("div", { class: "tools" }, turner.element, copy, again, h("span", { class: "cost-line" }, cost, inside));
  const wait = h("div", { class: "wait", "aria-label": "waiting for the first token" }, h("i"), h("i"), h("i"));
  const trouble = h("div", {});
  const element = h("article", { class: "message answer", "aria-label": "Answer" },
    thought.element, prose.element, wait, trouble, tools);
  let troubled = null;

  function update(place) {
    const running = node.status === "running";
    element.dataset.status = node.status;
    element.setAttribute("aria-busy", String(running));
    thought.update(node);
    prose.show(node.content);
    wait.hidden = !running || Boolean(node.content || node.reasoning);
    again.disabled = running;
    turner.update(node, place);
    setText(cost, costOf(node));
    inside.hidden = !node.stats?.ledger;
    if (node.stats?.request) inside.href = `#/requests/${encodeURIComponent(node.stats.request)}`;
    if (troubled !== node.error) {
      troubled = node.error;
      trouble.replaceChildren(...(troubled ? [troubleNotice(troubled, () => does.again(node))] : []));
    }
  }
  return { element, node, update };
}

const ENDS = { length: "cut at the most tokens", abort: "ended by the server" };

function costOf({ status, finish, stats }) {
  const said = [];
  if (stats?.tokens) said.push(plural(stats.tokens, "token"));
  if (stats?.rate) said.push(`${figure(stats.rate)} tok/s`);
  if (stats?.ttft) said.push(`first after ${seconds(stats.ttft)}`);
  if (status !== "running" && stats?.cached) said.push(`${percent(stats.cached, stats.prompt)} of the prompt cached`);
  if (status === "stopped") said.push("stopped");
  else if (status === "done" && ENDS[finish]) said.push(ENDS[finish]);
  return said.join(" · ");
}

/** Reasoning, folded away. */
function thoughtView() {
  const title = h("summary", {});
  const text = h("div", { class: "thought-text" });
  const element = h("details", { class: "thought" }, title, text);
  return {
    element,
    update({ reasoning, content, status }) {
      element.hidden = !reasoning;
      if (!reasoning) return;
      setText(title, status === "running" && !content ? "Thinking…" : "Thought");
      setText(text, reasoning.trim());
    },
  };
}

/** ‹ 2/3 ›, where there are several. */
function versionTurner(does) {
  let node = null;
  let place = null;
  const step = (by) => () => does.turn(node, place.at + by);
  const back = iconButton("left", "Earlier version", step(-1));
  const on = iconButton("right", "Later version", step(1));
  const text = h("span", {});
  const element = h("span", { class: "turner", hidden: true }, back, text, on);
  return {
    element,
    update(newNode, newPlace) {
      [node, place] = [newNode, newPlace];
      element.hidden = !place || place.of < 2;
      if (element.hidden) return;
      setText(text, `${place.at + 1}/${place.of}`);
      back.disabled = place.at === 0;
      on.disabled = place.at === place.of - 1;
    },
  };
}
