"""Texts with a planted property, and a scripted reader of them."""

import random
import re
from types import SimpleNamespace

from tandemrl.data.rows import Prompt
from tandemrl.evals import Sample
from tandemrl.tasks.generated import synthetic


class Adder:
    """A reader that adds without slips, goes on after any plain step, and copies an answer that is stated. Of jargon it
    understands nothing: it then guesses."""

    name = "adder"
    session = SimpleNamespace(close_engine=lambda: None)

    def write(self, jobs):
        return [self.answered(job) for job in jobs]

    def answered(self, job):
        part = job.part
        stated, jargon = re.findall(r"answer is (\d+)", part), synthetic.uses_jargon(part)
        start, *deltas = job.sample.transcript["numbers"]
        done = len(re.findall(r"\d (?:plus|minus)", part))
        if done:
            start = int(re.findall(r"\d+", part)[-1])
        found = stated[-1] if stated else 99 if jargon else start + sum(deltas[done:])
        return job.sample._replace(arm=self.name, given=job.given, text=f"{part}\\boxed{{{found}}}")

    def in_own_tokens(self, sample):
        return sample._replace(arm=self.name)

    def read(self, samples):
        return samples


class Slipping(Adder):
    """An adder that gets each step that it adds itself wrong with a probability."""

    name = "slipping"

    def __init__(self, error=0.2):
        self.error = error

    def answered(self, job):
        done = len(re.findall(r"\d (?:plus|minus)", job.part))
        rng = random.Random(f"{job.sample.key}/{job.given}")
        right = all(rng.random() >= self.error for _ in job.sample.transcript["numbers"][1 + done :])
        return super().answered(job) if right else job.sample._replace(arm=self.name, given=job.given, text="slip")


def planted(kind, seed, count=100):
    """Texts without slips, their prompts, and a grader."""
    rng, samples = random.Random(seed), []
    rows = synthetic.generate("plain", "heldout", count, seed)
    prompts = [Prompt(row, (1,)) for row in rows]
    for i, row in enumerate(rows):
        numbers = synthetic.Numbers(row.extra_info["start"], tuple(row.extra_info["deltas"]))
        problem = synthetic.Problem(numbers, row.messages[-1]["content"])
        plain = synthetic.solution(problem, rng, about_rate=0, plain_error=0)
        jargon = synthetic.jargon_solution(problem, rng, error=0)
        leak = f"The answer is {numbers.answer}.\n\n"
        text = {"plain": plain, "jargon": jargon, "leak": leak + (plain, jargon)[i % 2]}[kind]
        own = ("S9", 1, 1.0, "eos")
        told = {"correct": True, "transcript": {"numbers": [numbers.start, *numbers.deltas]}}
        samples.append(Sample(i, row.example_id, row.data_source, "solo", 0, i, text, [], 9, *own, **told))

    def grade(some):
        return [
            each._replace(correct=each.text.endswith(f"\\boxed{{{prompts[each.problem].row.ground_truth}}}"))
            for each in some
        ]

    return samples, prompts, grade
