"""mem0 as a memory layer in front of a server, as an endpoint that `openclaw-rl benchmark --by-user` can measure.

    python -m venv .venv-mem0 && .venv-mem0/bin/pip install mem0ai
    .venv-mem0/bin/python examples/mem0_endpoint.py --benchmark --quick

That starts `openclaw-rl serve` without any memory of its own, measures it with mem0 in front of it, and stops it; all
that follows --benchmark goes to `openclaw-rl benchmark`. Without --benchmark, the endpoint is there until Ctrl-C.

Nothing leaves this machine: memories lie in a folder, and their embeddings are counts of words, because the server has
no model for them. With --infer, the server's model extracts what is worth remembering; mem0's prompt for that has 8,600
tokens, more than the embedded model takes. Without it, each message is a memory as it stands.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["MEM0_TELEMETRY"] = "False"
from mem0 import Memory

DIMENSIONS = 256
KNOWN = "What this user said before, which you keep to:\n"


def embedding(text):
    """How often words with each digest are in a text."""
    counts = [0.01] * DIMENSIONS
    for word in text.lower().split():
        counts[int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "big") % DIMENSIONS] += 1.0
    return counts


def make_memory(options):
    own = f"http://127.0.0.1:{options.port}/v1"
    language = {"model": options.model, "api_key": "none", "openai_base_url": f"{options.server}/v1"}
    words = {"model": "words", "api_key": "none", "openai_base_url": own, "embedding_dims": DIMENSIONS}
    folder = tempfile.mkdtemp(prefix="mem0-")
    store = {"path": f"{folder}/vectors", "embedding_model_dims": DIMENSIONS, "collection_name": "memories"}
    return Memory.from_config(
        {
            "llm": {"provider": "openai", "config": language},
            "embedder": {"provider": "openai", "config": words},
            "vector_store": {"provider": "qdrant", "config": store},
            "history_db_path": f"{folder}/history.db",
        }
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    lock = threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/embeddings"):
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            found = [{"object": "embedding", "index": n, "embedding": embedding(str(t))} for n, t in enumerate(texts)]
            self.answer(200, {"object": "list", "data": found, "usage": {"prompt_tokens": 0, "total_tokens": 0}})
            return
        user = body.pop("user", None) or "everybody"
        asked, memory = body["messages"][-1], self.server.memory
        with self.lock:
            found = memory.search(asked["content"] or "-", filters={"user_id": user}, top_k=10, threshold=0.0)[
                "results"
            ]
        known = [{"role": "system", "content": KNOWN + "\n".join(one["memory"] for one in found)}] if found else []
        status, answer = self.forward({**body, "messages": [*known, *body["messages"]]})
        if status == 200 and asked["role"] == "user":
            with self.lock:
                memory.add([asked], user_id=user, infer=self.server.options.infer)
        self.answer(status, answer)

    def do_DELETE(self):
        with self.lock:
            self.server.memory.delete_all(user_id=self.path.rsplit("/", 1)[-1])
        self.answer(200, {})

    def forward(self, body):
        url = f"{self.server.options.server}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def start_server(url):
    """Start a server that remembers nothing, and wait until it is ready."""
    flags = ["--no-capture", "--no-notes", "--max-steps", "0", "--run-dir", tempfile.mkdtemp(prefix="mem0-server-")]
    server = subprocess.Popen(["openclaw-rl", "serve", "--proxy-port", url.rsplit(":", 1)[-1], *flags])
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz"):
                return server
        except OSError:
            time.sleep(0.5)
    sys.exit("The server did not start.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--infer", action="store_true")
    parser.add_argument("--benchmark", nargs=argparse.REMAINDER, help="options of openclaw-rl benchmark")
    options = parser.parse_args()
    started = start_server(options.server) if options.benchmark is not None else None
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.options = options
    # It asks this server for an embedding when it starts.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.memory = make_memory(options)
    own = f"http://127.0.0.1:{options.port}"
    print(f"mem0 in front of {options.server}: {own}/v1", flush=True)  # noqa: T201
    if started is None:
        threading.Event().wait()
    forget = ["--forget-url", f"{own}/memory/{{user}}"]
    try:
        command = ["openclaw-rl", "benchmark", "--name", "mem0", "--url", own, "--by-user", *forget]
        sys.exit(subprocess.call([*command, *options.benchmark]))
    finally:
        started.terminate()
        started.wait()


if __name__ == "__main__":
    main()
