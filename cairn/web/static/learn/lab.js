/** The report of a lab: hypothesis, verdict, its plots, predicted beside measured, figures, code, reading, questions. */

import { h } from "../dom.js";
import { figure } from "../format.js";
import { ask, getJSON } from "../server.js";
import { namedLink } from "./code.js";
import { drawPlot } from "./plot.js";
import { readingList } from "./reading.js";
import { said, word } from "./words.js";

const SAYS_ITSELF = ["held", "busy"]; // verdicts that begin with what the status means

const LOOK_MS = 400; // between two looks at a lab that runs

/** `again` draws this report anew when a run has ended. */
export function labReport({ about, run, shown }, again) {
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, said(about.title)), h("p", { class: "soft" }, `${about.area}/${about.name}`)),
    h("h2", {}, word("hypothesis")), h("p", {}, said(about.hypothesis)),
    run ? measured(about, run, shown) : h("p", { class: "soft" }, `${word("not run")}. ${word("run it")}: `, h("code", {}, `cairn lab run ${about.name}`)),
    runner(about, again),
    about.now_try.length ? [h("h2", {}, word("now try")), h("ul", { class: "notes" }, about.now_try.map(({ command, look }) =>
      h("li", {}, h("code", {}, command), h("br"), said(look))))] : [],
    h("h2", {}, word("code")), h("ul", { class: "notes" }, about.code.map((place) => h("li", {}, namedLink(place)))),
    h("h2", {}, word("reading")), readingList(about.reading),
    h("h2", {}, word("questions")), about.questions.map((one) =>
      h("details", {}, h("summary", {}, said(one.ask)), h("p", {}, said(one.answer)))),
  ].flat(2);
}

/** The learner's own number first, a button that starts the lab on the server's machine, and the steps that it goes through. */
function runner({ name, predict }, again) {
  const steps = h("ol", { class: "notes", role: "status" });
  const path = `/cairn/learn/labs/${encodeURIComponent(name)}/run`;
  const button = h("button", { type: "button" }, word("run here"));
  const guess = h("input", { type: "number", step: "any", "aria-label": word("predict first") });
  button.onclick = async () => {
    button.disabled = true;
    try {
      await ask(path, { body: { guess: guess.value === "" ? null : Number(guess.value) } });
      for (let state = { running: true }; state.running;) {
        await new Promise((done) => setTimeout(done, LOOK_MS));
        state = await getJSON(path);
        steps.replaceChildren(...state.steps.map((step) => h("li", {}, step)));
        if (!state.running && state.status !== "failed") again();
        else if (!state.running) steps.append(h("li", {}, word("failed")));
      }
    } catch (error) {
      steps.replaceChildren(h("li", {}, error.message));
    }
    button.disabled = false;
  };
  const question = predict ? h("p", {}, h("b", {}, `${word("predict first")}: `), said(predict), " ", guess) : "";
  return h("div", { class: "run-lab" }, question, button, steps);
}

function measured(about, run, shown) {
  return [
    h("p", { class: `verdict ${run.status}` }, SAYS_ITSELF.includes(run.status) ? h("b", {}, said(run.verdict)) : [h("b", {}, `${word(run.status)}: `), said(run.verdict)]),
    h("div", { class: "cards" }, run.plots.map((plot) => drawPlot(plot))),
    checks(run, shown),
    shown.guess ? h("p", { class: "guess" }, said(shown.guess)) : null,
    about.why ? [h("h2", {}, word("why")), h("p", {}, said(about.why))] : null,
    run.table ? figures(run.table.columns, shown.table) : null,
    run.notes.map((note) => h("p", {}, said(note))),
    h("p", { class: "hint" }, `${run.at}, ${run.where.device_name}, ${figure(run.seconds)} s${run.quick ? ", quick" : ""}`),
  ].flat(2).filter(Boolean);
}

function checks(run, shown) {
  const heads = ["what", "predicted", "measured", "gap", "allowed"].map((name) => h("th", { scope: "col" }, word(name)));
  const row = (check, at) => {
    const { predicted, measured: found, gap, allowed } = shown.checks[at];
    const badge = check.simulated ? h("small", { class: "badge" }, ` ${word("simulated")}`) : "";
    const cells = [said(predicted), [said(found), badge], gap, allowed].map((text) => h("td", { class: "number" }, text));
    return h("tr", {}, h("td", {}, said(check.what)), cells, h("td", {}, check.held ? "✓" : "≠"));
  };
  return h("table", { class: "checks" }, h("thead", {}, h("tr", {}, heads, h("th", {}))), h("tbody", {}, run.checks.map(row)));
}

function figures(columns, rows) {
  const heads = columns.map((name) => h("th", { scope: "col" }, said(name)));
  const row = (cells) => h("tr", {}, cells.map((cell, at) => h("td", { class: at ? "number" : "" }, said(cell))));
  return h("table", { class: "checks figures" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows.map(row)));
}
