/**
 * How far the engine is from what this machine allows: measured steps beside their roofline.
 *
 *     took 1.20 s   |=====floor 0.40 s=====|..................|     3 times the floor, limited by memory
 *
 * Only steps whose floor is known count, on both sides. `distance` is pure.
 */

import { h, setStyle, setText } from "../dom.js";
import { DASH, figure, percent, plural, seconds } from "../format.js";

/** {times, took, floor, host, limitedBy, steps} over these steps; times is null where no floor is known. */
export function distance(steps) {
  const known = steps.filter((step) => step.floor_s != null && step.total_s > 0);
  const sum = (field) => known.reduce((total, step) => total + field(step), 0);
  const took = sum((step) => step.total_s);
  const floor = sum((step) => step.floor_s);
  const memory = known.filter((step) => step.limited_by === "memory").length;
  return {
    steps: known.length, took, floor, times: floor > 0 ? took / floor : null,
    host: sum((step) => step.schedule_s + step.update_s), // launching is computing, on a CPU
    limitedBy: known.length ? (2 * memory >= known.length ? "memory" : "compute") : null,
  };
}

const LIMITS = { memory: "reading memory is the limit", compute: "arithmetic is the limit" };
const UNKNOWN = "No step with a known floor yet: this machine is still being looked at, or nothing has run.";

function sentence({ steps, took, floor, limitedBy }) {
  const least = `This machine needs at least ${seconds(floor)} for them: ${LIMITS[limitedBy]}.`;
  return `The last ${plural(steps, "step")} took ${seconds(took)}. ${least}`;
}

export function floorView() {
  const times = h("span", { class: "big number" });
  const words = h("p", { class: "soft" });
  const bar = h("div", { class: "floor-bar" }, h("i", { class: "floor-part" }));
  const host = h("p", { class: "soft" });
  return {
    element: h("div", { class: "floor" }, h("p", {}, times, h("span", { class: "soft" }, " times the floor")), bar, words, host),
    show(steps) {
      const found = distance(steps);
      const known = found.times !== null;
      setText(times, known ? figure(found.times) : DASH);
      bar.hidden = !known;
      if (known) setStyle(bar, { "--floor": `${Math.min(100, 100 / found.times)}%` });
      setText(words, known ? sentence(found) : UNKNOWN);
      setText(host, known ? `${percent(found.host, found.took)} of the time went to scheduling and to taking in results.` : "");
    },
  };
}
