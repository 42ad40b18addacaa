// Curves (uPlot) and the scatter of trajectories (a canvas).

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { useWidth } from "./parts.js";
import { number } from "./text.js";

const { uPlot } = globalThis;
const HEIGHT = 190;
const CURVES = ["--curve-1", "--curve-2", "--curve-3", "--curve-4", "--curve-5", "--curve-6"];
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3], [4, 4], [1, 2]]; // curves differ by more than colour
const SMOOTH_FROM = 40; // points of a curve that is drawn faintly, with its running mean on top
const SMOOTH_SHARE = 20;

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Shows curves over steps. `curves`: `{ name, steps, values }`, each with its `look`, a number, if it looks the same in other
 * charts; `stack`: parts of the last one; `shared`: charts of the same name point at the same step. */
export function Chart({ title, unit, curves, stack = false, theme, shared = "run" }) {
  const [element, width] = useWidth();
  const plot = useRef(null);
  const shape = JSON.stringify([curves.map((curve) => curve.name), stack, theme, width > 0, smooth(curves)]);
  useEffect(() => {
    if (!width) return;
    plot.current = new uPlot(options(title, curves, stack, width, shared), table(curves, stack), element.current);
    return () => plot.current.destroy();
  }, [shape]);
  useEffect(() => plot.current?.setData(table(curves, stack)), [curves]);
  useEffect(() => {
    if (width) plot.current?.setSize({ width, height: HEIGHT });
  }, [width]);
  return html`<figure class="chart">
    <figcaption>${title} <span>${unit}</span></figcaption>
    <div class="plot" ref=${element} role="img" aria-label="${title}: ${spoken(curves)}"></div>
  </figure>`;
}

/** Returns a chart's content in words. */
function spoken(curves) {
  return curves.map(({ name, steps, values }) => {
    const known = values.filter((value) => value !== null);
    if (!known.length) return `${name} has no values`;
    return `${name} from ${number(known[0])} at step ${steps[0]} to ${number(known[known.length - 1])} at step ${steps[steps.length - 1]}, ` +
      `least ${number(Math.min(...known))}, greatest ${number(Math.max(...known))}`;
  }).join("; ");
}

const smooth = (curves) => curves.length === 1 && curves[0].values.length >= SMOOTH_FROM;

/** Returns uPlot's columns: steps, then the values of each curve at them. */
function table(curves, stack) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = curves.map((curve) => {
    const column = Array(steps.length).fill(null);
    curve.steps.forEach((step, index) => (column[place.get(step)] = curve.values[index]));
    return column;
  });
  if (stack) {
    const below = Array(steps.length).fill(0);
    columns.forEach((column, index) => {
      // The last curve is the whole, so its layer ends where it is; the others lie on those before them.
      if (index < columns.length - 1) column.forEach((value, at) => (column[at] = below[at] += value ?? 0));
    });
  } else if (smooth(curves)) {
    columns.push(runningMean(columns[0]));
  }
  return [steps, ...columns];
}

function runningMean(values) {
  const reach = Math.max(1, Math.floor(values.length / SMOOTH_SHARE / 2));
  return values.map((_, index) => {
    const window = values.slice(Math.max(0, index - reach), index + reach + 1).filter((value) => value !== null);
    return window.length ? window.reduce((a, b) => a + b, 0) / window.length : null;
  });
}

