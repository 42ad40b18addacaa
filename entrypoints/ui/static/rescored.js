// Rollouts that `rollgrad rescore` judged again: the old reward against the new one.

import { html, useMemo, useState } from "./vendor/preact.js";
import { Scatter } from "./charts.js";
import { Answer } from "./parts.js";
import { written } from "./runs.js";
import { go, link, trajectoryLink, useAnswer } from "./state.js";
import { number, signed } from "./text.js";

const MOST = 500; // rows that are listed
const SHOWN = {
  changed: ["order in the group changed", (row) => row.rank_changed || row.sign_changed],
  other: ["another reward", (row) => row.new !== row.old],
  failed: ["not judged", (row) => row.new === null],
  all: ["all", () => true],
};

/** Lists a run's rescorings, for its overview. */
export const Rescorings = ({ run, list }) => html`<section><h2>Another reward</h2><ul class="plain">${list.map((one) => html`<li key=${one.name}>
  ${one.problem ? html`<span class="problem">${one.problem}</span>` : html`<a href=${link(["r", run, "rescored", one.name])}>${one.name}</a> <span class="soft">${written(one.reward)}: ${said(one)}</span>`}</li>`)}</ul></section>`;

const said = (summary) =>
  `${number(summary.rows)} rollouts, ${number(summary.same)} with the same reward, ${number(summary.rank_changed)} with another place in their group` +
  (summary.failed ? `, ${number(summary.failed)} not judged` : "");

export function Rescored({ source, run, route, theme }) {
  const name = route.parts[3];
  const answer = useAnswer(() => source.rescored(run, name), [`${run}/${name}`]);
  return html`<nav class="crumbs" aria-label="Place"><a href=${link(["r", run])}>Overview</a><span>another reward</span></nav>
    <h1>${name}</h1>
    <${Answer} answer=${answer}>${(found) => html`<p class="facts">${written(found.reward)}: ${said(found.summary)}</p><${Rows} run=${run} rows=${found.rows} theme=${theme} />`}<//>`;
}

function Rows({ run, rows, theme }) {
  const [shown, setShown] = useState("changed");
  const points = useMemo(() => {
    const judged = rows.filter((row) => row.old !== null && row.new !== null);
    return { matched: rows.length, shown: judged.length, keys: judged.map((row) => row.key), x: judged.map((row) => row.old), y: judged.map((row) => row.new) };
  }, [rows]);
  const listed = useMemo(() => {
    const change = (row) => Math.abs((row.new ?? 0) - (row.old ?? 0));
    return rows.filter(SHOWN[shown][1]).sort((a, b) => change(b) - change(a));
  }, [rows, shown]);
  return html`<${Scatter} points=${points} xName="old reward" yName="new reward" colorName="" theme=${theme} onOpen=${(key) => go(trajectoryLink(run, key))} />
    <div class="chips" role="group" aria-label="Rows">${Object.entries(SHOWN).map(([value, [title]]) => html`<button aria-pressed=${shown === value} onClick=${() => setShown(value)}>${title}</button>`)}</div>
    <p class="soft" role="status">${number(listed.length)} rollouts${listed.length > MOST ? `; the ${MOST} with the greatest change are listed` : ""}</p>
    ${listed.length > 0 && html`<div class="wide"><table class="figures"><thead><tr><th>Rollout</th><th class="right">Old</th><th class="right">New</th><th class="right">Change</th><th>In its group</th></tr></thead>
      <tbody>${listed.slice(0, MOST).map((row) => html`<tr key=${row.key}><td><a href=${trajectoryLink(run, row.key)}>${row.key}</a></td><td class="right">${number(row.old)}</td><td class="right">${number(row.new)}</td>
        <td class="right">${row.new === null || row.old === null ? "–" : signed(row.new - row.old)}</td>
        <td>${row.sign_changed ? "other side of the mean" : row.rank_changed ? "another place" : ""}</td></tr>`)}</tbody></table></div>`}`;
}
