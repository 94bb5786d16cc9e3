/** A source file of the project with its lines numbered, and links to it from a place such as "cairn/x.py:12  name". */

import { h } from "../dom.js";
import { word } from "./words.js";

const PLACE = /^([^\s:]+)(?::(\d+))?(?:\s+(\S+))?$/;

/** A link that opens the file at the named function; what is no place stays text. */
export function placeLink(place) {
  const [, path, , name] = PLACE.exec(place) ?? [];
  if (!path) return h("code", {}, place);
  return h("a", { href: `#/learn/code:${path}${name ? `:${name}` : ""}` }, h("code", {}, place));
}

/** The same for "cairn/x.py:name", as labs write it. */
export const namedLink = (written) => h("a", { href: `#/learn/code:${written}` }, h("code", {}, written));

export function codePage({ path, line, name, lines }) {
  const body = h("pre", { class: "source numbered", tabindex: "0" }, lines.map((text, at) =>
    h("span", { class: at + 1 === line && name ? "at" : "", id: `line-${at + 1}`, "data-line": at + 1 }, `${text}\n`)));
  requestAnimationFrame(() => body.querySelector(".at")?.scrollIntoView({ block: "center" }));
  return [
    h("p", {}, h("a", { href: "#/learn", onclick: back }, `← ${word("back to it")}`)),
    h("div", { class: "head" }, h("h1", {}, path), h("p", { class: "soft" }, name ? `${name} · ${word("line").replace("{0}", line)}` : "")),
    body,
  ];
}

/** To where the reader came from; a page that was opened here has no such place, and its link leads to the map. */
function back(event) {
  if (history.length < 2) return;
  event.preventDefault();
  history.back();
}
