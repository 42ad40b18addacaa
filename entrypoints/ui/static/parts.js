// Small components that several screens share.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import { colour, legend } from "./scales.js";
import { cut, number, visible } from "./text.js";

const LITTLE = 8; // lines that are not worth a button
const SHOWN = 20_000; // characters of a text before the reader asks for more: a line of a megabyte takes seconds to lay out

/** Shows what was asked for, that it is on its way, or why it did not come. */
export function Answer({ answer, children }) {
  const problem = answer.error && html`<p class="problem" role="alert">${answer.error.message}</p>`;
  const waits = !answer.error && html`<p class="soft" role="status">Reading …</p>`;
  // One element, whatever is in it: Preact puts what replaces several by other ones behind its neighbours.
  return html`<div class="answer">${problem}${answer.value ? children(answer.value) : waits}</div>`;
}

const SIGNS = { running: "●", finished: "✓", interrupted: "❙❙", failed: "✕", crashed: "✕", unknown: "?" };

/** Shows the status of a run by a sign, a word and a colour. */
export function Status({ status }) {
  return html`<span class="status ${status}"><span aria-hidden="true">${SIGNS[status] ?? "?"}</span> ${status}</span>`;
}

/** Shows a series of numbers as a small curve. */
export function Sparkline({ values, label }) {
  const known = values.map((value, index) => [index, value]).filter(([, value]) => value !== null);
  if (known.length < 2) return html`<span class="soft">–</span>`;
  const [least, most] = [Math.min(...known.map(([, v]) => v)), Math.max(...known.map(([, v]) => v))];
  const at = ([index, value]) =>
    `${((index / (values.length - 1)) * 96 + 2).toFixed(1)},${(20 - ((value - least) / (most - least || 1)) * 16).toFixed(1)}`;
  const [first, last] = [known[0][1], known[known.length - 1][1]];
  return html`<svg class="spark" viewBox="0 0 100 24" role="img" aria-label="${label} from ${number(first)} to ${number(last)}">
    <polyline points=${known.map(at).join(" ")} /></svg>`;
}

/** Shows a text of a model or a tool: hidden characters written out, and only the beginning of a very long one, or of one
 * with many more than so many `lines`. */
export function Text({ text, className = "", lines = Infinity }) {
  const [all, setAll] = useState(false);
  const first = all ? text : beginning(text, lines);
  const folded = first.length < text.length;
  const long = !all && first.length > SHOWN;
  return html`<div class="text ${className}" dir="auto">${visible(long ? cut(first, SHOWN) : first)}</div>
    ${(folded || long) && html`<button class="more" onClick=${() => setAll(true)}>Show all ${folded && !long ? `${number(text.split("\n").length)} lines` : `${number(text.length)} characters`}</button>`}`;
}

/** Returns the first `lines` of a text; all of it where little more follows. */
export function beginning(text, lines) {
  const all = text.split("\n");
  return all.length > lines + LITTLE ? all.slice(0, lines).join("\n") : text;
}

/** Shows a colour scale with its numbers. */
export function Legend({ scale, name, percent }) {
  const shown = (value) => (percent ? `${number(value * 100, 3)} %` : number(value, 3));
  const parts = legend(scale);
  return html`<div class="legend" role="img" aria-label="${name}: colours from ${shown(scale.low)} to ${shown(scale.high)}">
    <span>${shown(scale.low)}</span>
    <span class="ramp">${parts.map(([step, value]) => html`<i class=${step} title=${shown(value)}></i>`)}</span>
    ${scale.kind === "diverging" && html`<span class="centre">centre ${shown((scale.low + scale.high) / 2)}</span>`}
    <span>${shown(scale.high)}</span>
  </div>`;
}

/** Shows a number on the ground that its scale gives it. */
export const Shade = ({ value, scale }) => html`<span class="shade ${colour(value, scale)}">${number(value)}</span>`;

/** Copies a text, and says so. */
export function Copy({ text, children = "Copy" }) {
  const [said, setSaid] = useState(null);
  useEffect(() => {
    if (!said) return;
    const timer = setTimeout(() => setSaid(null), 1500);
    return () => clearTimeout(timer);
  }, [said]);
  const copy = () =>
    navigator.clipboard ? navigator.clipboard.writeText(text).then(() => setSaid("Copied"), () => setSaid("Select it and copy")) : setSaid("Select it and copy");
  return html`<button class="copy" onClick=${copy}><span aria-live="polite">${said ?? children}</span></button>`;
}

/** Shows views of one thing, of which one is open. `tabs`: name and title of each. */
export function Tabs({ tabs, open, onOpen, label }) {
  const list = useRef();
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (tabs.findIndex(([name]) => name === open) + step + tabs.length) % tabs.length;
    onOpen(tabs[next][0]);
    list.current.children[next].focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${move}>
    ${tabs.map(([name, title]) => html`<button role="tab" id="tab-${name}" aria-controls="panel" aria-selected=${name === open}
      tabindex=${name === open ? 0 : -1} onClick=${() => onOpen(name)}>${title}</button>`)}
  </div>`;
}

/** Returns an element's width, now and whenever it changes; it goes to the element as `ref`. */
export function useWidth() {
  const element = useRef();
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(element.current);
    setWidth(Math.floor(element.current.clientWidth));
    return () => watch.disconnect();
  }, []);
  return [element, width];
}
