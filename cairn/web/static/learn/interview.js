/** The interview, round by round; an answer is typed, graded by the rubric, and shown beside the model answer. */

import { h } from "../dom.js";
import { getJSON } from "../server.js";
import { chosenLanguage, said, word } from "./words.js";

export function interviewPage(rounds) {
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, word("interview"))),
    rounds.map((round) => h("section", { class: "card course", "aria-label": round.id },
      h("h2", {}, said(round.title)), h("p", { class: "soft" }, `${round.minutes} ${word("minutes")} · ${said(round.wants)}`),
      round.questions.map((question) => form(round.id, question)))),
  ].flat();
}

function form(round, { topic, number, ask, evidence }) {
  const field = h("textarea", { rows: "3", "aria-label": word("your answer") });
  const result = h("div", { role: "status" });
  const grade = async (event) => {
    event.preventDefault();
    const query = new URLSearchParams({ round, topic, number, answer: field.value });
    result.replaceChildren(...graded(await getJSON(`/cairn/learn/grade?${query}`)));
  };
  return h("form", { class: "question", onsubmit: grade }, evidence ? h("pre", { class: "code", tabindex: "0" }, evidence.trim()) : null, h("p", {}, said(ask)), field,
    h("button", { type: "submit", class: "plain-button" }, word("grade")), result);
}

/** Only the wordings of the chosen language, where there are any. */
function worded(point) {
  const wordings = point.split(" / ");
  const wanted = wordings.filter((one) => /[\u4e00-\u9fff]/.test(one) === (chosenLanguage() === "zh"));
  return (wanted.length ? wanted : wordings).join(" / ");
}

/** What an answer has and lacks, beside the model answer. */
export const graded = ({ share, right, found, missing, answer, follow }) => [
  h("p", { class: `verdict ${right ? "held" : "off"}` }, h("b", {}, `${Math.round(share * 100)}%`)),
  found.length ? h("p", {}, `${word("has")}: ${found.map(worded).join("; ")}`) : "",
  missing.length ? h("p", {}, `${word("lacks")}: ${missing.map(worded).join("; ")}`) : "",
  h("p", {}, h("b", {}, `${word("answer")}: `), said(answer)),
  follow ? h("p", { class: "soft" }, `${word("follow-up")}: ${said(follow)}`) : "",
];