function options(title, curves, stack, width, shared) {
  const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const faint = smooth(curves);
  const looks = curves.map(({ look }, index) => look ?? index);
  const colours = looks.map((look) => ink(CURVES[look % CURVES.length]));
  const series = curves.map(({ name, values }, index) => {
    const colour = colours[index];
    return {
      label: name, stroke: faint ? colour + "55" : colour, width: faint ? 1 : 2, dash: stack ? [] : dashOf(looks[index]), spanGaps: true,
      fill: stack ? colour + "55" : undefined,
      points: { show: values.filter((value) => value !== null).length <= 30, size: 5, fill: colour },
      value: (plot, value, index, at) => number(stack ? layerOf(plot, index, at) : value ?? lastOf(plot, index)),
    };
  });
  if (faint) series.push({ label: "running mean", stroke: colours[0], width: 2, spanGaps: true, points: { show: false }, value: (plot, value, index) => number(value ?? lastOf(plot, index)) });
  return {
    width, height: HEIGHT, series: [{ label: "step", value: (plot, value) => number(value ?? lastOf(plot, 0)) }, ...series],
    bands: stack ? curves.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : [],
    scales: { x: { time: false, range: (_, first, last) => (first === last && first !== null ? [Math.max(0, first - 1), first + 1] : [first, last]) }, y: { range: (_, least, most) => room(stack ? 0 : least, most) } },
    axes: [{ ...axis, size: 30, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick : "")) }, { ...axis, size: 58, values: (_, ticks, axisIndex, space, increment) => labels(ticks, increment) }],
    cursor: { sync: { key: shared }, points: { size: 7 }, drag: { x: true, y: false } },
    legend: { show: true, live: true, markers: { dash: (_, index) => (stack ? "solid" : borderOf(looks[index - 1] ?? 0)) } },
  };
}

/** Returns the dashes of a curve: of those that share a colour each has its own. */
const dashOf = (look) => DASHES[(look + Math.floor(look / CURVES.length)) % DASHES.length];

const borderOf = (look) => (dashOf(look).length ? (dashOf(look)[0] > 2 ? "dashed" : "dotted") : "solid");

/** Returns the numbers of an axis, with as many digits as tell each from its neighbours. */
export function labels(ticks, increment) {
  let digits = 3;
  while (digits < 7 && ticks.some((tick) => Math.abs(Number(tick.toPrecision(digits)) - tick) > increment / 100)) digits++;
  return ticks.map((tick) => number(tick, digits));
}

/** Returns the last value of a column, which the legend shows while nothing is pointed at. */
function lastOf(plot, index) {
  if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) return null;
  return plot.data[index].findLast((value) => value !== null);
}

/** Returns the thickness of a stack's layer where the pointer is, or at the end. */
function layerOf({ data }, index, at) {
  const place = at ?? data[index].length - 1;
  return data[index][place] - (index > 1 ? data[index - 1][place] : 0);
}

/** Returns the ends of an axis with some room around the values. */
function room(least, most) {
  if (least === null || most === null || !Number.isFinite(least)) return [0, 1];
  const margin = (most - least || Math.abs(most) || 1) * 0.08;
  return [least === 0 ? 0 : least - margin, most + margin];
}

const DOTS = 260; // height of the scatter
const EDGE = { left: 52, right: 14, top: 16, bottom: 44 };
const FEW = 12; // different values of an axis up to which dots are spread around them, lest they hide each other
const SPREAD = 24; // pixels
const NEAR = 14; // pixels between the pointer and the dot that it means

