/** What an empty conversation shows: a greeting, and a few first lines to try. */

import { h, setText } from "../dom.js";

const CHAT = [
  "What is the capital of France?",
  "Explain in three short points why leaves are green.",
  "Write a haiku about a stack of stones.",
];
const TEXT = ["Once upon a time", "One day, a little girl named Lily", "The cat and the dog"];

/** `send` gets the line that was chosen. */
export function welcome(send) {
  const title = h("h1", {});
  const words = h("p", { class: "soft" });
  const ideas = h("div", { class: "ideas" });
  const cairn = h("img", { src: "/web/icon.svg", alt: "", width: 72, height: 72 });
  const element = h("div", { class: "welcome" }, cairn, title, words, ideas);

  function setMode(mode, small = false) {
    setText(title, mode === "text" ? "How does it begin?" : "What is on your mind?");
    const steady = "This model is small: it takes the likeliest word each time (temperature 0), which answers best.";
    setText(words, `Everything happens on your own server; nothing goes elsewhere.${small ? ` ${steady}` : ""}`);
    ideas.replaceChildren(...(mode === "text" ? TEXT : CHAT).map((line) =>
      h("button", { type: "button", class: "idea", onclick: () => send(line) }, line)));
  }
  setMode("chat");
  return { element, setMode };
}
