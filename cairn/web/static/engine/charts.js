/**
 * Time series and step bars, drawn by uPlot (vendor/uplot), in the page's colours and as wide as their card.
 *
 *     chart = lines(holder, [["output", "decode"], ...])      chart.show([xs, ys, ...])
 *
 * Knows numbers and colours; what they mean is the caller's.
 */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { clock, DASH, figure } from "../format.js";
import { colour } from "../theme.js";

const HEIGHT = 190;

/** Lines over time; `series` is [[label, name of a colour], ...]. Things that are counted go in `steps`, not in curves. */
export function lines(holder, series, unit, steps) {
  return chart(holder, {
    scales: { x: { time: true }, y: { range: fromZero } },
    series: series.map(([label, name]) => ({
      label, value: (_, value) => (value == null ? DASH : `${figure(value)} ${unit}`),
      stroke: () => colour(name), fill: () => faint(colour(name)), width: 2, points: { show: false },
      paths: steps ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.spline(),
    })),
    axes: [clockAxis, () => ({ ...valueAxis(), ...(steps && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }) })],
  });
}

/** One stacked bar for each step, and the floor as a line over them. `parts` come from the bottom up. */
export function stackedBars(holder, parts, line) {
  const bars = uPlot.paths.bars({ size: [0.82, 26], gap: 0 });
  const drawn = [...parts].reverse(); // the whole stack first, then what lies lower over it
  const made = chart(holder, {
    scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }, y: { range: fromZero } },
    series: [
      ...drawn.map(([label, name]) => ({
        label, stroke: () => colour(name), fill: () => colour(name), width: 0, paths: bars, points: { show: false },
        value: (plot, value, series, at) => own(plot, series, at, drawn.length),
      })),
      {
        label: line[0], stroke: () => colour(line[1]), width: 2, points: { show: false },
        paths: uPlot.paths.stepped({ align: 0 }), value: (_, value) => (value == null ? DASH : `${figure(value)} ms`),
      },
    ],
    axes: [stepAxis, valueAxis],
  });
  return {
    ...made,
    /** `rows` is one array for each part, from the bottom up. */
    show(xs, rows, floor) {
      const sums = [];
      for (const row of rows) sums.push(row.map((value, at) => value + (sums.at(-1)?.[at] ?? 0)));
      made.show([xs, ...sums.reverse(), floor]);
    },
  };
}

/** A part's own height: its stack less the one below it. */
function own(plot, series, at, parts) {
  const value = plot.data[series]?.[at];
  if (value == null) return DASH;
  const below = series < parts ? plot.data[series + 1][at] : 0;
  return `${figure(value - below)} ms`;
}

// -- what all of them share -----------------------------------------------------------------------

function chart(holder, { scales, series, axes }) {
  const width = () => Math.max(180, holder.clientWidth);
  const plot = new uPlot({
    width: width(), height: HEIGHT, scales, axes: axes.map((axis) => axis()),
    series: [{ label: "at", value: (_, at) => (at == null ? DASH : scales.x.time ? clock(at) : at) }, ...series],
    legend: { live: true },
    cursor: { y: false, drag: { x: false, y: false } },
    padding: [10, 22, 0, 0],
  }, [[], ...series.map(() => [])], holder);
  const redraw = () => plot.redraw(false, true);
  new ResizeObserver(() => plot.setSize({ width: width(), height: HEIGHT })).observe(holder);
  window.addEventListener("cairn:theme", redraw);
  return {
    show(data) {
      plot.setData(data);
      if (plot.cursor.left < 0) plot.setLegend({ idx: data[0].length - 1 }); // nobody points: the newest
    },
  };
}

const fromZero = (_, low, high) => [0, high > 0 ? high * 1.12 : 1];
const faint = (rgb) => rgb.replace(/^rgb\(/, "rgba(").replace(/\)$/, ", 0.1)");
const base = () => ({
  stroke: () => colour("soft"), font: "12px system-ui", ticks: { show: false },
  grid: { stroke: () => colour("line"), width: 1 },
});
const below = (space, text) => ({ ...base(), size: 30, space, grid: { show: false }, values: (_, ticks) => ticks.map(text) });
const clockAxis = () => below(90, clock);
const stepAxis = () => below(70, (at) => (Number.isInteger(at) ? String(at) : ""));
const valueAxis = () => ({ ...base(), size: 46, space: 34, values: (_, ticks) => ticks.map((tick) => figure(tick)) });
