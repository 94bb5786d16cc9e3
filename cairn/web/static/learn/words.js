/** The two languages of the roadmap: which is chosen (kept in this browser), the words of the frame, the switch. */

import { h } from "../dom.js";
import { figure } from "../format.js";
import { getJSON } from "../server.js";

const KEY = "cairn.learn.language";
const LANGUAGES = [["en", "English"], ["zh", "中文"]];

let words; // of the frame, in both languages: one list for the terminal, the pages and this view

/** Once, before anything is drawn; after a failure it is asked for again. */
export async function loadWords() {
  words ??= await getJSON("/cairn/learn/words");
}

/** The one that was chosen here; before that, the browser's. */
export const chosenLanguage = () => {
  const wanted = localStorage.getItem(KEY) ?? navigator.language;
  return wanted.startsWith("zh") ? "zh" : "en";
};

/** A word of the frame in the chosen language. */
export const word = (name) => said(words[name]);

/** Of {en, zh} the chosen one. */
export const said = (text) => text[chosenLanguage()];

/** A number of any size: labs measure shares of a millionth as well as gigabytes. */
export const amount = (value) => (value !== 0 && Math.abs(value) < 0.1 ? String(Number(value.toPrecision(2))) : figure(value));

export function languageSwitch(changed) {
  const choose = (name) => () => {
    localStorage.setItem(KEY, name);
    changed();
  };
  return h("div", { class: "segments", role: "radiogroup", "aria-label": "Language" }, LANGUAGES.map(([name, label]) =>
    h("label", {}, h("input", { type: "radio", name: "language", checked: name === chosenLanguage(), onchange: choose(name) }),
      h("span", { lang: name === "zh" ? "zh-CN" : "en" }, label))));
}
