// A trajectory's tokens, coloured by one of their numbers; the numbers of one token at a time.

import { html, useEffect, useLayoutEffect, useMemo, useRef } from "./vendor/preact.js";
import { Legend } from "./parts.js";
import { available, clipped, ENVIRONMENT, masked, numbersOf, PROMPT, QUANTITIES, SAMPLED } from "./quantities.js";
import { colour, scaleOf } from "./scales.js";
import { useKeys } from "./state.js";
import { cut, number, visible } from "./text.js";

const BLOCK = 500; // tokens of a block: the browser lays out only the blocks near the window
const PORTION = 3000; // tokens that are made at once
const LONGEST = 400; // characters that are shown of one token

/** Shows `tokens` coloured by `by`, with token number `chosen` marked. `total`: signal of the whole step. */
export function Tokens({ tokens, total, by, chosen, onBy, onChosen }) {
  const names = useMemo(() => available(tokens), [tokens]);
  const name = names.includes(by) ? by : names[0];
  const quantity = QUANTITIES[name];
  const [values, scale] = useMemo(() => {
    if (!quantity) return [[], null];
    const part = quantity.percent && total ? 1 / total : 1;
    const found = tokens.kind.map((kind, index) => {
      const value = kind === PROMPT || kind === ENVIRONMENT ? null : quantity.of(tokens, index);
      return value === null || value === undefined ? null : value * part;
    });
    return [found, scaleOf(found, quantity.scale, quantity.centre)];
  }, [tokens, name, total]);
  const move = (by) => onChosen(Math.min(tokens.count - 1, Math.max(0, (chosen ?? -1) + by)));
  useKeys({ ArrowRight: () => move(1), ArrowLeft: () => move(-1) });
  return html`
    <div class="tokenbar">
      <label>Colour by <select value=${name} onChange=${(event) => onBy(event.target.value)}>
        ${names.map((value) => html`<option value=${value}>${QUANTITIES[value].name}</option>`)}</select></label>
      ${scale && html`<${Legend} scale=${scale} name=${quantity.name} percent=${quantity.percent && total} />`}
      <span class="soft about">${quantity?.about}</span>
    </div>
    <p class="key soft"><span class="tok prompt">prompt</span> <span class="tok environment">written by the environment</span> <span class="tok masked">weight 0: not learned from</span> <span class="tok clipped">ratio clipped</span> <span class="tok turn">first of a turn</span></p>
    <div class="tokenview">
      <${Flow} tokens=${tokens} values=${values} scale=${scale} chosen=${chosen} onChosen=${onChosen} />
      <${Numbers} tokens=${tokens} index=${chosen} total=${total} />
    </div>`;
}

/** The text itself, made without a component for each token: there may be tens of thousands. The beginning is there at
 * once, the rest comes in portions between which the page answers. */
function Flow({ tokens, values, scale, chosen, onChosen }) {
  const element = useRef();
  const spans = useRef([]);
  const paint = useRef();
  const firsts = useMemo(() => firstOfTurns(tokens), [tokens]);
  paint.current = (span, index) => {
    const kind = tokens.kind[index];
    let name = "tok";
    if (kind === PROMPT) name += " prompt";
    else if (kind === ENVIRONMENT) name += " environment";
    else {
      const step = colour(values[index], scale);
      if (step) name += " " + step;
      if (masked(tokens, index)) name += " masked";
      if (clipped(tokens, index)) name += " clipped";
      if (firsts.has(index)) name += " turn";
    }
    span.className = name;
  };
  useLayoutEffect(() => {
    element.current.replaceChildren();
    spans.current = [];
    let timer = null;
    const more = (upTo) => {
      append(element.current, tokens, spans.current, Math.min(tokens.count, upTo), paint.current);
      if (spans.current.length < tokens.count) timer = setTimeout(() => more(spans.current.length + PORTION));
    };
    more(Math.max(PORTION, (chosen ?? 0) + BLOCK));
    return () => clearTimeout(timer);
  }, [tokens]);
  useLayoutEffect(() => spans.current.forEach(paint.current), [values, scale]);
  useEffect(() => {
    const span = spans.current[chosen];
    if (!span) return;
    span.classList.add("chosen");
    const box = span.getBoundingClientRect();
    if (box.top < 90 || box.bottom > innerHeight - 40) span.scrollIntoView({ block: "center" });
    return () => span.classList.remove("chosen");
  }, [chosen, tokens, values, scale]);
  const at = (event) => event.target.dataset?.i;
  // The pointer shows the numbers of what is below it; a click keeps them, and makes the address a link to the token.
  return html`<div class="flow" ref=${element} dir="auto" tabindex="0" role="group" aria-label="${tokens.count} tokens; arrow keys choose one"
    onMouseOver=${(event) => at(event) !== undefined && onChosen(Number(at(event)), true)}
    onClick=${(event) => at(event) !== undefined && onChosen(Number(at(event)))}></div>`;
}

/** Adds spans to `place` until there are `upTo` of them. */
function append(place, tokens, spans, upTo, paint) {
  let block = place.lastChild;
  for (let index = spans.length; index < upTo; index++) {
    // A block ends with a line of the text; where there is none, as if the line were full.
    const full = block && block.childElementCount >= BLOCK && (endsLine(tokens, index - 1) || block.childElementCount >= 2 * BLOCK);
    if (!block || full) {
      block = place.appendChild(document.createElement("div"));
      block.className = "block";
    }
    const span = document.createElement("span");
    span.textContent = tokens.id?.[index] === -1 ? "***" : shown(tokens.text.texts[tokens.text.index[index]]);
    span.dataset.i = index;
    paint(span, index);
    block.appendChild(span);
    spans.push(span);
  }
}

/** Returns the indices of the first sampled token of each turn. */
function firstOfTurns(tokens) {
  const firsts = new Set();
  let turn = null;
  tokens.turn?.forEach((value, index) => {
    if (tokens.kind[index] === SAMPLED && value !== turn) {
      turn = value;
      firsts.add(index);
    }
  });
  return firsts;
}

const endsLine = (tokens, index) => tokens.text.texts[tokens.text.index[index]].endsWith("\n");

function shown(text) {
  const all = visible(text.length > LONGEST ? cut(text, LONGEST) + "…" : text);
  return all.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

function Numbers({ tokens, index, total }) {
  if (index === null || index === undefined || !(index < tokens.count)) {
    return html`<aside class="numbers soft" aria-live="polite">Point at a token, tap it, or use the arrow keys, to see its numbers.</aside>`;
  }
  const text = tokens.text.texts[tokens.text.index[index]];
  const kind = ["prompt", "sampled", "environment"][tokens.kind[index]];
  return html`<aside class="numbers" aria-live="polite">
    <p class="what"><code dir="auto">${visible(JSON.stringify(cut(text, LONGEST)))}</code> <span class="soft">token ${index} · ${kind}${masked(tokens, index) ? " · weight 0" : ""}${clipped(tokens, index) ? " · ratio clipped" : ""}</span></p>
    <dl>${numbersOf(tokens, index, total).map(([name, value]) => html`<dt>${name}</dt><dd>${name === "share of the gradient" ? `${number(value * 100, 3)} %` : name === "token" ? value : number(value)}</dd>`)}</dl>
  </aside>`;
}
