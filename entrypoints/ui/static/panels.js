// The charts that a run is read by, in this order; each is shown if the run has one of its metrics. Every other metric is
// found by search. `stack`: parts of the last curve, the rest of which is the topmost layer. `unlessZero`: left out where it
// is always 0, like the divergence of a policy from itself.

export const PANELS = [
  { title: "Reward", unit: "mean of the rollout", curves: { "reward/mean": "reward" } },
  { title: "Evaluation", unit: "held-out prompts", curves: { "eval/pass@1": "pass@1" } },
  { title: "Response length", unit: "mean tokens", curves: { "rollout/response_length_mean": "length" } },
  { title: "Truncated replies", unit: "share of the rollout", curves: { "rollout/truncated_share": "truncated" } },
  { title: "Groups without spread", unit: "share: they teach nothing", curves: { "rollout/zero_spread_share": "no spread" } },
  { title: "Entropy", unit: "nats per token", curves: { "rollout/entropy": "sampled", "policy/entropy": "in the update" } },
  { title: "KL divergence", unit: "nats per token", unlessZero: true, curves: { "policy/ref_kl": "to reference", "policy/approx_kl": "to old policy" } },
  { title: "Trainer against engine", unit: "KL, nats per token", unlessZero: true, curves: { "policy/mismatch_kl": "mismatch" } },
  { title: "Clipped ratios", unit: "share of tokens", unlessZero: true, curves: { "policy/clip_low_share": "below", "policy/clip_high_share": "above" } },
  { title: "Gradient norm", unit: "before clipping", curves: { "policy/grad_norm": "policy", "train/grad_norm": "norm" } },
  { title: "Staleness", unit: "updates", unlessZero: true, curves: { "staleness/mean": "mean", "staleness/max": "greatest" } },
  { title: "Training loss", unit: "mean of the optimizer step", curves: { "train/loss": "loss" } },
  { title: "Held-out loss", unit: "mean of the held-out examples", curves: { "eval/loss": "loss" } },
  { title: "Accuracy", unit: "share", curves: { "train/accuracy": "training", "eval/accuracy": "held out" } },
  { title: "Rewards of pairs", unit: "beta × log-ratio", curves: { "train/chosen_reward": "chosen", "train/rejected_reward": "rejected" } },
  { title: "Rewards of replies", unit: "beta × log-ratio", curves: { "train/desirable_reward": "good", "train/undesirable_reward": "bad" } },
  { title: "Judged steps", unit: "share of steps", curves: { "train/step_accuracy": "right", "eval/step_accuracy": "right, held out", "train/error_f1": "F1 of errors" } },
  { title: "Divergence from the teacher", unit: "nats per token", curves: { "train/divergence": "training", "eval/divergence": "held out" } },
  {
    title: "Time per step", unit: "seconds", stack: true,
    curves: { "time/generate_s": "generation", "time/experience_s": "experience", "time/update_s": "update", "time/sync_s": "weights", "time/step_s": "other" },
  },
];

/** Returns the panels that have something to show, of `series` by metric. */
export const drawn = (series) =>
  [PANELS[0], passed(series), meanScore(series), ...PANELS.slice(2)].filter(({ curves, unlessZero }) =>
    Object.keys(curves).some((name) => series[name]?.values.some((value) => value !== null && !(unlessZero && value === 0))));

const MOST_SETS = 5; // curves of single datasets beside that of all: a chart has six colours

/** Returns the panel of evaluations, with a curve for each dataset where there are several, but not many. */
function passed(series) {
  const sets = Object.keys(series).map((name) => /^eval\/(.+)\/pass@1$/.exec(name)?.[1]).filter((name) => name !== undefined);
  if (sets.length < 2 || sets.length > MOST_SETS) return PANELS[1];
  return { ...PANELS[1], unit: "pass@1 on held-out prompts", curves: { "eval/pass@1": "all", ...Object.fromEntries(sets.map((name) => [`eval/${name}/pass@1`, name])) } };
}

/** Returns the panel of mean scores in evaluations, which says more than the share that passes where scores are not 0 or 1. */
function meanScore(series) {
  const passed = JSON.stringify(series["eval/pass@1"]);
  const names = Object.keys(series).filter((name) => name.startsWith("eval/mean@") && JSON.stringify(series[name]) !== passed);
  return { title: "Held-out score", unit: "mean of the held-out replies", curves: Object.fromEntries(names.map((name) => [name, name.slice(5)])) };
}
