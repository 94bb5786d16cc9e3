/** How the model is asked: a sheet with the sampling parameters and the system prompt. Empty is the server's default. */

import { h } from "../dom.js";

const FIELDS = [
  ["temperature", "Temperature", "0: always the likeliest token; above 1: adventurous", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", "only tokens that together have this probability", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", "only so many of the likeliest tokens", { min: 1, step: 1 }],
  ["max_tokens", "Most tokens", "the answer ends there at the latest", { min: 1, step: 1 }],
  ["seed", "Seed", "the same seed, the same answer", { min: 0, step: 1 }],
];

const SMALL = 1e9; // parameters

/**
 * What a person who has chosen nothing gets. The server's default of 1 is too much for most models, and a small one is
 * only right while it takes the likeliest word: SmolLM2-135M says "Paris" to 48% of those who ask at 0.6, to all at 0.
 */
export function firstParameters(modelParameters) {
  return { temperature: isSmall(modelParameters) ? 0 : 0.6 };
}

export function isSmall(modelParameters) {
  return Boolean(modelParameters) && modelParameters < SMALL;
}

/** Opens the sheet; `onChange` gets the parameters after every change, `first` are those of a fresh start. */
export function openParameters(parameters, first, withSystem, onChange) {
  const values = { ...parameters };
  const change = (name, value) => {
    if (value === "" || value === null || Number.isNaN(value)) delete values[name];
    else values[name] = value;
    onChange({ ...values });
  };
  const system = h("textarea", {
    id: "parameter-system", rows: 3, value: values.system ?? "", placeholder: "none",
    oninput: () => change("system", system.value),
  });
  const numbers = FIELDS.map((field) => numberField(field, values, change));
  const dialog = h("dialog", { class: "sheet", "aria-labelledby": "parameters-title" },
    h("form", { method: "dialog", novalidate: true },
      h("h2", { id: "parameters-title" }, "Parameters"),
      h("p", { class: "soft" }, "For this conversation, and for new ones. Empty means the server's default."),
      withSystem && h("label", { class: "field", for: "parameter-system" }, h("span", {}, "System prompt"), system),
      h("div", { class: "fields" }, numbers.map(({ element }) => element)),
      h("div", { class: "actions" },
        h("button", { type: "button", class: "plain-button", onclick: reset }, "Reset"),
        h("button", { class: "strong-button" }, "Done"))));

  function reset() {
    for (const name of Object.keys(values)) delete values[name];
    Object.assign(values, first);
    for (const { input, name } of numbers) input.value = values[name] ?? "";
    system.value = "";
    onChange({ ...values });
  }
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside the sheet
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  if (matchMedia("(hover: none)").matches) document.activeElement?.blur(); // or the keyboard hides half of it
}

function numberField([name, label, hint, range], values, change) {
  const input = h("input", {
    id: `parameter-${name}`, type: "number", inputmode: "decimal", placeholder: "default", value: values[name] ?? "", ...range,
    "aria-describedby": `parameter-${name}-hint`, oninput: () => change(name, input.valueAsNumber),
  });
  const element = h("label", { class: "field", for: input.id },
    h("span", {}, label), input, h("small", { id: `parameter-${name}-hint` }, hint));
  return { input, name, element };
}
