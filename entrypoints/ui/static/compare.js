// Evaluated prompts over the run: which improved, and one prompt's replies at two moments or of two runs, word by word.

import { html, useMemo, useState } from "./vendor/preact.js";
import { wordDiff } from "./diff.js";
import { Answer, Sparkline, Text } from "./parts.js";
import { go, link, trajectoryLink, useAnswer } from "./state.js";
import { number, oneLine, signed, visible } from "./text.js";

const ORDERS = {
  better: ["improved most", (a, b) => b.change - a.change],
  worse: ["got worse", (a, b) => a.change - b.change],
  flips: ["changed most often", (a, b) => b.flips - a.flips],
  hardest: ["lowest at the end", (a, b) => (a.last ?? 0) - (b.last ?? 0)],
};
const MOST = 200; // prompts that are listed at once

export function Compare({ source, run, facts, route, version }) {
  const answer = useAnswer(() => source.compare(run), [run, version]);
  const { prompt, order = "better", find = "" } = route.query;
  const set = (query) => go(link(["r", run, "compare"], { ...route.query, ...query }), true);
  return html`<h1>Compare <span class="soft">the replies of ${visible(facts.name)} to held-out prompts</span></h1>
    <${Answer} answer=${answer}>${({ steps, prompts, metric }) => !prompts.length
      ? html`<p>This run has no evaluations yet: <code>--eval.steps 4</code> evaluates every four steps.</p>`
      : html`<div class="compare ${prompt ? "with" : ""}">
        <${Prompts} prompts=${prompts} steps=${steps} metric=${metric} order=${order} find=${find} chosen=${prompt} set=${set} />
        ${prompt && html`<${Replies} key=${prompt} source=${source} run=${run} prompt=${prompt} query=${route.query} set=${set} />`}
      </div>`}<//>`;
}

function Prompts({ prompts, steps, metric, order, find, chosen, set }) {
  const shown = useMemo(() => {
    const words = find.toLowerCase();
    return prompts.filter((prompt) => prompt.prompt.toLowerCase().includes(words)).sort((ORDERS[order] ?? ORDERS.better)[1]);
  }, [prompts, order, find]);
  const shared = useMemo(() => sharedBeginning(prompts.map((prompt) => prompt.prompt)), [prompts]);
  return html`<section class="prompts">
    <div class="filter"><input type="search" aria-label="Search prompts" placeholder="Search ${prompts.length} prompts" value=${find} onInput=${(event) => set({ find: event.target.value })} />
      <label>Order <select value=${order} onChange=${(event) => set({ order: event.target.value })}>${Object.entries(ORDERS).map(([name, [title]]) => html`<option value=${name}>${title}</option>`)}</select></label></div>
    <p class="soft">${metric} at ${steps.length} ${steps.length === 1 ? "evaluation" : "evaluations"}, step ${steps[0]} to ${steps[steps.length - 1]}${shown.length > MOST ? `; the first ${MOST} of ${shown.length} prompts` : ""}</p>
    <ul>${shown.slice(0, MOST).map((prompt) => html`<li key=${prompt.prompt_id}>
      <button aria-pressed=${chosen === prompt.prompt_id} onClick=${() => set({ prompt: prompt.prompt_id })}>
        <span class="what" dir="auto">${shared ? "… " : ""}${oneLine(prompt.prompt.slice(shared), 160)}</span>
        <${Sparkline} values=${prompt.scores} label=${metric} />
        <span class="change">${number(prompt.first, 3)} → ${number(prompt.last, 3)}</span>
      </button></li>`)}</ul></section>`;
}

const LEAST_SHARED = 24; // characters: a shorter beginning is shown with each prompt

/** Returns the length of the words that all texts begin with, such as those of a system prompt; 0 if it is short. */
function sharedBeginning(texts) {
  if (texts.length < 2) return 0;
  let length = 0;
  while (length < texts[0].length && texts.every((text) => text[length] === texts[0][length])) length++;
  const words = texts[0].slice(0, length).search(/\S+$/);
  length = words < 0 ? length : words;
  return length < LEAST_SHARED ? 0 : length;
}

