/** One topic: what, why, how to debug it, the code here, its labs with their newest verdict, a self-check. */

import { h } from "../dom.js";
import { placeLink } from "./code.js";
import { readingList } from "./reading.js";
import { said, word } from "./words.js";

export function topicPage(topic) {
  const text = said(topic);
  const runs = new Map(topic.runs.map((run) => [run.lab, run]));
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, text.title), h("p", { class: "soft" }, `${topic.id} · ${word(topic.standing.state)}`)),
    h("p", {}, text.what),
    titled("problem", h("p", {}, text.problem)),
    ...(topic.lesson ? lessonParts(topic.lesson) : []),
    titled("debug", h("p", {}, text.debug)),
    titled("code", h("ul", { class: "notes" }, topic.places.map((place) => h("li", {}, placeLink(place))))),
    topic.labs.length ? titled("labs", h("ul", { class: "notes" }, topic.labs.map((name) => labLine(name, topic.lab_titles[name], runs.get(name))))) : null,
    topic.exercises.length ? titled("exercises", h("ul", { class: "notes" }, topic.exercises.map((one) =>
      h("li", {}, h("a", { href: `#/learn/exercise:${one.name}` }, said(one.title)))))) : null,
    topic.commands.length ? titled("commands", lines(topic.commands)) : null,
    topic.reading.length ? titled("reading", readingList(topic.reading)) : null,
    topic.requires.length ? titled("requires", h("p", {}, topic.requires.map((id) => [h("a", { href: `#/learn/${id}` }, id), " "]))) : null,
    titled("ask", h("p", {}, text.ask), h("details", {}, h("summary", {}, word("answer")), h("p", {}, text.answer)),
      h("p", { class: "hint" }, h("a", { href: `#/learn/quiz:${topic.id}` }, word("quiz")), " · ", h("code", {}, `cairn learn quiz --topic ${topic.id}`))),
    topic.lesson ? titled("asked", topic.lesson.interview.map((one) =>
      h("details", {}, h("summary", {}, said(one.ask)), h("p", {}, said(one.answer))))) : null,
  ].filter(Boolean);
}

/** Picture, worked number, the lines of code that do it, common mistakes. */
function lessonParts(lesson) {
  return [
    titled("picture", h("pre", { class: "picture" }, lesson.picture)),
    titled("worked", h("p", { class: "worked" }, said(lesson.worked))),
    titled("snippet", h("p", {}, placeLink(lesson.snippet.place)), h("pre", { class: "source" }, lesson.snippet.lines.join("\n"))),
    titled("mistakes", h("ul", { class: "notes" }, lesson.mistakes.map((one) => h("li", {}, said(one))))),
  ];
}

const titled = (name, ...children) => [h("h2", {}, word(name)), ...children].reduce((all, one) => (all.append(one), all), h("div", { class: "part" }));

const lines = (texts) => h("ul", { class: "notes" }, texts.map((text) => h("li", {}, h("code", {}, text))));

function labLine(name, title, run) {
  const verdict = run ? said(run.verdict) : `${word("not run")}: cairn lab run ${name}`;
  return h("li", {}, h("a", { href: `#/learn/lab:${name}` }, said(title)), " · ",
    h("span", { class: `verdict ${run?.status ?? ""}` }, verdict));
}
