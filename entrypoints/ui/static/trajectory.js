// One trajectory: Conversation, Tokens, Group tree, Numbers, Raw.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { GroupTree } from "./groupview.js";
import { Answer, beginning, Copy, Tabs, Text } from "./parts.js";
import { policyLoss, SAMPLED, PROMPT } from "./quantities.js";
import { go, keyOf, link, trajectoryLink, useAnswer, useKeys } from "./state.js";
import { duration, number, oneLine, signed } from "./text.js";
import { Tokens } from "./tokenview.js";

const TABS = [["conversation", "Conversation"], ["tokens", "Tokens"], ["tree", "Group tree"], ["numbers", "Numbers"], ["raw", "Raw"]];

export function Trajectory({ source, run, facts, route }) {
  const key = keyOf(route);
  const answer = useAnswer(() => source.trajectory(run, key), [`${run}/${key}`]);
  const tab = TABS.some(([name]) => name === route.query.tab) ? route.query.tab : route.query.token !== undefined ? "tokens" : "conversation";
  const row = answer.value;
  const [problem, setProblem] = useState(null);
  const open = (other) => other && go(trajectoryLink(run, other, { tab: route.query.tab ?? (tab === "tokens" ? tab : null), by: route.query.by }));
  const set = (query, replace = true) => go(trajectoryLink(run, key, { tab, by: route.query.by, token: route.query.token, ...query }), replace);
  const list = link(["r", run, "t"]);
  const toStep = (by) => {
    const steps = (route.parts[2] === "e" ? facts.eval_steps : facts.update_steps) ?? [];
    const next = steps[steps.indexOf(Number(route.parts[3])) + by];
    if (next === undefined) return;
    const filter = `step = ${next} and kind = ${route.parts[2] === "e" ? "evaluation" : "update"}`;
    source.trajectories(run, { filter, sort: "", page: 0, size: 1 }).then(({ rows }) => rows.length && open(rows[0].key), setProblem);
  };
  const before = useRef("conversation");
  const [stars, setStars] = useState({}); // by key, of those that were changed here
  const starred = Boolean(stars[key] ?? row?.star);
  const star = () => source.live && row && source.note(run, { key, star: !starred }).then((note) => setStars((old) => ({ ...old, [key]: note.star })), setProblem);
  useKeys({
    j: () => open(row?.next), k: () => open(row?.previous), "]": () => toStep(1), "[": () => toStep(-1), s: star, Escape: () => go(list), "/": () => go(list),
    g: () => {
      if (tab !== "tree") before.current = tab;
      set({ tab: tab === "tree" ? before.current : "tree" });
    },
    ...Object.fromEntries(TABS.map(([name], index) => [String(index + 1), () => set({ tab: name })])),
  });
  return html`
    <nav class="crumbs" aria-label="Place"><a href=${list}>Trajectories</a>
      <span>${route.parts[2] === "e" ? "evaluation after step" : "step"} ${route.parts[3]}</span><span>group ${route.parts[4]}</span><span>sample ${route.parts[5]}${route.query.branch ? `, branch ${route.query.branch}` : ""}</span>
      <span class="grow"></span>
      <button disabled=${!row?.previous} onClick=${() => open(row.previous)}>← <span class="wide-only">previous </span><kbd>k</kbd></button>
      <button disabled=${!row?.next} onClick=${() => open(row.next)}><kbd>j</kbd><span class="wide-only"> next</span> →</button>
      ${source.live && html`<button aria-pressed=${starred} onClick=${star} aria-label="Star">${starred ? "★" : "☆"}</button>`}
    </nav>
    ${problem && html`<p class="problem" role="alert">${problem.message}</p>`}
    <${Answer} answer=${answer}>${(found) => html`
      <${Headline} row=${found} />
      <${Tabs} tabs=${TABS} open=${tab} onOpen=${(name) => set({ tab: name })} label="Views of the trajectory" />
      <section id="panel" role="tabpanel" aria-labelledby="tab-${tab}">
        ${tab === "conversation" && html`<${Conversation} key=${found.key} row=${found} />`}
        ${tab === "tokens" && (found.tokens ? html`<${ChosenTokens} row=${found} route=${route} set=${set} />` : html`<${Failure} row=${found} />`)}
        ${tab === "tree" && html`<${GroupTree} source=${source} run=${run} row=${found} />`}
        ${tab === "numbers" && html`<${Numbers} source=${source} run=${run} row=${found} />`}
        ${tab === "raw" && html`<${Raw} row=${found} />`}
      </section>
      ${source.live && html`<${Note} key=${key} source=${source} run=${run} row=${found} />`}`}<//>`;
}

