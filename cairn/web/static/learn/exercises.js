/** Exercises: the list by course, and one with what is wanted, hints that open one by one, and its skeleton. */

import { h } from "../dom.js";
import { said, word } from "./words.js";

export function exerciseList(exercises) {
  const courses = [...new Set(exercises.map(({ course }) => course))];
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, word("exercises")),
      h("p", { class: "soft", "data-figure": "passed" }, `${exercises.filter(({ passed }) => passed).length}/${exercises.length} ${word("passed")}`)),
    courses.map((course) => h("section", { class: "card course", "aria-label": course }, h("h2", {}, course),
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
    h("h2", {}, word("commands")), h("ul", { class: "notes" }, ["start", "check", "hint", "solution"].map(command)),
    h("h2", {}, word("hint")), one.hints.map((hint, at) =>
      h("details", {}, h("summary", {}, `${word("hint")} ${at + 1}/${one.hints.length}`), h("p", {}, said(hint)))),
    h("h2", {}, word("skeleton")), h("pre", { class: "code", tabindex: "0" }, h("code", {}, one.skeleton)),
    h("h2", {}, word("code")), h("ul", { class: "notes" }, one.places.map((place) => h("li", {}, h("code", {}, place)))),
  ].flat(2);
}
