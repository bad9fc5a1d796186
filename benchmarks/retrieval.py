"""What search in a corpus costs: `tandemrl data index`, and `retrieval.index` in a process that tools run in.

    OMP_NUM_THREADS=1 python benchmarks/retrieval.py --documents 1000000 --out benchmarks/results/retrieval.json

Prints one JSON object. The documents are generated: 12 to 28 words each out of 50,000, drawn by Zipf's law; so are the
queries, of 2 to 6 words. Building and searching are done in processes of their own. Memory is what a process has for
itself, and with the pages of the files that it reads. Seconds per query are without the first tenth of the queries.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import about

from tandemrl.rollout.envs.bm25 import Corpus, write_corpus

WORDS, ZIPF = 50_000, 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--top-n", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    parser.add_argument("--part", choices=("build", "search"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(build(options.folder) if options.part == "build" else search(options)))
        return
    versions = about()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        write_documents(corpus, options.documents)
        result: dict[str, Any] = {
            **versions,
            "benchmark": "retrieval",
            **{key: getattr(options, key) for key in ("documents", "queries", "top_n")},
            "corpus_mb": megabytes(corpus.stat().st_size),
        }
        for part in ("build", "search"):
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--folder", folder]
            result[part] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        files = Path(folder, "index").iterdir()
        result |= {"index_mb": megabytes(sum(file.stat().st_size for file in files))}
    result |= {"load": [round(x, 2) for x in os.getloadavg()], "command": shlex.join(["python", *sys.argv])}
    print(json.dumps(result), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


def vocabulary() -> list[str]:
    """Made-up words of 4 to 9 letters."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return ["".join(draw.choice(letters, size=draw.integers(4, 10))) for _ in range(WORDS)]


def drawn(draw: np.random.Generator, count: int) -> np.ndarray:
    """Numbers of words by Zipf's law, cut off at the vocabulary."""
    weights = 1 / np.arange(1, WORDS + 1) ** ZIPF
    return np.searchsorted(np.cumsum(weights / weights.sum()), draw.random(count)).clip(max=WORDS - 1)


def write_documents(path: Path, count: int) -> None:
    words, draw = np.array(vocabulary()), np.random.default_rng(1)
    with path.open("w") as file:
        for begin in range(0, count, 10_000):
            lengths = draw.integers(12, 29, size=min(10_000, count - begin))
            texts = np.split(words[drawn(draw, int(lengths.sum()))], np.cumsum(lengths)[:-1])
            for number, text in enumerate(texts, begin):
                file.write(
                    json.dumps({"id": f"d{number}", "title": " ".join(text[:2]), "body": " ".join(text[2:])}) + "\n"
                )


def build(folder: Path) -> dict[str, float]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    write_corpus(folder / "corpus.jsonl", folder / "index")
    seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_mb": memory("VmHWM")}


def search(options: argparse.Namespace) -> dict[str, Any]:
    words, draw = vocabulary(), np.random.default_rng(2)
    queries = [" ".join(words[i] for i in drawn(draw, int(draw.integers(2, 7)))) for _ in range(options.queries)]
    before = memory("RssAnon")
    begin = time.perf_counter()
    corpus = Corpus(options.folder / "index")
    opened = time.perf_counter() - begin
    seconds, found = [], 0
    for query in queries:
        begin = time.perf_counter()
        found += len(corpus.search(query, options.top_n))
        seconds.append(time.perf_counter() - begin)
    low, median, high = np.quantile(seconds[len(seconds) // 10 :], [0.05, 0.5, 0.95]).round(5).tolist()
    return {
        "seconds_to_open": round(opened, 3),
        "seconds_per_query": median,
        "interval_90": [low, high],
        "first_query_s": round(seconds[0], 4),
        "found_per_query": found / len(queries),
        "own_mb": round(memory("RssAnon") - before, 1),
        "with_files_mb": memory("VmRSS"),
    }


def memory(field: str) -> float:
    """A field of /proc/self/status, in megabytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return round(int(line.split()[1]) / 1024, 1)


def megabytes(count: int) -> float:
    return round(count / 2**20, 1)


if __name__ == "__main__":
    main()