function Headline({ row }) {
  const facts = row.failure
    ? [html`<span class="failure">failed: ${row.failure}</span>`]
    : [
        html`reward <b>${number(row.reward)}</b>`, row.score !== row.reward && row.score !== null && `score ${number(row.score)}`,
        row.answer && html`answer <b dir="auto">${oneLine(row.answer, 80)}</b>`,
        row.advantage !== null && `advantage ${signed(row.advantage)}`, `${number(row.action_tokens)} tokens`, row.turns > 1 && `${row.turns} turns`,
        row.stop_reason === "length" ? html`<b class="cut">cut off</b>` : row.stop_reason, row.seconds !== null && duration(row.seconds),
        row.kind === "update" && row.zero_spread && html`<span class="idle">its group taught nothing</span>`,
      ].filter(Boolean);
  return html`<h1 class="headline">${facts.map((fact, index) => html`${index ? " · " : ""}${fact}`)}</h1>
    ${row.label !== null && html`<p class="soft label">label: <span dir="auto">${row.label.slice(0, 300)}</span></p>`}`;
}

/** Keeps the token that the pointer is over to itself; the address has the one that was clicked. */
function ChosenTokens({ row, route, set }) {
  const kept = route.query.token === undefined ? null : Number(route.query.token);
  const [over, setOver] = useState(null);
  useEffect(() => setOver(null), [kept, row]);
  return html`<${Tokens} tokens=${row.tokens} total=${row.step_totals?.signal} by=${route.query.by ?? "advantage"} chosen=${over ?? kept}
    onBy=${(by) => set({ by })} onChosen=${(index, passing) => (passing ? setOver(index) : set({ token: index }))} />`;
}

const Failure = ({ row }) => html`<p class="failure">The episode failed${row.failure ? ` (${row.failure})` : ""}; it has no tokens.</p>${row.failure_message && html`<${Text} text=${row.failure_message} />`}`;

/** Returns stretches of tokens with one author and turn: `{ kind, turn, text, count, reward }`. */
function stretches(tokens) {
  const parts = [];
  for (let index = 0; index < tokens.count; index++) {
    const kind = tokens.kind[index];
    const turn = kind === SAMPLED && tokens.turn ? tokens.turn[index] : null;
    let last = parts[parts.length - 1];
    if (!last || last.kind !== kind || last.turn !== turn) parts.push((last = { kind, turn, texts: [], count: 0, reward: 0 }));
    last.texts.push(tokens.id?.[index] === -1 ? "***" : tokens.text.texts[tokens.text.index[index]]);
    last.count++;
    last.reward += kind === SAMPLED ? tokens.reward?.[index] ?? 0 : 0;
  }
  return parts.map(({ texts, ...part }) => ({ ...part, text: texts.join("") }));
}

const LINES = 16; // of a prompt, or of what an environment wrote, before the reader asks for more

