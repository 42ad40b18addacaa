// The trajectories of a run: a filter, a scatter, and a table of any length.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { Scatter } from "./charts.js";
import { Answer } from "./parts.js";
import { go, link, trajectoryLink, useAnswer, useKeys, useMedia } from "./state.js";
import { number, oneLine, signed, visible } from "./text.js";
import { VirtualList } from "./virtual.js";

const PAGE = 200; // rows of one question
const WAIT = 150; // milliseconds after the last key before the filter is asked
const ROW = 36, CARD = 92; // pixels
const ORDERS = [
  ["", "newest step first"], ["step,group_id", "oldest step first"], ["-reward", "highest reward"], ["reward", "lowest reward"],
  ["-advantage", "highest advantage"], ["advantage", "lowest advantage"], ["-action_tokens", "longest"], ["action_tokens", "shortest"],
  ["-turns", "most turns"], ["-seconds", "slowest"],
];
const CHIPS = [
  ["updates", "kind = update"], ["evaluations", "kind = evaluation"], ["cut off", "stop_reason = length"], ["failed", "failure is not null"],
  ["taught nothing", "zero_spread"], ["starred", "star"],
];

export function Trajectories({ source, run, facts, route, theme, version }) {
  const { filter = "", sort = "", scatter = "" } = route.query;
  const [typed, setTyped] = useState(filter);
  const search = useRef();
  const set = (query) => go(link(["r", run, "t"], { filter, sort, scatter, ...query }), true);
  useEffect(() => setTyped(filter), [filter]);
  useEffect(() => {
    if (typed === filter) return;
    const timer = setTimeout(() => set({ filter: typed }), WAIT);
    return () => clearTimeout(timer);
  }, [typed]);
  useKeys({ "/": () => search.current.focus() });
  const toggle = (part) => {
    const parts = filter.split(/\s+and\s+/).filter(Boolean);
    set({ filter: (parts.includes(part) ? parts.filter((other) => other !== part) : [...parts, part]).join(" and ") });
  };
  return html`
    <h1 class="hidden">Trajectories of ${visible(facts.name)}</h1>
    <div class="filter">
      <input type="search" ref=${search} class="expression" aria-label="Filter" placeholder="Filter: reward < 0.5 and turns > 3, or words in quotes" spellcheck="false"
        autocapitalize="off" autocomplete="off" value=${typed} onInput=${(event) => setTyped(event.target.value)}
        onKeyDown=${(event) => event.key === "Escape" && event.target.blur()} />
      <label>Order <select value=${sort} onChange=${(event) => set({ sort: event.target.value })}>${ORDERS.map(([value, name]) => html`<option value=${value}>${name}</option>`)}</select></label>
      <${Language} source=${source} facts=${facts} />
    </div>
    <div class="chips" role="group" aria-label="Common filters">
      ${CHIPS.map(([name, part]) => html`<button aria-pressed=${filter.split(/\s+and\s+/).includes(part)} onClick=${() => toggle(part)}>${name}</button>`)}
      <button aria-pressed=${scatter !== ""} onClick=${() => set({ scatter: scatter ? "" : "reward" })}>scatter</button>
    </div>
    ${scatter !== "" && html`<${Cloud} source=${source} run=${run} facts=${facts} filter=${filter} theme=${theme} version=${version} y=${scatter} set=${set} />`}
    <${Table} key=${`${filter}\n${sort}`} source=${source} run=${run} filter=${filter} sort=${sort} version=${version} facts=${facts} />`;
}

function Language({ source, facts }) {
  const [open, setOpen] = useState(false);
  return html`<details class="help" onToggle=${(event) => setOpen(event.target.open)}><summary>How to filter</summary>
    ${open && html`<${LanguageHelp} source=${source} facts=${facts} />`}</details>`;
}

function LanguageHelp({ source, facts }) {
  const answer = useAnswer(() => source.help(), []);
  return html`<${Answer} answer=${answer}>${({ help }) => html`<div class="helping">
    <dl>${help.map(([example, about]) => html`<dt><code>${example}</code></dt><dd>${about}</dd>`)}</dl>
    <p class="soft">Columns: ${(facts.columns ?? []).map((column, index) => html`${index ? ", " : ""}<code title=${column.text}>${column.name}</code>`)}</p></div>`}<//>`;
}

const AXES = ["reward", "score", "advantage", "action_tokens", "turns", "seconds", "prompt_tokens", "step"];

function Cloud({ source, run, filter, theme, version, y, set }) {
  const [x, setX] = useState("action_tokens");
  const answer = useAnswer((signal) => source.points(run, { filter, x, y, color: "step" }, signal), [`${run} ${filter} ${x} ${y}`, version]);
  const choice = (label, value, onChange) => html`<label>${label} <select value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${AXES.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`;
  return html`<section class="cloud"><${Answer} answer=${answer}>${(points) => html`
    <${Scatter} points=${points} xName=${x} yName=${y} colorName="step" theme=${theme} onOpen=${(key) => go(trajectoryLink(run, key))} />`}<//>
    <p class="soft">${choice("Across", x, setX)} ${choice("Up", y, (value) => set({ scatter: value }))}</p></section>`;
}