/** Shows a dot for each trajectory; a click opens the nearest. `points`: as the server's. */
export function Scatter({ points, xName, yName, colorName, theme, onOpen }) {
  const [element, width] = useWidth();
  const canvas = useRef();
  const [near, setNear] = useState(null);
  const placed = useRef([]);
  useEffect(() => {
    if (width) placed.current = draw(canvas.current, width, points, xName, yName);
  }, [points, width, theme, xName, yName]);
  const nearest = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [best, least] = [null, NEAR ** 2];
    for (const [px, py, index] of placed.current) {
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance <= least) [best, least] = [index, distance];
    }
    return best;
  };
  const known = (points.color ?? []).filter((value) => typeof value === "number");
  const [least, most] = known.length ? [Math.min(...known), Math.max(...known)] : [null, null];
  return html`<figure class="scatter" ref=${element}>
    <figcaption>${yName} over ${xName} <span>${number(points.shown)} of ${number(points.matched)} trajectories; click one to open it</span></figcaption>
    <canvas ref=${canvas} role="img" aria-label="${points.shown} trajectories by ${xName} and ${yName}; the table below has all of them"
      onMouseMove=${(event) => setNear(nearest(event))} onMouseLeave=${() => setNear(null)}
      onClick=${(event) => { const index = nearest(event); if (index !== null) onOpen(points.keys[index]); }}></canvas>
    <p class="soft" aria-live="off">${near === null
      ? least === null ? " " : html`colour: ${colorName} ${number(least)} <span class="ramp">${[1, 2, 3, 4, 5, 6, 7, 8].map((step) => html`<i class="q${step}"></i>`)}</span> ${number(most)}`
      : `${points.keys[near]}: ${xName} ${number(points.x[near])}, ${yName} ${number(points.y[near])}${points.color ? `, ${colorName} ${number(points.color[near])}` : ""}`}</p>
  </figure>`;
}

/** Draws the dots; returns `[x, y, index]` of each. */
function draw(canvas, width, { x, y, color = [] }, xName, yName) {
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * scale, DOTS * scale];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${DOTS}px`];
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, DOTS);
  const shown = x.map((_, index) => index).filter((index) => Number.isFinite(x[index] ?? NaN) && Number.isFinite(y[index] ?? NaN));
  if (!shown.length) return [];
  const across = spanOf(shown.map((index) => x[index])), up = spanOf(shown.map((index) => y[index])), tint = spanOf(shown.map((index) => color[index] ?? 0));
  const toX = (value) => EDGE.left + ((value - across[0]) / (across[1] - across[0])) * (width - EDGE.left - EDGE.right);
  const toY = (value) => DOTS - EDGE.bottom - ((value - up[0]) / (up[1] - up[0])) * (DOTS - EDGE.top - EDGE.bottom);
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = ink("--soft");
  pen.strokeStyle = ink("--line");
  for (let tick = 0; tick <= 4; tick++) {
    const [vx, vy] = [across[0] + ((across[1] - across[0]) * tick) / 4, up[0] + ((up[1] - up[0]) * tick) / 4];
    pen.beginPath();
    pen.moveTo(EDGE.left, toY(vy));
    pen.lineTo(width - EDGE.right, toY(vy));
    pen.stroke();
    pen.textAlign = "right";
    pen.fillText(number(vy, 3), EDGE.left - 8, toY(vy) + 4);
    pen.textAlign = tick === 4 ? "right" : "center";
    pen.fillText(number(vx, 3), toX(vx), DOTS - EDGE.bottom + 26);
  }
  pen.textAlign = "center";
  pen.fillText(xName, (EDGE.left + width - EDGE.right) / 2, DOTS - 4);
  const strongest = ink("--seq");
  pen.fillStyle = strongest;
  const places = [];
  const [spreadX, spreadY] = [x, y].map((values) => (new Set(shown.map((index) => values[index])).size <= FEW ? SPREAD : 0));
  for (const index of shown) {
    const place = tint[1] > tint[0] ? ((color[index] ?? 0) - tint[0]) / (tint[1] - tint[0]) : 1;
    pen.globalAlpha = 0.15 + 0.75 * place;
    pen.beginPath();
    const px = toX(x[index]) + spreadX * (((index * 0.618034) % 1) - 0.5), py = toY(y[index]) + spreadY * (((index * 0.7548777) % 1) - 0.5);
    pen.arc(px, py, 3.2, 0, 2 * Math.PI);
    pen.fill();
    places.push([px, py, index]);
  }
  pen.globalAlpha = 1;
  return places;
}

/** Returns the least and the greatest value, apart. */
function spanOf(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (typeof value !== "number") continue;
    if (value < least) least = value;
    if (value > most) most = value;
  }
  if (least > most) return [0, 0];
  return least === most ? [least - 0.5, most + 0.5] : [least, most];
}
