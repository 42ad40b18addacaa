// Where the page's data come from: the server that sent it (`rollgrad ui`), or the file that it is in (`report.html`).
// Both have the same methods; adapters/servers/ui.py has the server's addresses.

import { matcher, sorter } from "./filter.js";
import { remembered } from "./state.js";

const MOST_POINTS = 2000; // of a curve: more than a chart has pixels
const SECRET = "rollgrad-token";

/** Error whose message is a sentence for the reader. */
export class Refused extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

class Server {
  live = true;

  constructor() {
    const given = /^#token=([^&]+)/.exec(location.hash);
    if (given) {
      this.secret = decodeURIComponent(given[1]);
      remembered("sessionStorage", SECRET, this.secret);
      history.replaceState(null, "", location.pathname + location.search + "#/");
    }
  }

  headers() {
    const secret = this.secret ?? remembered("sessionStorage", SECRET);
    return secret ? { Authorization: `Bearer ${secret}` } : {};
  }

  async ask(path, options = {}) {
    let answer;
    try {
      answer = await fetch("api/" + path, { ...options, headers: { ...this.headers(), ...options.headers } });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The server does not answer: start `rollgrad ui` again.", "unreachable");
    }
    const body = await answer.json().catch((error) => {
      if (error.name === "AbortError") throw error; // nobody waits for the rest of the answer
      return null;
    });
    if (answer.status === 401) {
      throw new Refused("This page needs the server's token: open its address with #token=... and the token in place of the dots.", "no_token");
    }
    if (!answer.ok) {
      throw new Refused(body?.error?.message ?? `The server answered ${answer.status}.`, body?.error?.code ?? String(answer.status));
    }
    if (body === null) throw new Refused("The server's answer ended early: load the page again.", "cut");
    return body;
  }

  runs = () => this.ask("runs");
  run = (run) => this.ask(of(run));
  metrics = (run) => this.ask(`${of(run)}/metrics?points=${MOST_POINTS}`);
  findings = (run) => this.ask(`${of(run)}/findings`);
  trajectories = (run, query, signal) => this.ask(`${of(run)}/trajectories?${new URLSearchParams(query)}`, { signal });
  points = (run, query, signal) => this.ask(`${of(run)}/points?${new URLSearchParams(query)}`, { signal });
  trajectory = (run, key) => this.ask(`${of(run)}/trajectory/${key}`);
  group = (run, kind, step, group) => this.ask(`${of(run)}/group/${kind}/${step}/${group}`);
  compare = (run) => this.ask(`${of(run)}/compare`);
  compared = (run, prompt) => this.ask(`${of(run)}/compare/${encodeURIComponent(prompt)}`);
  rescored = (run, name) => this.ask(`${of(run)}/rescored/${encodeURIComponent(name)}`);
  help = () => this.ask("filter");
  note = (run, note) =>
    this.ask(`${of(run)}/notes`, {
      method: "POST", body: JSON.stringify(note), headers: { "Content-Type": "application/json" },
    });

  /** Calls `heard(state)` whenever the run has changed; returns a function that ends it. */
  listen(run, heard) {
    let [ended, reading] = [false, null];
    const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
    const read = async () => {
      reading = new AbortController();
      const answer = await fetch(`api/${of(run)}/events`, { headers: this.headers(), signal: reading.signal });
      if (!answer.ok || !answer.body) throw new Error(String(answer.status));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let kept = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) return;
        const events = (kept + value).split("\n\n");
        kept = events.pop();
        for (const event of events) {
          const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
          if (data) heard(JSON.parse(data));
        }
      }
    };
    // A browser has six connections to a server: tabs in the background leave them to the one that is read.
    const shown = () =>
      new Promise((done) => {
        if (!document.hidden) done();
        else document.addEventListener("visibilitychange", () => done(shown()), { once: true });
      });
    const turned = () => document.hidden && reading?.abort();
    document.addEventListener("visibilitychange", turned);
    (async () => {
      while (!ended) {
        await shown();
        if (!ended) await read().catch(() => null); // a server that went away, or a proxy that keeps events back: asked again
        if (!document.hidden) await pause(2000);
      }
    })();
    return () => {
      ended = true;
      reading?.abort();
      document.removeEventListener("visibilitychange", turned);
    };
  }
}

/** The data of a report: one run, some of its trajectories, and nothing that changes. */
class Kept {
  live = false;

  constructor(data) {
    this.data = data;
    this.made = data.made;
    // With whole texts, of which the rows of a list have the beginning: a filter may ask for what comes later.
    this.rows = data.trajectories.rows.map((row) => {
      const { prompt, response, label } = data.trajectory[row.key];
      return { ...row, prompt: prompt ?? row.prompt, response: response ?? row.response, label: label ?? row.label };
    });
  }

  runs = async () => ({ root: "", single: true, runs: [this.data.run], problems: [] });
  run = async () => this.data.run;
  metrics = async () => this.data.metrics;
  findings = async () => this.data.findings;
  compare = async () => this.data.compare ?? { metric: "score", steps: [], prompts: [] };
  compared = async (run, prompt) => this.data.compared?.[prompt] ?? missing();
  trajectory = async (run, key) => this.data.trajectory[key] ?? missing();
  rescored = async () => missing();
  listen = () => () => {};
  help = async () => ({
    help: [
      ["reward < 0.5 and turns > 3", "numbers"],
      ["stop_reason = length", "texts"],
      ["response contains \"so\"", "parts of texts, in any case"],
    ],
  });

  async trajectories(run, { filter = "", sort = "", page = 0, size = 200 }) {
    const rows = this.rows.filter(matcher(filter, this.rows)).sort(sorter(sort));
    return { total: this.data.trajectories.total, matched: rows.length, page, size, rows: rows.slice(page * size, (page + 1) * size), problems: [] };
  }

  async points(run, { filter = "", x, y, color }) {
    const rows = this.rows.filter(matcher(filter, this.rows));
    const column = (name) => rows.map((row) => row[name] ?? null);
    return { matched: rows.length, shown: rows.length, keys: column("key"), x: column(x), y: column(y), color: color && column(color) };
  }

  async group(run, kind, step, group) {
    const begin = `${kind}/${step}/${group}/`;
    const rows = Object.entries(this.data.trajectory).filter(([key]) => key.startsWith(begin)).map(([, row]) => row);
    if (!rows.length) missing();
    return { ...rows[0], rows };
  }
}

const of = (run) => `run/${encodeURIComponent(run)}`;

function missing() {
  throw new Refused("The report does not have this: it keeps a choice of the run's trajectories, and `rollgrad ui` shows all.", "not_kept");
}

/** Returns the source that the page was made with. */
export async function openSource() {
  const kept = document.getElementById("data");
  if (!kept) return new Server();
  const packed = Uint8Array.from(atob(kept.textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Kept(JSON.parse(await new Response(stream).text()));
}
