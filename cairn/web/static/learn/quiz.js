/** The quiz: a few questions, answers typed; graded by a rubric where there is one, else judged beside the model answer. */

import { h } from "../dom.js";
import { getJSON } from "../server.js";
import { graded } from "./interview.js";
import { said, word } from "./words.js";

export function quizPage({ questions }, again) {
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, word("quiz"))),
    h("p", { class: "soft" }, word("quiz note")),
    ...questions.map(question),
    h("button", { type: "button", class: "plain-button", onclick: again }, word("other questions")),
  ];
}

function question({ topic, title, number, ask }) {
  const field = h("textarea", { rows: "3", "aria-label": word("your answer") });
  const result = h("div", { role: "status" });
  const send = (more) => getJSON("/cairn/learn/quiz/answer", { body: { topic, number, answer: field.value, ...more } });
  const judge = (right) => h("button", { type: "button", class: "plain-button", onclick: async () => {
    await send({ right });
    result.lastChild.replaceWith(h("p", { class: `verdict ${right ? "held" : "off"}` }, h("b", {}, word(right ? "had it" : "not yet"))));
  } }, word(right ? "had it" : "not yet"));
  const grade = async (event) => {
    event.preventDefault();
    try {
      const found = await send({});
      result.replaceChildren(...(found.graded ? graded(found)
        : [h("p", {}, h("b", {}, `${word("answer")}: `), said(found.answer)), h("p", { class: "actions" }, judge(true), judge(false))]));
    } catch (error) {
      result.replaceChildren(h("p", { class: "verdict off" }, error.message));
    }
  };
  return h("form", { class: "question card", onsubmit: grade },
    h("p", { class: "soft" }, h("a", { href: `#/learn/${topic}` }, said(title))),
    h("p", {}, said(ask)), field, h("button", { type: "submit", class: "strong-button" }, word("grade")), result);
}
