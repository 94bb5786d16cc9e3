/** Lines over two axes as SVG: few points, no library, the words in the chosen language. */

import { h } from "../dom.js";
import { amount, said } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, BOTTOM] = [460, 240, 56, 34];

export function drawPlot(plot) {
  const points = plot.lines.flatMap((line) => line.points);
  const across = scale(points.map(([x]) => x), plot.log_x, LEFT, WIDTH - 26);
  const limit = plot.limit === null ? [] : [plot.limit];
  const up = scale([...points.map(([, y]) => y), ...limit], plot.log_y, HEIGHT - BOTTOM, 12);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": said(plot.title), class: "lab-plot" });
  for (const value of up.ticks) picture.append(rule(up(value)), label(LEFT - 6, up(value) + 4, amount(value), "end"));
  for (const value of across.ticks) picture.append(label(across(value), HEIGHT - BOTTOM + 16, amount(value), "middle"));
  picture.append(label((LEFT + WIDTH) / 2, HEIGHT - 2, said(plot.x), "middle"));
  for (const value of limit) picture.append(rule(up(value), "limit"));
  plot.lines.forEach((line, at) => {
    const path = line.points.map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
    picture.append(svg("polyline", { points: path, class: `line-${at % 6}` }));
  });
  const legend = h("ul", { class: "legend" }, plot.lines.map((line, at) => h("li", {}, h("i", { class: `cell line-${at % 6}` }), said(line.name))));
  return h("figure", { class: "card" }, h("figcaption", {}, `${said(plot.title)} (${said(plot.y)})`), picture, legend);
}

/** From values to places; a logarithm where the plot asks and every value allows it. */
function scale(values, wanted, begin, end) {
  const fine = values.filter(Number.isFinite);
  const log = wanted && fine.every((value) => value > 0);
  const turn = log ? Math.log10 : (value) => value;
  let [low, high] = [Math.min(...fine.map(turn)), Math.max(...fine.map(turn))];
  if (!log) low = Math.min(low, 0);
  if (!(high > low)) high = low + 1;
  const place = (value) => begin + ((turn(value) - low) / (high - low)) * (end - begin);
  place.ticks = log ? decades(low, high) : between(low, high, round((high - low) / 4));
  return place;
}

/** Multiples of a step that lie between two values. */
function between(low, high, step) {
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

/** 1, 2 or 5 times a power of ten: a step that a reader can count with. */
function round(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].find((times) => times * power >= step * 0.8) * power;
}

/** Powers of ten, every so many of them; where there are fewer than two, 1, 2 and 5 times each. */
function decades(low, high) {
  const whole = between(low, high, Math.max(1, Math.ceil((high - low) / 6)));
  if (whole.length > 1) return whole.map((power) => 10 ** power);
  const fine = between(Math.floor(low), Math.ceil(high), 1).flatMap((power) => [1, 2, 5].map((times) => times * 10 ** power));
  return fine.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function rule(y, name = "grid") {
  return svg("line", { x1: LEFT, x2: WIDTH - 26, y1: y, y2: y, class: name });
}

function label(x, y, text, anchor) {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}
