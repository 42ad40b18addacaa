// The filter and the order of a report's rows: the part of the server's language that joins comparisons by `and`. Pure.

const COMPARISON = /^\s*([\w.]+)\s*(<=|>=|!=|==|=|<|>|\bcontains\b|\bis\s+not\s+null\b|\bis\s+null\b)\s*("[^"]*"|'[^']*'|[^\s"']*)\s*$/i;

/** Error of a filter that cannot be read; its message is a sentence. */
export class FilterError extends Error {
  code = "invalid_filter";
}

/** Returns a function that says whether a row matches `filter`; the columns are those of `rows`. */
export function matcher(filter, rows) {
  if (!filter.trim()) return () => true;
  const tests = split(filter).map((part) => comparison(part, rows));
  return (row) => tests.every((test) => test(row));
}

/** Returns a comparison of rows by `sort`, such as `-step,reward`: a minus is descending, rows without a value are last. */
export function sorter(sort) {
  const keys = sort.split(",").filter(Boolean).map((key) => [key.replace(/^-/, ""), key.startsWith("-") ? -1 : 1]);
  return (first, second) => {
    for (const [name, direction] of keys) {
      const [a, b] = [value(first, name), value(second, name)];
      if (a === b) continue;
      if (a === null) return 1;
      if (b === null) return -1;
      return a < b ? -direction : direction;
    }
    return 0;
  };
}

/** Returns the parts of a filter between the words `and` that are not inside quotes. */
function split(filter) {
  const parts = [""];
  for (const piece of filter.match(/"[^"]*"|'[^']*'|\band\b|[^"'a]+|./gi) ?? []) {
    if (/^and$/i.test(piece)) parts.push("");
    else parts[parts.length - 1] += piece;
  }
  return parts;
}

function value(row, name) {
  if (name.startsWith("part.")) return row.reward_parts?.[name.slice(5)] ?? null;
  if (name.startsWith("metric.")) return row.metrics?.[name.slice(7)] ?? null;
  return row[name] ?? null;
}

function comparison(part, rows) {
  const quoted = /^\s*("[^"]*"|'[^']*')\s*$/.exec(part);
  if (quoted) return (row) => contains(`${row.prompt}\n${row.response}`, unquoted(quoted[1]));
  const flag = /^\s*(not\s+)?(star|zero_spread)\s*$/i.exec(part);
  if (flag) return (row) => Boolean(value(row, flag[2].toLowerCase())) === !flag[1];
  const found = COMPARISON.exec(part);
  if (!found) {
    throw new FilterError(`A report reads comparisons joined by "and", such as reward < 0.5 and turns > 3, and not "${part.trim()}".`);
  }
  const [, name, spelled, given] = found;
  const known = /^(part|metric)\./.test(name) || name === "text" || rows.some((row) => name in row);
  if (!known) throw new FilterError(`The filter has no column "${name}".`);
  const operator = spelled.toLowerCase().replace(/\s+/g, " ");
  if (operator === "is null") return (row) => value(row, name) === null;
  if (operator === "is not null") return (row) => value(row, name) !== null;
  if (!given) throw new FilterError(`The filter compares "${name}" with nothing: write a value after ${operator}.`);
  const text = unquoted(given);
  if (operator === "contains") {
    return (row) => contains(name === "text" ? `${row.prompt}\n${row.response}` : String(value(row, name) ?? ""), text);
  }
  const compare = OPERATORS[operator];
  return (row) => {
    const held = value(row, name);
    return held !== null && compare(held, typeof held === "number" ? Number(text) : text);
  };
}

const OPERATORS = {
  "=": (a, b) => a === b, "==": (a, b) => a === b, "!=": (a, b) => a !== b,
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
};
const unquoted = (text) => text.replace(/^(["'])(.*)\1$/s, "$2");
const contains = (text, part) => text.toLowerCase().includes(part.toLowerCase());
