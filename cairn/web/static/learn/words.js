/** The two languages of the roadmap: which is chosen (kept in this browser), the words of the frame, the switch. */

import { h } from "../dom.js";
import { figure } from "../format.js";

const KEY = "cairn.learn.language";
const LANGUAGES = [["en", "English"], ["zh", "中文"]];

const WORDS = {
  title: ["Learn", "学习路线"], done: ["done", "已完成"], begun: ["begun", "进行中"], ready: ["ready", "可以开始"],
  later: ["needs others first", "需先学其他"], of: ["topics done", "个主题已完成"], months: ["months", "月"],
  next: ["Next", "下一步"], week: ["Seven days", "七天计划"], year: ["Twelve months", "十二个月计划"],
  problem: ["Which problem it solves", "解决什么问题"], debug: ["How to see and debug it", "如何观察与调试"],
  code: ["The code here", "本项目中的代码"], labs: ["Labs", "实验"], commands: ["Commands", "命令"],
  reading: ["Reading", "阅读"], requires: ["Learn first", "先修"], ask: ["Check yourself", "自测"],
  answer: ["Model answer", "参考答案"], back: ["The map", "返回地图"], notRun: ["not run yet", "尚未运行"],
  hypothesis: ["Hypothesis", "假设"], predicted: ["predicted", "预测"], measured: ["measured", "实测"],
  what: ["what", "内容"], gap: ["gap", "偏差"], questions: ["Questions", "思考题"], runIt: ["Run it", "运行"],
  held: ["as predicted", "与预测一致"], off: ["off", "有偏差"], skipped: ["skipped", "跳过"], verdict: ["Verdict", "结论"],
};

export const chosenLanguage = () => (localStorage.getItem(KEY) === "zh" ? "zh" : "en");

/** A word of the frame in the chosen language. */
export const word = (name) => WORDS[name][chosenLanguage() === "zh" ? 1 : 0];

/** Of {en, zh} the chosen one. */
export const said = (words) => words[chosenLanguage()];

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
