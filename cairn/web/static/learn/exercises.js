/**
 * Exercises: the list by course, and one with what is wanted, an editor, its graded cases and hints that open one by one.
 *
 * The code runs on the server's machine, which takes it only from a browser of the same machine.
 */

import { h } from "../dom.js";
import { figure } from "../format.js";
import { getJSON } from "../server.js";
import { placeLink } from "./code.js";
import { makeEditor } from "./editor.js";
import { said, word } from "./words.js";

export function exerciseList(exercises) {
  const courses = new Map(exercises.map(({ course, course_title: title }) => [course, title]));
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, word("exercises")),
      h("p", { class: "soft", "data-figure": "passed" }, `${exercises.filter(({ passed }) => passed).length}/${exercises.length} ${word("passed")}`)),
    [...courses].map(([course, title]) => h("section", { class: "card course", "aria-label": course }, h("h2", {}, `${course} ${said(title)}`),
      h("ul", { class: "notes" }, exercises.filter((one) => one.course === course).map(line)))),
  ].flat();
}

const line = (one) => h("li", {}, h("a", { href: `#/learn/exercise:${one.name}` }, said(one.title)),
  h("span", { class: "soft" }, ` · ${one.minutes} ${word("minutes")}${one.passed ? ` · ✓ ${word("passed")}` : ""}`));

export function exercisePage(one) {
  const command = (verb) => h("li", {}, h("code", {}, `cairn exercise ${verb} ${one.name}`));
  return [
    h("p", {}, h("a", { href: "#/learn/exercises:" }, `← ${word("exercises")}`)),
    h("div", { class: "head" }, h("h1", {}, said(one.title)), h("p", { class: "soft" }, `${one.course} · ${one.minutes} ${word("minutes")}`)),
    h("p", {}, said(one.wanted)),
    h("h2", {}, word("your code")), workplace(one),
    h("h2", {}, word("hint")), one.hints.map((hint, at) =>
      h("details", {}, h("summary", {}, `${word("hint")} ${at + 1}/${one.hints.length}`), h("p", {}, said(hint)))),
    h("h2", {}, word("code")), h("ul", { class: "notes" }, one.places.map((place) => h("li", {}, placeLink(place)))),
    h("h2", {}, word("commands")), h("ul", { class: "notes" }, ["start", "check", "hint", "solution"].map(command)),
  ].flat(2);
}

/** The editor, its buttons, and what the grader said last. */
function workplace(one) {
  const editor = makeEditor(one.name, one.skeleton, one.file);
  const results = h("div", { class: "graded", role: "status" });
  const check = h("button", { type: "button", class: "strong-button" }, word("check it"));
  check.onclick = async () => {
    check.disabled = true;
    results.replaceChildren(h("p", { class: "soft" }, word("grading")));
    try {
      const graded = await getJSON(`/cairn/learn/exercises/${encodeURIComponent(one.name)}/check`, { body: { code: editor.text } });
      results.replaceChildren(...shown(graded, editor));
    } catch (error) {
      results.replaceChildren(h("p", { class: "verdict off" }, error.message));
    }
    check.disabled = false;
  };
  const reset = h("button", { type: "button", class: "plain-button", onclick: () => editor.reset() }, word("reset"));
  return h("div", {}, editor.element, h("div", { class: "actions" }, reset, check), results);
}

const SIGNS = { held: "✓", off: "✗", skipped: "–" };
const verdictOf = (result) => (result.looked_at ? (result.passed ? "held" : "off") : "skipped");

const shown = (graded, editor) => [
  h("p", { class: `verdict ${graded.passed ? "held" : "off"}` }, h("b", {}, word(graded.passed ? "passed" : "not yet"))),
  h("ul", { class: "cases" }, graded.results.map((result) => h("li", { class: verdictOf(result) },
    h("span", {}, `${SIGNS[verdictOf(result)]} ${said(result.what)}`),
    result.figure ? h("span", { class: "soft number" }, ` · ${figure(result.figure.measured)} / ${figure(result.figure.limit)} ${result.figure.unit}`) : null,
    result.said ? h("pre", {}, said(result.said)) : null,
    result.line ? h("button", { type: "button", class: "plain-button", onclick: () => editor.show(result.line) }, word("line").replace("{0}", result.line)) : null))),
];
