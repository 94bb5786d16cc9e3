/** The report of a lab: hypothesis, verdict, predicted beside measured, its plots, code, questions. */

import { h } from "../dom.js";
import { figure } from "../format.js";
import { drawPlot } from "./plot.js";
import { amount, said, word } from "./words.js";

export function labReport({ about, run }) {
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, said(about.title)), h("p", { class: "soft" }, `${about.area}/${about.name}`)),
    h("h2", {}, word("hypothesis")), h("p", {}, said(about.hypothesis)),
    run ? measured(run) : h("p", { class: "soft" }, `${word("notRun")}. ${word("runIt")}: `, h("code", {}, `cairn lab run ${about.name}`)),
    h("h2", {}, word("code")), h("ul", { class: "notes" }, about.code.map((place) => h("li", {}, h("code", {}, place)))),
    h("h2", {}, word("questions")), about.questions.map((one) =>
      h("details", {}, h("summary", {}, said(one.ask)), h("p", {}, said(one.answer)))),
  ].flat(2);
}

function measured(run) {
  const unit = (value, of) => (value === null ? "–" : `${amount(value)} ${of}`.trim());
  const row = (check) => h("tr", {}, h("td", {}, said(check.what)), h("td", { class: "number" }, unit(check.predicted, check.unit)),
    h("td", { class: "number" }, unit(check.measured, check.unit)),
    h("td", { class: "number" }, check.gap === null ? "–" : `${check.gap >= 0 ? "+" : ""}${(100 * check.gap).toFixed(0)}%`),
    h("td", {}, check.held ? "✓" : "≠"));
  const heads = ["what", "predicted", "measured", "gap"].map((name) => h("th", { scope: "col" }, word(name)));
  return [
    h("p", { class: `verdict ${run.status}` }, h("b", {}, `${word(run.status)}: `), said(run.verdict)),
    h("div", { class: "cards" }, run.plots.map((plot) => drawPlot(plot))),
    h("table", { class: "checks" }, h("thead", {}, h("tr", {}, heads, h("th", {}))), h("tbody", {}, run.checks.map(row))),
    h("p", { class: "hint" }, `${run.at}, ${run.where.device_name}, ${figure(run.seconds)} s${run.quick ? ", quick" : ""}`),
  ];
}
