// One run: what all its screens know of it, kept up to date while it goes on.

import { html, useEffect, useState } from "./vendor/preact.js";
import { Compare } from "./compare.js";
import { Overview } from "./overview.js";
import { Answer } from "./parts.js";
import { Rescored } from "./rescored.js";
import { useAnswer } from "./state.js";
import { Trajectories } from "./trajectories.js";
import { Trajectory } from "./trajectory.js";

export function Run({ source, run, route, theme }) {
  const [state, setState] = useState({ version: null });
  useEffect(() => source.listen(run, setState), [run]);
  const answer = useAnswer(() => source.run(run), [run, state.version]);
  const screen = route.parts[2] ?? "";
  return html`<${Answer} answer=${answer}>${(facts) => {
    const shared = { source, run, facts, route, theme, version: state.version };
    if (screen === "t" || screen === "e") {
      return route.parts.length > 5 ? html`<${Trajectory} ...${shared} />` : html`<${Trajectories} ...${shared} />`;
    }
    if (screen === "rescored") return html`<${Rescored} ...${shared} />`;
    if (screen === "compare") return html`<${Compare} ...${shared} />`;
    return html`<${Overview} ...${shared} />`;
  }}<//>`;
}
