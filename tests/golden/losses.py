"""Expected numbers of the losses, computed with plain float64 NumPy and loops, sharing no code with the library.

``python tests/golden/losses.py`` rewrites losses.json beside it; a test checks that the file is what this computes.
"""

import json
import math
from pathlib import Path

import numpy as np

# One row per sequence: authors of its tokens (-1 context, 0 junior, 1 senior). Row 2 has no senior token.
AUTHORS = [
    [-1, -1, 1, 0, 1, 1, 0],
    [-1, 1, 1, 1],
    [-1, 0, 0],
    [-1, -1, 0, 1, -1, -1, 1, 0, 0, 1],
    [-1, 1],
    [-1, 0, 1, 1, 0, 1],
]
GROUPS = [3, 3, 8, 3, 8, 5]
REWARDS = [1.0, 0.0, 0.5, 0.25, -1.0, 2.0]
CONSTANT = 12.0
CLIPS = {
    "grpo": ("token_mean", 0.2, 0.2, 3.0),
    "dr_grpo": ("token_sum_constant", 0.2, 0.2, None),
    "dapo": ("token_mean", 0.2, 0.28, None),
    "gspo": ("sequence_mean_token_mean", 3e-4, 4e-4, None),
    "cispo": ("token_mean", None, 4.0, None),
    "rloo": ("sequence_mean_token_sum", None, None, None),
    "reinforce_pp": ("token_mean", 0.2, 0.2, None),
    "ppo": ("token_mean", 0.2, 0.2, None),
}


def case():
    """Per-sequence lists of log-probs; differences reach past every clip range, and past the dual clip."""
    rng = np.random.default_rng(2606)
    rows = {"old": [], "new": [], "behaviour": [], "ref": [], "junior": [], "entropy": [], "values": []}
    for row, authors in enumerate(AUTHORS):
        size = len(authors)
        on = np.array(authors) >= 0
        old = -rng.gamma(1.5, 1.0, size)
        rows["old"].append(np.where(on, old, 0.0))
        rows["new"].append(np.where(on, np.minimum(old + rng.normal(0, 0.35, size), -0.01), 0.0))
        rows["behaviour"].append(np.where(on, old + rng.normal(0, 0.5, size), 0.0))
        rows["ref"].append(np.where(on, old + rng.normal(0, 0.3, size), 0.0))
        rows["junior"].append(np.where(on, old + rng.normal(0, 0.6, size), 0.0))
        rows["entropy"].append(np.where(on, rng.uniform(0, 3, size), 0.0))
        rows["values"].append(rng.normal(0, 1, size))
        if row == 1:  # negative advantage and a ratio above 3: the dual clip binds
            rows["old"][1][2] = -3.0
            rows["new"][1][2] = -1.5
    return {name: [np.round(r, 3).tolist() for r in value] for name, value in rows.items()}


def weight(author, junior_weight):
    return {-1: 0.0, 0: junior_weight, 1: 1.0}[author]


def group_advantages(kind):
    out = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        members = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        if len(members) == 1:
            out.append(0.0)
        elif kind == "group_normalised":
            out.append((reward - np.mean(members)) / (np.std(members, ddof=1) + 1e-6))
        elif kind == "group_centred":
            out.append(reward - np.mean(members))
        else:
            others = list(members)
            others.remove(reward)
            out.append(reward - np.mean(others))
    return [float(a) for a in out]


def whitened(values, weights):
    """Over repeated entries when the weights are whole numbers, which is what weights mean."""
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    variance = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / (total - 1)
    return [
        float((v - mean) / math.sqrt(variance + 1e-8)) if w > 0 else 0.0 for w, v in zip(weights, values, strict=True)
    ]


def gae(rewards, values, trained, gamma, lam):
    """One sequence: drop untrained tokens first (their rewards go to the trained token before), then the textbook."""
    actions = [i for i, on in enumerate(trained) if on]
    credited = []
    for k, i in enumerate(actions):
        end = actions[k + 1] if k + 1 < len(actions) else len(rewards)
        credited.append(sum(rewards[i:end]))
    advantages, running, following = [0.0] * len(rewards), 0.0, 0.0
    for k in reversed(range(len(actions))):
        delta = credited[k] + gamma * following - values[actions[k]]
        running = delta + gamma * lam * running
        advantages[actions[k]] = running
        following = values[actions[k]]
    return advantages


