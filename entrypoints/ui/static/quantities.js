// Numbers of a row's tokens, from the columns of docs/trajectories.md. Pure.

export const PROMPT = 0, SAMPLED = 1, ENVIRONMENT = 2; // `token_kind`

const difference = (a, b) => (a === null || a === undefined || b === null || b === undefined ? null : a - b);

/** Returns importance ratios: trainer's over sampler's probability. 1 where the trainer's was not computed, because the
 * update began with the weights that sampled. */
export function ratio(tokens, index) {
  if (tokens.kind[index] !== SAMPLED) return null;
  const log = difference(tokens.trainer_logprob?.[index], tokens.logprob?.[index]);
  return log === null ? 1 : Math.exp(log);
}

/** Returns the token's strength in the gradient, |weight x advantage x ratio|: 0 of one that carries no loss. */
export function signal(tokens, index) {
  const [weight, advantage] = [tokens.weight?.[index], tokens.advantage?.[index]];
  if (weight === null || weight === undefined || advantage === null || advantage === undefined) return null;
  return tokens.kind[index] === SAMPLED ? Math.abs(weight * advantage * ratio(tokens, index)) : 0;
}

/** Returns the sum over rows of weight x loss of each token at the beginning of the update, where ratios are 1 and the
 * loss is minus the advantage: `policy/policy_loss` of a step with one optimizer step. Null if no row has weights. */
export function policyLoss(rows) {
  let sum = null;
  for (const tokens of rows) {
    if (!tokens.weight || !tokens.advantage) continue;
    sum ??= 0;
    for (let index = 0; index < tokens.weight.length; index++) {
      if (tokens.kind[index] === SAMPLED && tokens.weight[index]) {
        sum -= tokens.weight[index] * tokens.advantage[index];
      }
    }
  }
  return sum;
}

/** What tokens can be coloured by, in the order of the menu: `of(tokens, index)` returns the value of a token, `needs` is the
 * column without which there is none, `about` says how to read it. */
export const QUANTITIES = {
  advantage: {
    name: "Advantage", scale: "diverging", needs: "advantage", of: (tokens, i) => tokens.advantage[i],
    about: "Blue tokens were made more likely, orange ones less.",
  },
  share: {
    name: "Share of the gradient", scale: "sequential", needs: "weight", of: signal, percent: true,
    about: "|weight × advantage × ratio| of the token over that of all tokens of the step.",
  },
  logprob: {
    name: "−log-prob", scale: "sequential", needs: "logprob", of: (tokens, i) => -tokens.logprob[i],
    about: "In nats, when it was sampled. Strong colour: the token was unlikely.",
  },
  entropy: {
    name: "Entropy", scale: "sequential", needs: "entropy", of: (tokens, i) => tokens.entropy[i],
    about: "Of the policy's distribution at the token, in nats. Strong colour: a fork in the road.",
  },
  ratio: {
    name: "Importance ratio", scale: "diverging", centre: 1, needs: "trainer_logprob", of: ratio,
    about: "Probability under the trainer over that under the sampler. 1 is on policy.",
  },
  mismatch: {
    name: "Trainer − sampler", scale: "diverging", needs: "trainer_logprob",
    of: (tokens, i) => difference(tokens.trainer_logprob[i], tokens.logprob?.[i]),
    about: "Difference of log-probs: of other weights, or of the same weights in another engine.",
  },
  reference: {
    name: "Policy − reference", scale: "diverging", needs: "ref_logprob",
    of: (tokens, i) => difference(tokens.trainer_logprob?.[i] ?? tokens.logprob?.[i], tokens.ref_logprob[i]),
    about: "Difference of log-probs. Blue: likelier than it was before training.",
  },
  weight: {
    name: "Loss weight", scale: "sequential", needs: "weight", of: (tokens, i) => tokens.weight[i],
    about: "Of the token in the loss of its optimizer step. Crossed out: 0, so nothing was learned from it.",
  },
  value: {
    name: "Critic's value", scale: "diverging", needs: "value", of: (tokens, i) => tokens.value[i],
    about: "The outcome that the critic expected at the token.",
  },
  reward: {
    name: "Reward", scale: "diverging", needs: "reward", of: (tokens, i) => tokens.reward[i],
    about: "On the last token of each turn, as training used it.",
  },
  version: {
    name: "Weights' version", scale: "sequential", needs: "version",
    of: (tokens, i) => (tokens.version[i] < 0 ? null : tokens.version[i]),
    about: "Updates behind the weights that sampled the token.",
  },
};

/** Returns the names of the quantities that the row has. */
export const available = (tokens) =>
  Object.keys(QUANTITIES).filter((name) => tokens[QUANTITIES[name].needs]?.some((value) => value !== null));

/** Returns whether a sampled token taught nothing because its loss weight is 0. */
export const masked = (tokens, index) => tokens.kind[index] === SAMPLED && tokens.weight?.[index] === 0;

/** Returns whether the loss clipped the ratio of a sampled token. */
export const clipped = (tokens, index) => tokens.kind[index] === SAMPLED && tokens.clipped?.[index] === true;

/** Returns all numbers of a token as pairs of name and value, without those that the row has not. */
export function numbersOf(tokens, index, stepSignal) {
  const all = [
    ["token", tokens.id?.[index]], ["turn", tokens.turn?.[index] >= 0 ? tokens.turn[index] : null],
    ["advantage", tokens.advantage?.[index]], ["reward", tokens.reward?.[index]],
    ["log-prob", tokens.logprob?.[index]],
    ["probability", exponential(tokens.logprob?.[index])],
    ["trainer's log-prob", tokens.trainer_logprob?.[index]],
    ["reference's log-prob", tokens.ref_logprob?.[index]],
    ["ratio", tokens.trainer_logprob?.[index] == null ? null : ratio(tokens, index)],
    ["entropy", tokens.entropy?.[index]], ["value", tokens.value?.[index]],
    ["loss weight", tokens.weight?.[index]],
    ["share of the gradient", stepSignal && signal(tokens, index) !== null ? signal(tokens, index) / stepSignal : null],
    ["version", tokens.version?.[index] >= 0 ? tokens.version[index] : null],
  ];
  return all.filter(([, value]) => value !== null && value !== undefined);
}

const exponential = (value) => (value === null || value === undefined ? null : Math.exp(value));
