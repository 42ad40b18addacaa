// The table of runs; two or more that are chosen are laid over each other: their curves, and the settings that differ.

import { html, useEffect, useMemo, useState } from "./vendor/preact.js";
import { Chart } from "./charts.js";
import { drawn } from "./panels.js";
import { Answer, Sparkline, Status } from "./parts.js";
import { go, link, useAnswer } from "./state.js";
import { duration, number, visible } from "./text.js";

const EVERY = 10_000; // milliseconds after which the list is read again: runs may go on

export function Runs({ source, route, theme }) {
  const [times, setTimes] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => source.live && !document.hidden && setTimes((before) => before + 1), EVERY);
    return () => clearInterval(timer);
  }, []);
  const answer = useAnswer(() => source.runs(), ["runs", times]);
  const chosen = (route.query.with ?? "").split("/").filter(Boolean); // a run's id may have any other character
  const choose = (id) =>
    go(link([], { with: (chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]).join("/") }), true);
  return html`<${Answer} answer=${answer}>${({ runs, root, problems }) => html`
    <h1>Runs <span class="soft">${root}</span></h1>
    ${(problems ?? []).map((problem) => html`<p class="problem">${problem}</p>`)}
    ${!runs.length && html`<p>There is no run here. Train one: <code>rollgrad train rl --config examples/sums.yaml</code></p>`}
    ${runs.length > 0 && html`<div class="wide"><table class="runs">
      <thead><tr><th><span class="hidden">Compare</span></th><th>Run</th><th>Status</th><th>Model</th><th>Data</th><th class="right">Steps</th><th>Reward</th>
        <th class="right">Best evaluation</th><th class="right">Time</th><th>Started</th></tr></thead>
      <tbody>${runs.map((run) => html`<${Row} key=${run.id} run=${run} chosen=${chosen.includes(run.id)} choose=${choose} />`)}</tbody>
    </table></div>`}
    ${runs.length > 1 && chosen.length < 2 && html`<p class="soft">Tick two runs or more to lay their curves over each other and see which settings differ.</p>`}
    ${chosen.length > 1 && html`<${Overlay} key=${chosen.join()} source=${source} runs=${chosen} version=${versionOf(runs, chosen)} theme=${theme} />`}
  `}<//>`;
}

function Row({ run, chosen, choose }) {
  const progress = run.steps ? `${number(run.step)} of ${number(run.steps)}` : number(run.step);
  return html`<tr>
    <td><input type="checkbox" aria-label="Compare ${visible(run.name)}" checked=${chosen} onChange=${() => choose(run.id)} /></td>
    <td class="main"><a href=${link(["r", run.id])}>${visible(run.name)}</a>${run.problems?.length > 0 && html` <span class="problem" title=${run.problems.join("\n")}>${run.problems.length} unreadable</span>`}</td>
    <td title=${run.reason ?? ""}><${Status} status=${run.status} />${run.status === "running" && run.heartbeat_age !== null && html`<span class="soft"> ${duration(run.heartbeat_age)} ago</span>`}
      ${run.findings?.length > 0 && html` <a class="problem found" href=${link(["r", run.id])} title=${run.findings.join("\n")}>${run.findings.length} ${run.findings.length > 1 ? "findings" : "finding"}</a>`}</td>
    <td data-name="Model">${run.model ?? "–"}</td><td data-name="Data">${run.dataset ?? "–"}</td>
    <td class="right" data-name="Steps">${progress}</td>
    <td><${Sparkline} values=${run.rewards ?? []} label=${run.spark ?? "reward"} /></td>
    <td class="right" data-name="Best evaluation" title=${run.eval?.metric ?? ""}>${run.eval ? `${number(run.eval.best)} at ${number(run.eval.best_step)}` : "–"}</td>
    <td class="right" data-name="Time">${duration(run.seconds)}</td>
    <td data-name="Started">${run.started ? new Date(run.started).toLocaleString([], { dateStyle: "short", timeStyle: "short" }) : "–"}</td>
  </tr>`;
}

/** Returns what changes when one of the chosen runs has gone on. */
const versionOf = (runs, chosen) => runs.filter(({ id }) => chosen.includes(id)).map(({ id, step, status }) => [id, step, status]).join();

function Overlay({ source, runs, version, theme }) {
  const answer = useAnswer(
    () => Promise.all(runs.map((run) => Promise.all([source.run(run), source.metrics(run)]))), [runs.join(), version]);
  return html`<${Answer} answer=${answer}>${(answers) => html`
    <${Curves} answers=${answers} theme=${theme} />
    <${Differences} runs=${answers.map(([run]) => visible(run.name))} settings=${answers.map(([run]) => run.settings ?? {})} />`}<//>`;
}

function Curves({ answers, theme }) {
  const panels = useMemo(() => {
    const metrics = [...new Set(answers.flatMap(([, { series }]) => drawn(series).filter((panel) => !panel.stack).flatMap((panel) => Object.keys(panel.curves).filter((name) => series[name]))))];
    return metrics.map((metric) => [
      metric,
      answers.map(([run, { series }], look) => ({ name: visible(run.name), look, steps: [], values: [], ...series[metric] })).filter((curve) => curve.steps.length),
    ]);
  }, [answers]);
  return html`<div class="charts">${panels.map(([metric, curves]) => html`<${Chart} key=${metric} title=${metric} unit="" curves=${curves} theme=${theme} shared="overlay" />`)}</div>`;
}

function Differences({ runs, settings }) {
  const [all, setAll] = useState(false);
  const names = [...new Set(settings.flatMap(Object.keys))].sort();
  const shown = names.filter((name) => all || new Set(settings.map((values) => written(values[name]))).size > 1);
  return html`<h2>Settings that differ <label class="soft"><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} /> show all</label></h2>
    ${shown.length === 0 ? html`<p>All settings are the same.</p>` : html`<div class="wide"><table class="settings">
      <thead><tr><th>Setting</th>${runs.map((run) => html`<th>${run}</th>`)}</tr></thead>
      <tbody>${shown.map((name) => html`<tr key=${name}><th scope="row">${name}</th>${settings.map((values) => html`<td>${written(values[name])}</td>`)}</tr>`)}</tbody>
    </table></div>`}`;
}

/** Returns a setting's value as it stands in YAML, and `–` for none. */
export const written = (value) => (value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