function Table({ source, run, filter, sort, version, facts }) {
  const pages = useRef(new Map());
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [active, setActive] = useState(null);
  const [, setShown] = useState(0);
  const narrow = useMedia("(max-width: 760px)");
  const ending = useRef(new AbortController());
  const ask = (page, again = false) => {
    if (pages.current.has(page) && !again) return;
    if (!pages.current.has(page)) pages.current.set(page, null);
    source.trajectories(run, { filter, sort, page, size: PAGE }, ending.current.signal).then(
      (got) => {
        pages.current.set(page, got.rows);
        setAnswer(got);
        setError(null);
        setShown((count) => count + 1);
      },
      (problem) => {
        if (problem.name === "AbortError") return;
        if (pages.current.get(page) === null) pages.current.delete(page);
        setError(problem);
      });
  };
  useEffect(() => {
    const shown = [...pages.current.keys()];
    for (const page of shown.length ? shown : [0]) ask(page, true);
  }, [version]);
  useEffect(() => () => ending.current.abort(), []);
  const rowAt = (index) => pages.current.get(Math.floor(index / PAGE))?.[index % PAGE];
  const count = answer?.matched ?? 0;
  const move = (by) => setActive((old) => Math.min(count - 1, Math.max(0, old === null ? 0 : old + by)));
  useKeys({
    j: () => count && move(1), k: () => count && move(-1),
    Enter: () => active !== null && rowAt(active) && go(trajectoryLink(run, rowAt(active).key)),
    s: () => {
      const row = active === null ? null : rowAt(active);
      if (row && source.live) {
        source.note(run, { key: row.key, star: !row.star }).then(({ star }) => { row.star = star; setShown((old) => old + 1); }, setError);
      }
    },
  });
  if (error && !answer) return html`<p class="problem" role="alert">${error.message}</p>`;
  if (!answer) return html`<p class="soft" role="status">Reading …</p>`;
  return html`
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
    ${(answer.problems ?? []).map((problem) => html`<p class="problem">${problem}</p>`)}
    <p class="soft counted" role="status">${number(answer.matched)} of ${number(answer.total)} trajectories</p>
    ${!answer.total && html`<p>This run has kept no trajectories${facts.trainer && facts.trainer !== "rl" ? ": it learns from examples" : ""}.</p>`}
    ${count > 0 && html`<div class="list" role="table" aria-label="Trajectories" aria-rowcount=${count + 1}>
      <div class="row head" role="row" aria-rowindex="1">${["Step", "Group", "Reward", "Advantage", "Tokens", "End", "Reply"].map((name) => html`<span role="columnheader">${name}</span>`)}</div>
      <${VirtualList} count=${count} height=${narrow ? CARD : ROW} label="Rows" active=${active}
        need=${(from, to) => { for (let page = Math.floor(from / PAGE); page <= Math.floor((to - 1) / PAGE); page++) ask(page); }}
        row=${(index, style) => html`<${Row} key=${index} index=${index} style=${style} run=${run} row=${rowAt(index)} before=${index ? rowAt(index - 1) : null} active=${index === active} />`} />
    </div>`}`;
}

function Row({ run, row, before, active, index, style }) {
  if (!row) return html`<div class="row soft" role="row" style=${style} aria-rowindex=${index + 2}><span role="cell">…</span></div>`;
  const first = !before || before.group_id !== row.group_id || before.step !== row.step || before.kind !== row.kind;
  const idle = row.kind === "update" && row.zero_spread;
  return html`<div class="row ${first ? "first" : "same"} ${active ? "active" : ""}" role="row" style=${style} aria-rowindex=${index + 2} aria-current=${active ? "true" : null}>
    <span role="cell" class="step">${row.kind === "evaluation" ? html`<abbr title="evaluation">eval</abbr> ` : ""}${row.step}</span>
    <span role="cell" class="group"><a href=${trajectoryLink(run, row.key)}>${row.group_id}<span class="soft">/${row.sample_id}${row.branch > 0 ? `/${row.branch}` : ""}</span></a>${idle && html` <abbr class="idle" title="All rewards of the group are the same: it taught nothing">=</abbr>`}</span>
    <span role="cell" class="reward">${row.star && html`<span class="star" title="starred">★</span>`}${row.failure ? html`<span class="failure">failed</span>` : number(row.reward)}</span>
    <span role="cell" class="advantage">${row.advantage === null ? "–" : signed(row.advantage)}</span>
    <span role="cell" class="tokens">${number(row.action_tokens)}${row.turns > 1 ? html`<span class="soft"> in ${row.turns}</span>` : ""}</span>
    <span role="cell" class="end ${row.stop_reason === "length" ? "cut" : ""}">${row.failure ?? (row.stop_reason === "length" ? "cut off" : row.stop_reason ?? "–")}</span>
    <span role="cell" class="reply" dir="auto">${oneLine((row.failure ? row.failure_message : row.response) ?? "")}</span>
  </div>`;
}
