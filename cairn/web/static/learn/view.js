/**
 * The roadmap: the map with what is done, one topic, the report of a lab.
 *
 *     #/learn   #/learn/TOPIC   #/learn/lab:NAME   #/learn/graph:   #/learn/exercises:   #/learn/exercise:NAME
 *     #/learn/quiz:   #/learn/quiz:TOPIC   #/learn/interview:   #/learn/code:cairn/x.py:name
 *
 * A lab is run, an exercise is written and checked, and answers are graded from here.
 */

import { troubleNotice } from "../chat/trouble.js";
import { h } from "../dom.js";
import { getJSON } from "../server.js";
import { codePage } from "./code.js";
import { exerciseList, exercisePage } from "./exercises.js";
import { topicGraph } from "./graph.js";
import { interviewPage } from "./interview.js";
import { labReport } from "./lab.js";
import { mapOf } from "./map.js";
import { quizPage } from "./quiz.js";
import { topicPage } from "./topic.js";
import { chosenLanguage, languageSwitch, loadWords } from "./words.js";

export function makeView() {
  const body = h("div", { class: "learn" });
  const element = h("section", { class: "inside", "aria-label": "Learn" }, body);
  let turn = 0; // a slow answer must not overwrite a later choice
  let place = "";

  async function show(rest) {
    place = rest;
    const mine = ++turn;
    if (!body.hasChildNodes()) body.replaceChildren(h("p", { class: "soft", role: "status" }, chosenLanguage() === "zh" ? "正在加载……" : "Loading…"));
    try {
      const drawn = await draw(rest, () => show(rest));
      if (mine !== turn) return;
      body.lang = chosenLanguage() === "zh" ? "zh-CN" : "en";
      body.replaceChildren(languageSwitch(() => show(place)), ...drawn);
      element.scrollTop = 0;
    } catch (error) {
      if (mine === turn) body.replaceChildren(troubleNotice(error, () => show(place)));
    }
  }
  return { element, show, hide: () => turn++ };
}

async function draw(rest, again) {
  await loadWords();
  if (rest === "") return mapOf(await getJSON("/cairn/learn"));
  if (rest.startsWith("lab:")) return labReport(await getJSON(`/cairn/learn/labs/${encodeURIComponent(rest.slice(4))}`), again);
  if (rest === "graph:") return topicGraph(await getJSON("/cairn/learn"));
  if (rest === "exercises:") return exerciseList(await getJSON("/cairn/learn/exercises"));
  if (rest.startsWith("exercise:")) return exercisePage(await getJSON(`/cairn/learn/exercises/${encodeURIComponent(rest.slice(9))}`));
  if (rest.startsWith("quiz:")) return quizPage(await getJSON(`/cairn/learn/quiz${rest.length > 5 ? `?topic=${encodeURIComponent(rest.slice(5))}` : ""}`), again);
  if (rest.startsWith("code:")) return codePage(await getJSON(`/cairn/learn/code?place=${encodeURIComponent(rest.slice(5))}`));
  if (rest === "interview:") return interviewPage(await getJSON("/cairn/learn/interview"));
  return topicPage(await getJSON(`/cairn/learn/topics/${encodeURIComponent(rest)}`));
}