function Replies({ source, run, prompt, query, set }) {
  const other = query.other ?? run;
  const runs = useAnswer(() => source.runs(), []);
  const first = useAnswer(() => source.compared(run, prompt), [`${run}/${prompt}`]);
  const second = useAnswer(() => source.compared(other, prompt), [`${other}/${prompt}`]);
  return html`<section class="replies"><${Answer} answer=${first}>${(mine) => html`
    <details class="fold"><summary>Prompt</summary><${Text} text=${mine.prompt ?? ""} /></details>
    ${mine.label !== null && html`<p class="soft">label: ${visible(String(mine.label)).slice(0, 300)}</p>`}
    ${runs.value?.runs.length > 1 && html`<label>Against <select value=${other} onChange=${(event) => set({ other: event.target.value === run ? null : event.target.value, to: null })}>
      ${runs.value.runs.map(({ id, name }) => html`<option value=${id}>${id === run ? "the same run" : visible(name)}</option>`)}</select></label>`}
    <${Answer} answer=${second}>${(theirs) => html`<${Difference} run=${run} other=${other} mine=${mine.steps} theirs=${theirs.steps} query=${query} set=${set} />`}<//>`}<//></section>`;
}

function Difference({ run, other, mine, theirs, query, set }) {
  const [sample, setSample] = useState(0);
  const place = (steps, wanted, otherwise) => {
    const found = steps.findIndex(({ step }) => String(step) === wanted);
    return found < 0 ? otherwise : found;
  };
  const from = place(mine, query.from, 0), to = place(theirs, query.to, theirs.length - 1);
  if (!mine.length || !theirs.length) return html`<p>There is no reply to this prompt.</p>`;
  const most = Math.max(mine[from].replies.length, theirs[to].replies.length);
  const [a, b] = [mine[from].replies[Math.min(sample, mine[from].replies.length - 1)], theirs[to].replies[Math.min(sample, theirs[to].replies.length - 1)]];
  const slider = (name, steps, at, title) => html`<label class="slider">${title} <input type="range" min="0" max=${steps.length - 1} step="1" value=${at} disabled=${steps.length < 2}
      aria-valuetext="step ${steps[at].step}" onInput=${(event) => set({ [name]: steps[Number(event.target.value)].step })} /> <output>step ${steps[at].step}</output></label>`;
  return html`
    <div class="sliders">${slider("from", mine, from, "From")} ${slider("to", theirs, to, other === run ? "to" : `to ${other},`)}
      ${most > 1 && html`<label>Reply <select value=${sample} onChange=${(event) => setSample(Number(event.target.value))}>${Array.from({ length: most }, (_, index) => html`<option value=${index}>${index + 1} of ${most}</option>`)}</select></label>`}</div>
    ${a && b ? html`<p class="soft">score ${number(a.score)} → ${number(b.score)} (${signed((b.score ?? 0) - (a.score ?? 0))}), ${number(a.action_tokens)} → ${number(b.action_tokens)} tokens · <a href=${trajectoryLink(run, a.key)}>open the first</a> · <a href=${trajectoryLink(other, b.key)}>open the second</a></p>
      <${Words} before=${a.response ?? ""} after=${b.response ?? ""} />` : html`<p>One of them has no reply.</p>`}`;
}

function Words({ before, after }) {
  const parts = useMemo(() => wordDiff(before, after), [before, after]);
  if (before === after) return html`<p class="soft">Both are the same, to the letter.</p><${Text} text=${after} />`;
  return html`<div class="text diff" dir="auto">${parts.map(([kind, text]) => kind === 0 ? visible(text) : kind > 0 ? html`<ins>${visible(text)}</ins>` : html`<del>${visible(text)}</del>`)}</div>`;
}
