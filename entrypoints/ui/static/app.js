// The page: header, keys that work everywhere, and the screen that the address names.

import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";
import { openSource } from "./source.js";
import { link, useKeys, useRoute, useTheme } from "./state.js";
import { visible } from "./text.js";
import { Runs } from "./runs.js";
import { Run } from "./run.js";

const KEYS = [
  ["j, k", "next, previous row or trajectory"], ["Enter", "open the chosen row"], ["g", "the group as a tree, and back"],
  ["[, ]", "previous, next step"], ["/", "search"], ["s", "star"], ["1 … 5", "Conversation, Tokens, Group tree, Numbers, Raw"],
  ["← →", "tokens, one after the other, once one is chosen"], ["Esc", "back to the list"], ["?", "this help"],
];

function Page({ source, only, runs }) {
  const route = useRoute();
  const [theme, toggle] = useTheme();
  const help = useRef();
  useKeys({ "?": () => help.current.showModal() });
  const named = route.parts[0] === "r" && route.parts[1];
  const run = only ?? named;
  const name = run && visible(runs.find(({ id }) => id === run)?.name ?? run); // a run that began meanwhile has its id
  useEffect(() => {
    document.title = run ? `${name} · rollgrad` : "rollgrad";
  }, [name]);
  const screens = [["", "Overview"], ["t", "Trajectories"], ["compare", "Compare"]];
  const open = route.parts[2] === "e" ? "t" : route.parts[2] ?? "";
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href=${link([])}>rollgrad</a>
      ${run && html`<nav aria-label="Screens">
        ${!only && html`<a href=${link([])}>Runs</a><span class="slash" aria-hidden="true">/</span><a class="name" href=${link(["r", run])}>${name}</a>`}
        <span class="screens">${screens.map(([name, title]) => html`<a href=${link(["r", run, name].filter(Boolean))} aria-current=${open === name ? "page" : null}>${title}</a>`)}</span>
      </nav>`}
      <span class="grow"></span>
      <button class="quiet" onClick=${() => help.current.showModal()} aria-label="Keys">?</button>
      <button class="quiet" onClick=${toggle} aria-label="Use the ${theme === "dark" ? "light" : "dark"} theme">${theme === "dark" ? "☀" : "☾"}</button>
    </header>
    <main id="main" tabindex="-1">
      ${run ? html`<${Run} key=${run} source=${source} run=${run} route=${route} theme=${theme} />`
        : html`<${Runs} source=${source} route=${route} theme=${theme} />`}
    </main>
    <dialog ref=${help} aria-labelledby="keys" onClick=${(event) => event.target === help.current && help.current.close()}>
      <h2 id="keys">Keys</h2>
      <dl>${KEYS.map(([key, does]) => html`<dt><kbd>${key}</kbd></dt><dd>${does}</dd>`)}</dl>
      <button onClick=${() => help.current.close()}>Close</button>
    </dialog>`;
}

/** Shows the page once it is known whether it is of one run alone. */
function Start({ source }) {
  const [runs, setRuns] = useState(null);
  useEffect(() => {
    source.runs().then(setRuns, (error) => setRuns({ error }));
  }, []);
  if (!runs) return html`<p class="soft start" role="status">Reading …</p>`;
  if (runs.error) return html`<p class="problem start" role="alert">${runs.error.message}</p>`;
  return html`<${Page} source=${source} only=${runs.single ? runs.runs[0]?.id : null} runs=${runs.runs} />`;
}

openSource().then(
  (source) => render(html`<${Start} source=${source} />`, document.getElementById("page")),
  (error) => (document.getElementById("page").textContent = `The page cannot be read: ${error.message}`),
);