def surrogate(name, new, old, log_s, adv, low, high, dual):
    """(loss, d loss / d new) of one token, ``log_s`` being the log-ratio of its sequence."""
    ratio = math.exp(log_s if name == "gspo" else new - old)
    if name == "rloo":
        return -adv * new, -adv
    lower = -math.inf if low is None else 1 - low
    upper = math.inf if high is None else 1 + high
    clipped = min(max(ratio, lower), upper)
    if name == "cispo":
        return -clipped * adv * new, -clipped * adv
    if -clipped * adv > -ratio * adv:
        loss, slope = -clipped * adv, 0.0
    else:
        loss, slope = -ratio * adv, -ratio * adv
    if dual is not None and adv < 0 and loss > -dual * adv:
        loss, slope = -dual * adv, 0.0
    return loss, slope


def policy(name, data, adv, junior_weight, normalise_by, extras):
    """(loss, gradient rows) of one recipe over all sequences at once."""
    mode, low, high, dual = CLIPS[name]
    weights = [[weight(a, junior_weight) for a in row] for row in AUTHORS]
    response = sum(a >= 0 for row in AUTHORS for a in row)
    total = sum(map(sum, weights))
    counted = sum(sum(w) > 0 for w in weights)
    loss, gradient = 0.0, []
    for s, authors in enumerate(AUTHORS):
        w_s = sum(weights[s])
        columns = {key: value[s] for key, value in data.items()}
        pairs = list(zip(weights[s], columns["new"], columns["old"], columns["behaviour"], strict=True))
        log_s = sum(w * (n - o) for w, n, o, _ in pairs) / w_s if w_s else 0.0
        log_is = sum(w * (o - b) for w, _, o, b in pairs)
        row = []
        for i, author in enumerate(authors):
            w = weights[s][i]
            new, old = columns["new"][i], columns["old"][i]
            x, slope = surrogate(name, new, old, log_s, adv[s][i], low, high, dual)
            if extras:
                d = columns["ref"][i] - new
                x += 0.1 * (math.exp(d) - d - 1) - 0.01 * columns["entropy"][i]
                slope += 0.1 * (1 - math.exp(d))
                level = log_is if extras == "sequence" else old - columns["behaviour"][i]
                factor = min(math.exp(level), 1.5)
                x, slope = x * factor, slope * factor
            own = w_s if normalise_by == "weight" else sum(a >= 0 for a in authors)
            divisor = {
                "token_mean": total if normalise_by == "weight" else response,
                "sequence_mean_token_mean": counted * (own or 1),
                "sequence_mean_token_sum": counted,
                "token_sum_constant": counted * CONSTANT,
            }[mode]
            loss += w * x / divisor
            slope = w * slope / divisor
            if extras and author == 0:
                d = new - columns["junior"][i]
                loss += 0.05 * (math.exp(d) - d - 1) / response
                slope += 0.05 * (math.exp(d) - 1) / response
            row.append(slope)
        gradient.append(row)
    return loss, gradient


def golden():
    data = case()
    estimators = {kind: group_advantages(kind) for kind in ("group_normalised", "group_centred", "leave_one_out")}
    counts = [sum(weight(a, 0.0) for a in row) for row in AUTHORS]
    estimators["whitened"] = whitened(estimators["group_centred"], counts)
    per_token = []
    for s, authors in enumerate(AUTHORS):
        rewards = [0.0] * (len(authors) - 1) + [REWARDS[s]]
        per_token.append(gae(rewards, data["values"][s], [a == 1 for a in authors], 0.97, 0.9))
    sequence_advantages = {
        "dr_grpo": estimators["group_centred"],
        "rloo": estimators["leave_one_out"],
        "reinforce_pp": estimators["whitened"],
    }
    losses = []
    for name in CLIPS:
        by_row = sequence_advantages.get(name, estimators["group_normalised"])
        adv = per_token if name == "ppo" else [[a] * len(r) for a, r in zip(by_row, AUTHORS, strict=True)]
        for junior_weight in (0.0, 0.5, 1.0):
            for normalise_by in ("weight", "response"):
                for extras in (None, "token", "sequence"):
                    loss, gradient = policy(name, data, adv, junior_weight, normalise_by, extras)
                    losses.append(
                        {
                            "recipe": name,
                            "junior_weight": junior_weight,
                            "normalise_by": normalise_by,
                            "extras": extras,
                            "loss": round(loss, 12),
                            "gradient": [round(g, 12) for row in gradient for g in row],
                        }
                    )
    return {
        "authors": AUTHORS,
        "groups": GROUPS,
        "rewards": REWARDS,
        "constant": CONSTANT,
        "channels": data,
        "advantages": {key: [round(a, 12) for a in value] for key, value in estimators.items()},
        "gae": {"gamma": 0.97, "lam": 0.9, "advantages": [[round(a, 12) for a in row] for row in per_token]},
        "losses": losses,
    }


if __name__ == "__main__":
    text = json.dumps(golden(), indent=None, separators=(",", ":"))
    Path(__file__).with_suffix(".json").write_text(text.replace('{"recipe"', '\n{"recipe"') + "\n")
