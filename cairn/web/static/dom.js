/**
 * Elements from plain calls. Text is always text: nothing on this page parses HTML.
 *
 *     h("p", {class: "note", onclick: open}, "held: ", h("b", {}, "12"))
 */

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "inert", "indeterminate"]);

/** An element with attributes (`on...` listens, `css` sets custom properties) and children; null and false are left out. */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) put(element, name, value);
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

function put(element, name, value) {
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "css") setStyle(element, value);
  else if (PROPERTIES.has(name)) element[name] = value;
  else if (value != null && value !== false) element.setAttribute(name, value === true ? "" : value);
}

/** Through the object model, because the page's policy forbids style attributes. */
export function setStyle(element, values) {
  for (const [name, value] of Object.entries(values)) element.style.setProperty(name, value);
}

/** Sets the text only where it differs, so that a selection survives. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes the children of `holder` exactly `wanted`, moving as few as possible: focus and scrolling survive. */
export function arrange(holder, wanted) {
  const kept = new Set(wanted);
  for (const child of [...holder.childNodes]) if (!kept.has(child)) child.remove();
  wanted.forEach((child, at) => {
    if (holder.childNodes[at] !== child) holder.insertBefore(child, holder.childNodes[at] ?? null);
  });
}

/** Names and values, one pair on a line; null is left out. */
export function facts(rows) {
  const row = ([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "number" }, value));
  return h("dl", { class: "facts" }, rows.filter(Boolean).map(row));
}

// -- icons ----------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  send: "M12 19V5 M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9z M15 9V4H5v11h4",
  done: "M5 12.5l4.5 4.5L19 7.5",
  again: "M19 12a7 7 0 1 1-2.2-5.1 M19 4v4.5h-4.5",
  edit: "M5 19l1-4L16 5l3 3L9 18z",
  plus: "M12 5v14 M5 12h14",
  bin: "M5 7h14 M10 7V5h4v2 M7 7l1 12h8l1-12",
  sliders: "M4 8h8 M18 8h2 M15 5.5v5 M4 16h2 M12 16h8 M9 13.5v5",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8 M12 3v2 M12 19v2 M3 12h2 M19 12h2 "
    + "M5.6 5.6 7 7 M17 17l1.4 1.4 M18.4 5.6 17 7 M7 17l-1.4 1.4",
  moon: "M19 14.5A7.5 7.5 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5z",
  system: "M12 4a8 8 0 1 0 0 16a8 8 0 1 0 0-16z M12 4v16 M12 8h4.5 M12 12h7 M12 16h4.5",
  list: "M4 7h16 M4 12h16 M4 17h10",
  close: "M6 6l12 12 M18 6L6 18",
  down: "M12 5v14 M6 13l6 6 6-6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  chat: "M4 5h16v11H11l-4 4v-4H4z",
  engine: "M4 13h4l2-7 4 12 2-5h4",
  requests: "M4 6h9 M8 12h10 M12 18h8",
  model: "M12 3l8 4.5v9L12 21l-8-4.5v-9z M4 7.5l8 4.5 8-4.5 M12 12v9",
  learn: "M4 6l8-3 8 3-8 3z M7 7.5V13c0 1.5 2.2 3 5 3s5-1.5 5-3V7.5 M20 6v7",
  help: "M9.2 9a3 3 0 1 1 4.3 2.7c-1 .5-1.5 1-1.5 2.3 M12 17.5v.5",
  key: "M14.5 4a5.5 5.5 0 0 0-5.2 7.3L4 16.6V20h3.4v-2.2h2.2v-2.2l2.6-2.6A5.5 5.5 0 1 0 14.5 4z M16 8v.01",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = svg.appendChild(document.createElementNS(SVG, "path"));
  path.setAttribute("d", PATHS[name]);
  return svg;
}

/** A button that is only an icon; its name is for tooltips and screen readers. */
export function iconButton(name, label, onclick, attributes) {
  const named = { type: "button", class: "icon-button", "aria-label": label, title: label };
  return h("button", { ...named, onclick, ...attributes }, icon(name));
}
