// Overview of a run: how it stands, what was found, its curves, settings, files, and commands to go on with.

import { html, useMemo, useState } from "./vendor/preact.js";
import { Chart } from "./charts.js";
import { drawn } from "./panels.js";
import { Answer, Copy, Status } from "./parts.js";
import { Rescorings } from "./rescored.js";
import { link, useAnswer } from "./state.js";
import { bytes, duration, number, visible } from "./text.js";
import { written } from "./runs.js";

export function Overview({ source, run, facts, theme, version }) {
  const metrics = useAnswer(() => source.metrics(run), [run, version]);
  const findings = useAnswer(() => source.findings(run), [run, version]);
  return html`
    <h1>${visible(facts.name)} <${Status} status=${facts.status} /></h1>
    <p class="facts">${factsOf(facts, source.live).join(" · ")}</p>
    ${source.made && html`<p class="soft">As it stood at ${new Date(source.made).toLocaleString()}, when this report was written.</p>`}
    ${facts.reason && html`<p class="problem">${visible(facts.reason)}</p>`}
    ${(facts.problems ?? []).map((problem) => html`<p class="problem">${problem}</p>`)}
    <${Answer} answer=${findings}>${(found) => html`<${Findings} run=${run} facts=${facts} found=${found} />`}<//>
    <${Answer} answer=${metrics}>${(known) => html`<${Curves} known=${known} theme=${theme} />`}<//>
    ${source.live && facts.rescored?.length > 0 && html`<${Rescorings} run=${run} list=${facts.rescored} />`}
    <${Settings} settings=${facts.settings ?? {}} />
    <div class="columns">
      <section><h2>Go on</h2>${Object.entries(facts.commands ?? {}).map(([name, command]) => html`
        <div class="command"><span>${name}</span><code tabindex="0">${command}</code><${Copy} text=${command} /></div>`)}</section>
      <section><h2>Files</h2><table class="files"><tbody>${(facts.files ?? []).map((file) => html`<tr><td>${file.name}</td><td class="right">${bytes(file.bytes)}</td></tr>`)}</tbody></table></section>
    </div>`;
}

function factsOf(facts, live) {
  const steps = facts.steps ? `step ${number(facts.step)} of ${number(facts.steps)}` : `${number(facts.step)} steps`;
  return [
    steps, facts.seconds === null ? null : duration(facts.seconds), facts.trainer && `rollgrad train ${facts.trainer}`, facts.model, facts.dataset,
    facts.eval && `${facts.eval.metric} at best ${number(facts.eval.best)} (step ${number(facts.eval.best_step)})`,
    facts.rows ? `${number(facts.rows)} trajectories` : null, facts.host && `on ${facts.host}`,
    live && facts.status === "running" && facts.heartbeat_age !== null ? `heartbeat ${duration(facts.heartbeat_age)} ago` : null,
  ].filter(Boolean);
}

const STEPS_OF_SIGN = 3; // rollouts in a row in which a sign must be seen

function Findings({ run, facts, found }) {
  if (!found.findings.length && facts.step < Math.min(STEPS_OF_SIGN, facts.steps ?? STEPS_OF_SIGN)) {
    return html`<section class="findings"><h2>Findings</h2><p class="soft">None yet: a sign must be seen in ${STEPS_OF_SIGN} steps in a row.</p></section>`;
  }
  if (!found.findings.length) return html`<section class="findings"><h2>Findings</h2><p class="good"><span aria-hidden="true">✓</span> No sign that keeps the run from learning.</p></section>`;
  return html`<section class="findings"><h2>Findings</h2>
    <ul>${found.findings.map((finding) => html`<li key=${finding.name + finding.since} class=${finding.holds ? "holds" : "past"}>
      <p><b>${finding.name.replaceAll("_", " ")}</b> <span class="soft">steps ${finding.since} to ${finding.until}${finding.holds ? ", still so" : ""}${finding.before ? `, and ${finding.before} times before` : ""}</span></p>
      <p>${finding.evidence} Look at ${flagged(finding.look_at)}.</p>
      ${finding.filter && html`<a href=${link(["r", run, "t"], { filter: finding.filter })}>Show these trajectories</a>`}
    </li>`)}</ul></section>`;
}

/** Returns a text with its flags as code, each in one piece. */
const flagged = (text) => text.split(/(--[\w.]+)/).map((part, place) => (place % 2 ? html`<code class="flag">${part}</code>` : part));

function Curves({ known, theme }) {
  const [search, setSearch] = useState("");
  const { series } = known;
  const panels = useMemo(() => drawn(series), [series]);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? Object.keys(series).filter((name) => words.every((word) => name.toLowerCase().includes(word))).sort() : null;
  const shown = found
    ? found.slice(0, 24).map((name) => ({ title: name, unit: "", curves: { [name]: name } }))
    : panels;
  return html`<section><div class="heading"><h2>Curves</h2>
      <input type="search" placeholder="Search all ${Object.keys(series).length} metrics" aria-label="Search metrics" value=${search} onInput=${(event) => setSearch(event.target.value)} /></div>
    ${known.broken_lines > 0 && html`<p class="problem">${known.broken_lines} lines of metrics.jsonl cannot be read.</p>`}
    ${found && html`<p class="soft" role="status">${found.length} metrics${found.length > 24 ? "; the first 24 are shown" : ""}</p>`}
    ${!shown.length && html`<p class="soft">${found ? "No metric has these words." : "No metrics were logged yet."}</p>`}
    <div class="charts">${shown.map((panel) => html`<${Panel} key=${panel.title} panel=${panel} series=${series} theme=${theme} />`)}</div></section>`;
}

function Panel({ panel, series, theme }) {
  const curves = useMemo(
    () => Object.entries(panel.curves).filter(([metric]) => series[metric]).map(([metric, name]) => ({ name, ...series[metric] })),
    [panel, series]);
  const whole = !panel.stack || Object.keys(panel.curves).pop() in series;
  const shown = panel.stack && curves.length === 1 ? [{ ...curves[0], name: "all" }] : curves; // of which no parts are known
  return whole && html`<${Chart} title=${panel.title} unit=${panel.unit} curves=${shown} stack=${panel.stack && curves.length > 1} theme=${theme} />`;
}

function Settings({ settings }) {
  const [search, setSearch] = useState("");
  const names = Object.keys(settings).sort();
  if (!names.length) return null;
  const shown = names.filter((name) => `${name} ${written(settings[name])}`.toLowerCase().includes(search.toLowerCase()));
  return html`<details class="fold"><summary>Settings <span class="soft">${names.length}</span></summary>
    <input type="search" placeholder="Search settings" aria-label="Search settings" value=${search} onInput=${(event) => setSearch(event.target.value)} />
    <div class="wide"><table class="settings"><tbody>${shown.map((name) => html`<tr key=${name}><th scope="row">${name}</th><td>${written(settings[name])}</td></tr>`)}</tbody></table></div></details>`;
}
