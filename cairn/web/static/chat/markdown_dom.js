/** The tree of markdown.js as elements. While an answer grows, only the blocks that changed are made anew. */

import { copyButton } from "../copying.js";
import { arrange, h } from "../dom.js";
import { highlighted } from "./highlight.js";
import { blocks, inline } from "./markdown.js";

/** An element whose `show(text)` brings it up to date. */
export function markdownView() {
  const element = h("div", { class: "prose" });
  let shown = []; // [source, element]
  return {
    element,
    show(text) {
      const kept = (block, at) => (shown[at]?.[0] === block.source ? shown[at] : [block.source, blockElement(block)]);
      shown = blocks(text).map(kept);
      arrange(element, shown.map(([, made]) => made));
    },
  };
}

const MAKERS = {
  paragraph: ({ text }) => h("p", {}, spans(text)),
  heading: ({ level, text }) => h(`h${Math.min(level + 2, 6)}`, {}, spans(text)), // the page has h1 and h2 of its own
  rule: () => h("hr"),
  quote: ({ blocks }) => h("blockquote", {}, blocks.map(blockElement)),
  list: ({ ordered, start, items }) => h(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, items.map(listItem)),
  table: tableElement,
  code: codeElement,
};

const blockElement = (block) => MAKERS[block.kind](block);

/** An item of one line is that line, without the space around a paragraph. */
function listItem(inside) {
  const [first, ...rest] = inside;
  if (first?.kind === "paragraph") return h("li", {}, spans(first.text), rest.map(blockElement));
  return h("li", {}, inside.map(blockElement));
}

function codeElement({ language, text }) {
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copyButton("Copy this code", () => text)),
    h("pre", { tabindex: "0" }, h("code", {}, highlighted(text, language))));
}

function tableElement({ head, right, rows }) {
  const cell = (tag) => (text, at) => h(tag, { class: right[at] ? "right" : null }, spans(text));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map(cell("th")))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell("td")))))));
}

const TAGS = { strong: "strong", em: "em", strike: "s" };

function spans(text) {
  return inline(text).map(span);
}

function span(part) {
  if (part.kind === "text") return part.text;
  if (part.kind === "code") return h("code", {}, part.text);
  const inside = part.parts.map(span);
  if (part.kind === "link") return h("a", { href: part.address, target: "_blank", rel: "noopener noreferrer" }, inside);
  if (part.kind === "both") return h("em", {}, h("strong", {}, inside));
  return h(TAGS[part.kind], {}, inside);
}
