/** The map: five courses, their sections, each topic a link with its state; what is next; the two plans. */

import { h } from "../dom.js";
import { said, word } from "./words.js";

const STATES = ["done", "begun", "ready", "later"];

export function mapOf(map) {
  const names = new Map(map.courses.flatMap(({ sections }) => sections).flatMap(({ topics }) => topics).map((one) => [one.id, one]));
  return [
    h("div", { class: "head" }, h("h1", {}, word("title")),
      h("p", { class: "soft", "data-figure": "done" }, `${map.done}/${map.topics} ${word("of")}`)),
    h("ul", { class: "legend" }, STATES.map((state) => h("li", {}, h("i", { class: `state ${state}` }), word(state)))),
    h("div", { class: "topic-chips next" }, h("span", {}, word("next")), map.next.map((id) => chip(names.get(id)))),
    h("p", { class: "topic-chips" }, ["graph", "exercises", "quiz", "interview"].map((place) =>
      h("a", { class: "chip", href: `#/learn/${place}:` }, word(place)))),
    map.courses.map(course),
    plan("week", map.plans.week), plan("year", map.plans.year),
  ].flat();
}

function course({ id, en, zh, months, requires, sections }) {
  const when = months ? ` · ${word("months").replace("{0}", months[0]).replace("{1}", months[1])}` : "";
  const needs = requires.length ? ` · ${word("requires")}: ${requires.join(", ")}` : "";
  const topics = sections.flatMap((one) => one.topics);
  const done = topics.filter(({ state }) => state === "done").length;
  return h("section", { class: "card course", "aria-label": id },
    h("h2", {}, `${id} ${said({ en, zh })}`),
    h("progress", { max: topics.length, value: done, "aria-label": `${id}: ${done}/${topics.length} ${word("of")}` }), h("p", { class: "soft" }, `${when}${needs}`.slice(3)),
    sections.map(section));
}

function section(one) {
  const done = one.topics.filter(({ state }) => state === "done").length;
  return h("div", { class: "topics" },
    h("h3", {}, `${said(one)} `, h("span", { class: "soft number" }, `${done}/${one.topics.length}`)),
    h("div", { class: "topic-chips" }, one.topics.map(chip)));
}

const chip = (topic) => h("a", { class: "chip", href: `#/learn/${topic.id}`, title: word(topic.state) },
  h("i", { class: `state ${topic.state}`, role: "img", "aria-label": word(topic.state) }), said(topic));

function plan(name, stages) {
  const stage = (one) => [h("dt", {}, said({ en: one.when_en, zh: one.when_zh })), h("dd", {}, said(one))];
  return h("details", { class: "card plan" }, h("summary", {}, word(name)), h("dl", {}, stages.map(stage)));
}
