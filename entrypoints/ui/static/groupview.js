// The rollouts of one prompt as a tree: what they share once, and rewards at the leaves.

import { html, useMemo } from "./vendor/preact.js";
import { Answer, Shade } from "./parts.js";
import { scaleOf } from "./scales.js";
import { go, trajectoryLink, useAnswer } from "./state.js";
import { number, signed, visible } from "./text.js";
import { treeOf } from "./tree.js";

const BEGIN = 240, END = 120; // characters that are shown of a long stretch
const OPEN = 2000; // characters of a stretch that is open at first

export function GroupTree({ source, run, row }) {
  const [kind, step, group] = row.key.split("/");
  const answer = useAnswer(() => source.group(run, kind, step, group), [`${run}/${kind}/${step}/${group}`]);
  return html`<${Answer} answer=${answer}>${({ rows }) => html`<${Tree} run=${run} rows=${rows} current=${row.key} />`}<//>`;
}

function Tree({ run, rows, current }) {
  const played = useMemo(() => rows.filter((row) => row.tokens), [rows]);
  const failed = rows.filter((row) => !row.tokens);
  const tree = useMemo(() => treeOf(played.map((row) => row.tokens.id)), [played]);
  const rewards = played.map((row) => row.reward);
  const scale = useMemo(() => scaleOf(rewards, "diverging", rewards.length ? (Math.min(...rewards) + Math.max(...rewards)) / 2 : 0), [played]);
  const flat = rewards.length > 1 && Math.max(...rewards) === Math.min(...rewards);
  const idle = rows[0]?.kind === "update" && rows[0].zero_spread;
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const deviation = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  return html`
    ${idle ? html`<p class="idle banner"><b>Taught nothing.</b> All ${rewards.length} rewards of this group are ${number(rewards[0])}: without a difference there is nothing to prefer.</p>`
      : rewards.length > 0 && html`<p class="soft">${rewards.length} ${rewards.length === 1 ? "rollout" : "rollouts"}, rewards ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}, mean ${number(mean)}, standard deviation ${number(deviation)}</p>`}
    ${tree && html`<ul class="tree" aria-label="Group tree"><${Node} node=${tree} rows=${played} run=${run} current=${current} scale=${flat ? null : scale} root=${true} /></ul>`}
    ${failed.length > 0 && html`<ul class="tree">${failed.map((row) => html`<li><a class="leaf" href=${trajectoryLink(run, row.key)}>sample ${row.sample_id} <span class="failure">failed: ${row.failure}</span></a></li>`)}</ul>`}`;
}

function Node({ node, rows, run, current, scale, root }) {
  const row = rows[node.members[0]];
  const text = textOf(row, node.from, node.to);
  const count = node.members.length;
  return html`<li class=${node.members.some((member) => rows[member].key === current) ? "current" : ""}>
    ${text && html`<details open=${text.length <= (root ? BEGIN + END : OPEN)}><summary><span class="soft">${root ? "all have" : count > 1 ? `${count} have` : ""} ${number(node.to - node.from)} ${node.to - node.from === 1 ? "token" : "tokens"}</span>
      <span class="stretch" dir="auto">${lines(text.length > BEGIN + END ? `${text.slice(0, BEGIN)} … ${text.slice(-END)}` : text)}</span></summary>
      ${text.length > BEGIN + END && html`<div class="text" dir="auto">${visible(text)}</div>`}</details>`}
    ${node.children.length
      ? html`<ul>${node.children.map((child) => html`<${Node} key=${child.members[0]} node=${child} rows=${rows} run=${run} current=${current} scale=${scale} />`)}</ul>`
      : html`<div class="leaves">${node.members.map((member) => html`<${Leaf} key=${member} row=${rows[member]} run=${run} current=${current} scale=${scale} />`)}${count > 1 && html`<span class="soft">the same text ${count} times</span>`}</div>`}
  </li>`;
}

const lines = (text) => visible(text).replaceAll("\n", "↵ ");

function Leaf({ row, run, current, scale }) {
  return html`<a class="leaf" aria-current=${row.key === current ? "true" : null} href=${trajectoryLink(run, row.key, { tab: "tree" })}
    onClick=${(event) => { event.preventDefault(); go(trajectoryLink(run, row.key, { tab: "tree" }), true); }}>
    sample ${row.sample_id}${row.branch > 0 ? ` branch ${row.branch}` : ""} · reward <${Shade} value=${row.reward} scale=${scale} />
    ${row.advantage !== null && html` · advantage ${signed(row.advantage)}`} · ${row.stop_reason === "length" ? html`<b>cut off</b>` : row.stop_reason}</a>`;
}

function textOf({ tokens }, from, to) {
  let text = "";
  for (let index = from; index < to; index++) text += tokens.id[index] === -1 ? "***" : tokens.text.texts[tokens.text.index[index]];
  return text;
}
