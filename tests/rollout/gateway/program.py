"""A program that asks a server of OpenAI's interface, with the standard library alone. What it does wrong is its
argument; the row comes on its standard input."""

import json
import os
import subprocess
import sys
import time
import urllib.request


def ask(messages):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]


def main(fault):
    row = json.loads(sys.stdin.readline())
    said = ask(row["messages"])
    if fault == "crash":
        raise RuntimeError("no luck")
    if fault in ("hang", "child"):
        print(os.getpid(), flush=True)
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        subprocess.Popen(command, stdout=None if fault == "hang" else subprocess.DEVNULL)
        time.sleep(1000 * (fault == "hang"))
    if fault == "flood":
        for _ in range(2000):
            print("<|im_end|>" * 200)
            print("noise" * 200, file=sys.stderr)
    ask([*row["messages"], said, {"role": "user", "content": "cd"}])
    if fault == "object":
        print(json.dumps({"a": 1}))
        return
    print("some log")
    print(json.dumps({"score": 0.5, "counts": {"agent/asked": 2}}))


main(*sys.argv[1:])