function Conversation({ row }) {
  const parts = useMemo(() => (row.tokens ? stretches(row.tokens) : []), [row]);
  const [whole, setWhole] = useState(false);
  const lines = whole ? Infinity : LINES;
  const asked = openingOf(row, parts);
  const foldable = [...asked.map(([, text]) => text), row.feedback ?? "", ...parts.filter((part) => part.kind !== SAMPLED && part.kind !== PROMPT).map((part) => part.text)];
  const turn = (part) => (row.turns > 1 ? `turn ${part.turn ?? "–"}, ` : "");
  return html`<div class="conversation">
    ${!whole && foldable.some((text) => beginning(text, LINES).length < text.length) && html`<button class="more" onClick=${() => setWhole(true)}>Show all lines of every message</button>`}
    ${asked.map(([role, text]) => html`<${Message} role=${role} text=${text} lines=${lines} />`)}
    ${row.failure && html`<${Message} role="failure" note=${row.failure} text=${row.failure_message ?? ""} />`}
    ${parts.filter((part) => part.kind !== PROMPT).map((part) => part.kind === SAMPLED
      ? html`<${Message} role="assistant" text=${part.text} note=${`${turn(part)}${number(part.count)} tokens${row.turns > 1 && row.tokens.reward ? `, reward ${number(part.reward)}` : ""}`} />`
      : html`<${Message} role="environment" text=${part.text} lines=${lines} note=${`${number(part.count)} tokens, without loss`} />`)}
    ${!row.tokens && row.response && html`<${Message} role="assistant" text=${row.response} />`}
    ${row.feedback && html`<${Message} role="reward" note="feedback" text=${row.feedback} lines=${lines} />`}
  </div>`;
}

const bare = (text) => text.replace(/\s+|(\*\*\*)+/g, ""); // a hidden secret is one *** of a text, and one of each token

/** Returns what the first reply answers, as roles with texts: the messages of the row, or, where an environment or an
 * agent began with others, with a system prompt or with tools, what the model saw. */
export function openingOf(row, parts) {
  const saw = parts.find((part) => part.kind === PROMPT)?.text;
  const pictured = (row.messages ?? []).some(({ content }) => Array.isArray(content) && content.some(({ type }) => type !== "text"));
  const begunOtherwise = saw && row.prompt && !pictured && bare(saw) !== bare(row.prompt); // a picture is one mark of a prompt, and many tokens
  const messages = (!begunOtherwise && row.messages) || [{ role: "prompt", content: begunOtherwise ? saw : row.prompt ?? "" }];
  return messages.map((message) => [message.role ?? "message", contentOf(message)]);
}

function contentOf(message) {
  const { role, content, ...rest } = message;
  const text = typeof content === "string" ? content : content === null || content === undefined ? "" : JSON.stringify(content, null, 1);
  return Object.keys(rest).length ? `${text}${text ? "\n" : ""}${JSON.stringify(rest, null, 1)}` : text;
}

const Message = ({ role, text, note, lines }) => html`<article class="message ${["assistant", "user", "system", "environment", "tool", "failure"].includes(role) ? role : "other"}">
  <h2>${role}${note && html` <span class="soft">${note}</span>`}</h2><${Text} text=${text} lines=${lines} /></article>`;

