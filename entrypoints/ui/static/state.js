// The address of the page as a value, and hooks for what many screens do: asking, keys, the theme.

import { useEffect, useRef, useState } from "./vendor/preact.js";

/** Returns the address's parts and parameters: `#/r/RUN/t?sort=x` is `{ parts: ["r", "RUN", "t"], query: { sort: "x" } }`. */
export function readRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part; // a broken escape in a hand-written address
    }
  });
  return { parts, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** Returns the address of these parts; parameters that are null, undefined or empty are left out. */
export function link(parts, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(kept).toString();
  return "#/" + parts.map(encodeURIComponent).join("/") + (search ? "?" + search : "");
}

const WORD = { update: "t", evaluation: "e", step: "t", eval: "e" };

/** Returns the permanent address of a trajectory: `#/r/RUN/t/STEP/GROUP/SAMPLE`, with `e` for one of an evaluation. */
export function trajectoryLink(run, key, query = {}) {
  const [kind, step, group, sample, branch] = key.split("/");
  return link(["r", run, WORD[kind], step, group, sample], { branch: branch === "0" ? null : branch, ...query });
}

/** Returns the key of the trajectory that an address names. */
export const keyOf = ({ parts, query }) => [parts[2] === "e" ? "eval" : "step", ...parts.slice(3, 6), query.branch ?? "0"].join("/");

/** Goes to an address; `replace` leaves no entry in the history. */
export function go(address, replace = false) {
  if (!replace) location.hash = address;
  else {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}

/** Returns the address, now and whenever it changes. */
export function useRoute() {
  const [route, setRoute] = useState(readRoute);
  useEffect(() => {
    const changed = () => setRoute(readRoute());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

/** Returns `{ value, error, asking }` of what `ask` promises; it is asked again when one of `inputs` changes, and the old
 * value stays until the new one is there, or `inputs[0]` has changed. */
export function useAnswer(ask, inputs) {
  const [answer, setAnswer] = useState({ value: null, error: null, asking: true, subject: inputs[0] });
  useEffect(() => {
    let wanted = true;
    const ending = new AbortController();
    setAnswer((old) => (old.subject === inputs[0] ? { ...old, asking: true } : { value: null, error: null, asking: true, subject: inputs[0] }));
    ask(ending.signal).then(
      (value) => wanted && setAnswer({ value, error: null, asking: false, subject: inputs[0] }),
      (error) => wanted && error.name !== "AbortError" &&
        setAnswer((old) => ({ value: old.value, error, asking: false, subject: inputs[0] })),
    );
    return () => {
      wanted = false;
      ending.abort();
    };
  }, inputs);
  return answer.subject === inputs[0] ? answer : { value: null, error: null, asking: true };
}

/** Calls `keys[event.key]` for keys that are pressed outside of fields and without modifiers. */
export function useKeys(keys) {
  const current = useRef(keys);
  current.current = keys;
  useEffect(() => {
    const pressed = (event) => {
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
      if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      const action = current.current[event.key];
      // Enter and arrows are a link's, a button's or a list of tabs' own where one of these has the focus.
      if (action && !(/^(Enter|Arrow)/.test(event.key) && event.target.closest("a, button, summary"))) {
        event.preventDefault();
        action();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

/** Returns whether a media query matches, now and whenever that changes. */
export function useMedia(query) {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const changed = () => setMatches(media.matches);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, [query]);
  return matches;
}

const THEME = "rollgrad-theme";

/** Returns what the browser has kept under a name after `change`, an item to keep; null where it keeps nothing, as in the
 * frames in which notebooks show a report. */
export function remembered(storage, name, change) {
  try {
    if (change !== undefined) globalThis[storage].setItem(name, change);
    return globalThis[storage].getItem(name);
  } catch {
    return null;
  }
}

/** Returns the theme (`light` or `dark`) and a function that switches it. */
export function useTheme() {
  const system = useMedia("(prefers-color-scheme: dark)") ? "dark" : "light";
  const [chosen, setChosen] = useState(() => remembered("localStorage", THEME));
  const theme = chosen ?? system;
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  const toggle = () => {
    const next = theme === "dark" ? "light" : "dark";
    remembered("localStorage", THEME, next);
    setChosen(next);
  };
  document.documentElement.dataset.theme = theme; // before the first paint, and for charts that read colours now
  return [theme, toggle];
}