function Numbers({ source, run, row }) {
  const shown = [
    ["reward", row.reward], ["score", row.score], ["baseline", row.baseline], ["advantage (mean)", row.advantage],
    ...Object.entries(row.reward_parts ?? {}).map(([name, value]) => [`part ${name}`, value]),
    ...Object.entries(row.metrics ?? {}).map(([name, value]) => [`metric ${name}`, value]),
    ["turns", row.turns], ["tokens of the prompt", row.prompt_tokens], ["sampled tokens", row.action_tokens], ["seconds", row.seconds],
    ["updates behind the oldest token", row.version_first], ["updates behind the newest token", row.version_last], ["data source", row.datasource],
  ].filter(([, value]) => value !== null && value !== undefined);
  const turns = row.tokens ? stretches(row.tokens).filter((part) => part.kind === SAMPLED) : [];
  return html`<div class="columns">
    <section><table class="figures"><tbody>${shown.map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${number(value, 6)}</td></tr>`)}</tbody></table></section>
    <section>
      ${turns.length > 1 && row.tokens.reward && html`<h2>Reward by turn</h2><table class="figures"><thead><tr><th>turn</th><th>tokens</th><th>reward</th></tr></thead>
        <tbody>${turns.map((part) => html`<tr><td>${part.turn}</td><td>${number(part.count)}</td><td>${number(part.reward)}</td></tr>`)}</tbody></table>`}
      ${row.kind === "update" && row.tokens && html`<${Loss} source=${source} run=${run} row=${row} />`}
    </section></div>`;
}

/** Shows the trajectory's part of the step's policy loss, and adds up the whole step from its tokens when asked. */
function Loss({ source, run, row }) {
  const own = policyLoss([row.tokens]);
  const [sum, setSum] = useState(null);
  const totals = row.step_totals;
  if (own === null) return null;
  const addUp = async () => {
    setSum({ asking: true });
    try {
      const rows = await tokensOfStep(source, run, row.step);
      setSum({ loss: policyLoss(rows), rows: rows.length });
    } catch (error) {
      setSum({ error });
    }
  };
  return html`<h2>Policy loss</h2>
    <p>Minus the sum of weight × advantage over this trajectory's tokens is <b>${number(own, 6)}</b>${totals ? html`, over the step's <b>${number(totals.loss, 6)}</b>` : ""}.
    ${totals?.logged_loss !== null && totals?.logged_loss !== undefined && html` The step logged <code>policy/policy_loss</code> ${number(totals.logged_loss, 6)}: it is the same with one optimizer step a rollout, whose ratios are 1.`}</p>
    ${source.live && html`<button onClick=${addUp} disabled=${sum?.asking}>Add up the step's tokens here</button>`}
    <p role="status" class="sum">${sum?.asking ? "Adding …" : sum?.error ? sum.error.message : sum ? `${number(sum.loss, 6)} from ${number(sum.rows)} trajectories` : ""}</p>`;
}

const MANY = 1000; // rows of one question

/** Returns the tokens of every trajectory that a step learned from. */
export async function tokensOfStep(source, run, step) {
  const keys = [];
  for (let page = 0, matched = 1; keys.length < matched && page * MANY < matched; page++) {
    const got = await source.trajectories(run, { filter: `kind = update and step = ${step}`, sort: "group_id", page, size: MANY });
    matched = got.matched;
    keys.push(...got.rows.map((other) => other.key));
  }
  const groups = [...new Set(keys.map((key) => key.split("/")[2]))];
  const rows = [];
  for (const group of groups) rows.push(...(await source.group(run, "step", step, group)).rows);
  return rows.filter((other) => other.tokens).map((other) => other.tokens);
}

function Raw({ row }) {
  const text = useMemo(() => JSON.stringify(row, null, 1), [row]);
  return html`<p><${Copy} text=${text}>Copy JSON<//> <span class="soft">the columns are explained in docs/trajectories.md</span></p><${Text} text=${text} className="raw" />`;
}

function Note({ source, run, row }) {
  const [note, setNote] = useState(row.note ?? "");
  const [tags, setTags] = useState((row.tags ?? []).join(", "));
  const [said, setSaid] = useState("");
  const save = (event) => {
    event.preventDefault();
    const list = tags.split(",").map((tag) => tag.trim()).filter(Boolean);
    source.note(run, { key: row.key, note, tags: list }).then(() => setSaid("Saved"), (error) => setSaid(error.message));
  };
  return html`<form class="note" onSubmit=${save}>
    <label>Tags <input value=${tags} placeholder="hack, good" onInput=${(event) => { setTags(event.target.value); setSaid(""); }} /></label>
    <label class="grow">Note <input value=${note} onInput=${(event) => { setNote(event.target.value); setSaid(""); }} /></label>
    <button>Save</button> <span role="status">${said}</span></form>`;
}
